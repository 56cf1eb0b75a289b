"""Turns a Generate message into SGLang's own request. Imports SGLang: only the engine process may import this."""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Callable, Iterable

import numpy as np
from sglang.srt.managers.io_struct import TokenizedEmbeddingReqInput, TokenizedGenerateReqInput
from sglang.srt.observability.req_time_stats import SchedulerReqTimeStats
from sglang.srt.sampling.sampling_params import TOP_K_ALL, SamplingParams

from gpu_scheduler.engines.sglang.base.errors import RejectedRequest
from gpu_scheduler.policy import permitted_grammars
from protos import common_pb2, engine_pb2


def _any_seed() -> int:
    """63 random bits."""
    return secrets.randbits(63)


def sampling_params(
    sampling: common_pb2.Sampling,
    prompt_tokens: int,
    resumed_tokens: int,
    context_tokens: int,
    vocab_size: int,
    fresh_seed: Callable[[], int] = _any_seed,
) -> SamplingParams:
    """SGLang's sampling parameters. The last `resumed_tokens` of the prompt are output from where the request ran
    before. A request without a seed gets a fresh one, so that its tokens do not depend on being retracted and computed
    again. Raises RejectedRequest."""
    left = context_tokens - prompt_tokens
    if left < (0 if sampling.prompt_only else 1):
        raise RejectedRequest(f"the prompt has {prompt_tokens} tokens, the model's context {context_tokens}")
    max_new = min(sampling.max_new_tokens, left) if sampling.max_new_tokens > 0 else left
    kind = sampling.WhichOneof("grammar")
    if kind is not None:
        if problem := permitted_grammars.problem(kind, getattr(sampling, kind)):
            raise RejectedRequest(problem)
        if sampling.min_new_tokens or sampling.ignore_eos:
            raise RejectedRequest(
                "a grammar decides where the answer ends: it cannot be combined with min_tokens or ignore_eos"
            )
    if outside := [token for token in sampling.stop_token_ids if not 0 <= token < vocab_size]:
        # SGLang writes to the columns of stop tokens in the logits.
        raise RejectedRequest(f"stop token {outside[0]} is outside the vocabulary of {vocab_size}")
    if sampling.logprobs and sampling.top_logprobs > vocab_size:
        raise RejectedRequest(f"{sampling.top_logprobs} top_logprobs of a vocabulary of {vocab_size}")
    if outside := [token for token in sampling.label_token_ids if not 0 <= token < vocab_size]:
        raise RejectedRequest(f"label token {outside[0]} is outside the vocabulary of {vocab_size}")
    if sampling.label_token_ids and not sampling.prompt_only:
        raise RejectedRequest("label tokens are scored after a prompt without an answer only")
    if sampling.prompt_only:
        max_new, kind = 0, None  # SGLang would ask the grammar for a token that is never drawn
    params = SamplingParams(
        max_new_tokens=max_new,
        min_new_tokens=min(max(0, sampling.min_new_tokens - resumed_tokens), max_new),
        temperature=sampling.temperature,
        top_p=sampling.top_p or 1.0,
        min_p=sampling.min_p,
        top_k=sampling.top_k if sampling.top_k > 0 else TOP_K_ALL,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        repetition_penalty=sampling.repetition_penalty or 1.0,
        stop_token_ids=set(sampling.stop_token_ids) or None,
        ignore_eos=sampling.ignore_eos,
        sampling_seed=sampling.seed & (2**63 - 1) if sampling.HasField("seed") else fresh_seed(),
        **({} if kind is None else {kind: getattr(sampling, kind)}),
    )
    try:
        params.verify(vocab_size)
    except ValueError as error:
        raise RejectedRequest(str(error)) from None
    params.normalize(_NeedsNoTokenizer())
    return params


class _NeedsNoTokenizer:
    """A stand-in for the tokenizer that `normalize` takes: it would need one for stop strings (the gateway matches
    those) and for `min_new_tokens`, where the ids of the end-of-sequence tokens suffice (`EosIds`)."""


class EosIds:
    """The end-of-sequence tokens: all that SGLang's scheduler needs of a tokenizer here."""

    def __init__(self, ids: Iterable[int], vocab_size: int) -> None:
        """Leaves out ids that are in no row of logits: SGLang writes to their columns. A model without any gets the one
        behind the vocabulary, where SGLang pads, which is never drawn."""
        known = {token for token in ids if 0 <= token < vocab_size}
        self.eos_token_id = min(known, default=vocab_size)
        self.additional_stop_token_ids = known


def to_sglang(
    generate: engine_pb2.Generate,
    rid: str,
    context_tokens: int,
    vocab_size: int,
    fresh_seed: Callable[[], int] = _any_seed,
    adapter: str | None = None,
) -> TokenizedGenerateReqInput:
    """SGLang's request for text. `rid` is its name there, `adapter` that of its adapter. Raises RejectedRequest for a
    request that this model can never run."""
    token_ids = _prompt(generate, vocab_size)
    sampling, prompt_tokens = generate.sampling, len(token_ids)
    return TokenizedGenerateReqInput(
        rid=rid,
        input_text=None,
        input_ids=token_ids,
        input_embeds=None,
        mm_inputs=None,
        token_type_ids=None,
        sampling_params=sampling_params(
            sampling, prompt_tokens, generate.resumed_tokens, context_tokens, vocab_size, fresh_seed
        ),
        return_logprob=sampling.logprobs or bool(sampling.label_token_ids),
        logprob_start_len=_first_row(sampling, prompt_tokens),
        top_logprobs_num=max(0, sampling.top_logprobs) if sampling.logprobs else 0,
        token_ids_logprob=list(sampling.label_token_ids) or None,
        stream=True,
        lora_id=adapter,
        priority=generate.priority,
        time_stats=SchedulerReqTimeStats(),
    )


def _first_row(sampling: common_pb2.Sampling, prompt_tokens: int) -> int:
    """Index of the first prompt token for which the probability of the next one is wanted; -1: for none. Raises
    RejectedRequest."""
    if not sampling.HasField("prompt_logprobs_from"):
        return -1
    wanted = sampling.prompt_logprobs_from
    if not (sampling.logprobs and 1 <= wanted < prompt_tokens):
        raise RejectedRequest(f"no log-probabilities of token {wanted} of a prompt of {prompt_tokens}")
    return wanted - 1


def to_embed(
    generate: engine_pb2.Generate, rid: str, context_tokens: int, vocab_size: int
) -> TokenizedEmbeddingReqInput:
    """SGLang's request for an embedding. Raises RejectedRequest for a prompt that this model can never run."""
    token_ids = _prompt(generate, vocab_size)
    if len(token_ids) > context_tokens:
        raise RejectedRequest(f"the prompt has {len(token_ids)} tokens, the model's context {context_tokens}")
    params = SamplingParams(max_new_tokens=0, temperature=0.0)
    params.normalize(_NeedsNoTokenizer())
    return TokenizedEmbeddingReqInput(
        rid=rid,
        input_text=None,
        input_ids=token_ids,
        mm_inputs=None,
        token_type_ids=None,
        sampling_params=params,
        priority=generate.priority,
        time_stats=SchedulerReqTimeStats(),
    )


def _prompt(generate: engine_pb2.Generate, vocab_size: int) -> array[int]:
    """The prompt's tokens. Raises RejectedRequest if there are none, or one is outside the vocabulary."""
    if not generate.token_ids:
        raise RejectedRequest("the prompt is empty")
    token_ids = np.fromiter(generate.token_ids, dtype=np.int64, count=len(generate.token_ids))
    if token_ids.min() < 0 or token_ids.max() >= vocab_size:
        raise RejectedRequest(f"a prompt token is outside the vocabulary of {vocab_size}")
    return array("q", token_ids.tobytes())
