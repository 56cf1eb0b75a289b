"""Hooks on how SGLang gathers log-probabilities: of prompts, and of given tokens after them. Those of prompts are sent
step by step, as prompts are computed: SGLang would keep those of a whole prompt, and after a retraction make and send
all of them again.

SGLang speaks of rows: the row of a token says how likely every token is to come after it. `Req.logprob_start_len` is
the first row that is wanted, and prefixes are taken from the cache only up to it. Here it moves on with the rows that
were sent: a request that starts again finds those in the cache, and goes on behind them.

Imports SGLang: only the engine process may import this.

Target in SGLang                      Why                                        Without it
------------------------------------  -----------------------------------------  ---------------------------------------
SchedulerLogprobResultProcessor       Log-probabilities of a prompt are sent     those of a whole prompt are kept, and
.add_input_logprob_return_values      step by step, as they are computed         made and sent again after a retraction
SchedulerBatchResultProcessor         The first row of a request counts the      requests behind a retracted one get the
._apply_prefill_logprobs              rows of all requests before it             log-probabilities of others
SchedulerBatchResultProcessor         The same count, for a prompt that takes    requests behind a retracted one get the
._apply_chunked_prefill_logprobs      several steps                              log-probabilities of others
logprob_processor                     Requests of a step without label tokens    a step of requests with label tokens
.get_token_ids_logprobs               have an empty tensor, as SGLang expects    and others ends the engine
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gpu_scheduler.engines.sglang.hooks.hook import Hook
from gpu_scheduler.engines.sglang.step import current


def tell_rows(
    _processor: Any, index: int, request: Any, output: Any, first: int, rows: int, last_prefill_chunk: bool
) -> None:
    """Sends the rows of a request's prompt that a step has computed: `rows` of them, from `first` on in `output`. Not
    sent are the row of the prompt's last token, which is about the first token of the answer, and rows of output that
    the request had before it started again."""
    last = len(request.origin_input_ids) - 1
    begin = request.logprob_start_len
    request.logprob_start_len = min(begin + rows, last + 1)
    if (wanted := min(rows, last - begin)) <= 0:
        return
    values, ids = output.input_top_logprobs_val, output.input_top_logprobs_idx
    best = (values[index][:wanted], ids[index][:wanted]) if request.logprob.top_logprobs_num > 0 else ((), ())
    own = output.input_token_logprobs[first : first + wanted]
    current.model().outputs.prompt_scored(request.rid, (own, *best))


def own_rows(
    original: Callable[..., int],
    processor: Any,
    *,
    i: int,
    extend_input_len_per_req: Sequence[int],
    extend_logprob_start_len_per_req: Sequence[int],
    logprob_pt: int,
    **arguments: Any,
) -> int:
    """Processes the step's `i`th request, with the number of all rows before its own as `logprob_pt`. SGLang counts
    rows as it goes, and does not count those of a request that was retracted meanwhile: the requests behind it would
    get the log-probabilities of others."""
    lengths = zip(extend_input_len_per_req[:i], extend_logprob_start_len_per_req[:i], strict=True)
    return original(
        processor,
        i=i,
        extend_input_len_per_req=extend_input_len_per_req,
        extend_logprob_start_len_per_req=extend_logprob_start_len_per_req,
        logprob_pt=sum(length - start for length, start in lengths),
        **arguments,
    )


def tensors_for_all(original: Callable[..., Any], logprobs: Any, *arguments: Any, **keys: Any) -> Any:
    """(log-probabilities of each request's label tokens, the tokens). SGLang makes an empty list for a request without
    label tokens, and later treats it as a tensor, so such a request gets an empty tensor here."""
    values, tokens = original(logprobs, *arguments, **keys)
    if any(hasattr(value, "tolist") for value in values):
        values = [value if hasattr(value, "tolist") else logprobs.new_empty(0) for value in values]
    return values, tokens


_PARTS = "sglang.srt.managers.scheduler_components"
_PROCESSOR = f"{_PARTS}.logprob_result_processor.SchedulerLogprobResultProcessor"
_RESULTS = f"{_PARTS}.batch_result_processor.SchedulerBatchResultProcessor"
HOOKS = [
    Hook(f"{_PROCESSOR}.add_input_logprob_return_values", tell_rows, "REPLACE"),
    Hook(f"{_RESULTS}._apply_prefill_logprobs", own_rows, "AROUND"),
    Hook(f"{_RESULTS}._apply_chunked_prefill_logprobs", own_rows, "AROUND"),
    Hook("sglang.srt.layers.logprob_processor.get_token_ids_logprobs", tensors_for_all, "AROUND"),
]
