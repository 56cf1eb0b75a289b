"""How a model of text is asked whether a document answers a query: the prompt, and the two tokens whose probabilities
after it are the answer. No I/O.

The prompt is that of the model's own chat template, if it was written for this: with roles "query" and "document", as
sentence-transformers and vLLM call it, or with two messages of a user, as SGLang does. A reranker whose template is
one for chats gets the prompt that Qwen3-Reranker was trained with.

A cross-encoder is given the pair as its tokenizer puts it together, and makes one number of it, a logit.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp

from gateway.errors import BadField
from gateway.request import Prompt, QueryDocument
from protos import common_pb2
from tokenization.tokenizer import Tokenizer

_ROLES = [re.compile(rf"""["']{role}["']""") for role in ("query", "document")]
_JUDGES = 'answer can only be "yes" or "no"'
"""What templates say by which SGLang knows a reranker's."""
_MARKS = ("<|im_start|>", "<|im_end|>")
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_QWEN = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
"""Qwen3-Reranker's prompt, as its model card has it."""


@dataclass(frozen=True)
class RerankForm:
    """How one model is asked."""

    roles: bool = False
    """Whether its template has roles "query" and "document"."""
    template: bool = True
    """Whether its template makes the prompt at all."""
    yes: int = 0
    no: int = 0

    def prompt(self, pair: QueryDocument) -> Prompt:
        if not self.template:
            text = _QWEN.format(instruction=pair.instruction or _INSTRUCTION, query=pair.query, document=pair.document)
            return Prompt(text=text, special=False)
        query, document = ("query", "document") if self.roles else ("user", "user")
        messages = [{"role": query, "content": pair.query}, {"role": document, "content": pair.document}]
        if pair.instruction and self.roles:
            messages.insert(0, {"role": "system", "content": pair.instruction})
        # A template's `default` holds for what is not given at all.
        options = {"instruct": pair.instruction} if pair.instruction and not self.roles else {}
        return Prompt(messages=messages, template_options=options)


def form(tokenizer: Tokenizer, model: common_pb2.ModelSpec) -> RerankForm:
    """How the model is asked. Raises BadField for one that is no reranker."""
    template = tokenizer.template
    roles = all(role.search(template) for role in _ROLES)
    made = roles or _JUDGES in template.lower()
    if not made and not model.HasField("reranker"):
        raise BadField(
            f"The model '{model.name}' ({model.architecture}) is no reranker: neither does its chat template ask about "
            'a query and a document, nor is it listed with task = "rerank".',
            "model",
            "wrong_task",
        )
    if not made and not set(_MARKS) <= set(tokenizer.added_tokens()):
        raise BadField(
            f"The model '{model.name}' cannot rank documents: it has no chat template for it, and Qwen3-Reranker's "
            f"prompt needs the tokens {' and '.join(_MARKS)}.",
            "model",
            "wrong_task",
        )
    return RerankForm(roles, made, *_answers(tokenizer, model))


def check_pairs(prompts: Sequence[Prompt], model: common_pb2.ModelSpec) -> None:
    """Raises BadField for what a cross-encoder cannot be told."""
    if any(prompt.pair is not None and prompt.pair.instruction for prompt in prompts):
        raise BadField(
            f"'instruct' is not supported: the model '{model.name}' compares a query and a document as they are.",
            "instruct",
            "unsupported_parameter",
        )


def _answers(tokenizer: Tokenizer, model: common_pb2.ModelSpec) -> tuple[int, int]:
    told = model.reranker
    if told.HasField("yes_token_id") and told.HasField("no_token_id"):
        return told.yes_token_id, told.no_token_id
    found = [tokenizer.encode(word, False) for word in ("yes", "no")]
    if any(len(ids) != 1 for ids in found):
        raise BadField(
            f"The model '{model.name}' cannot rank documents: 'yes' and 'no' are not one token each.",
            "model",
            "wrong_task",
        )
    return found[0][0], found[1][0]


def relevance(logprobs: Sequence[float]) -> float:
    """Probability of "yes" of the two, from the log-probabilities of "yes" and "no"."""
    return probabilities(logprobs, among_themselves=True)[0]


def relevance_of_logit(logit: float) -> float:
    """The probability that a cross-encoder's logit stands for."""
    return relevance([logit, 0.0])


def probabilities(logprobs: Sequence[float], *, among_themselves: bool) -> list[float]:
    """Probabilities of tokens by their log-probabilities; `among_themselves`: as if there were no others (softmax)."""
    if not among_themselves:
        return [exp(one) for one in logprobs]
    most = max(logprobs)
    if most == float("-inf"):
        return [0.0] * len(logprobs)
    weights = [exp(one - most) for one in logprobs]
    total = sum(weights)
    return [weight / total for weight in weights]
