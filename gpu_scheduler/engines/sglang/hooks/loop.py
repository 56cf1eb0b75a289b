"""Hooks on what SGLang's event loop calls outside its Scheduler (`scheduler.py`): admitting and retracting requests.

Imports SGLang: only the engine process may import this.

Target in SGLang                      Why                                        Without it
------------------------------------  -----------------------------------------  ---------------------------------------
PrefillAdder.add_one_req              KV memory grows before SGLang admits a     requests wait although memory could
                                      request, and once more if it refuses       grow, or cached prefixes are evicted
                                                                                 first
ScheduleBatch.retract_decode          Retractions are reported; a request that   pauses have no reason in the log;
                                      does not fit even alone goes back to the   SGLang aborts the one that does not
                                      shared queue; one that was about to end    fit; an abort waits for a prompt that
                                      does so                                    is computed again, or is forgotten
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpu_scheduler.engines.sglang.hooks.hook import Hook
from gpu_scheduler.engines.sglang.step import current


def add_request(
    original: Callable[..., Any], adder: Any, req: Any, has_chunked_req: bool, truncation_align_size: int | None
) -> Any:
    """Admits a request after growing memory for it. If SGLang refuses it for lack of tokens, memory grows by what
    SGLang's own numbers lack, and SGLang is asked once more."""
    from sglang.srt.managers import schedule_policy

    if has_chunked_req:
        # A prompt that stays half computed has taken the memory that was here. SGLang takes for granted that none is
        # left for another prompt. With memory that grows it would begin one, and cannot have two half computed.
        return schedule_policy.AddReqResult.OTHER
    provisioning = current.model().provisioning
    provisioning.prefer_growth(adder, req, schedule_policy.CLIP_MAX_NEW_TOKENS)
    admitted = len(adder.can_run_list)
    result = original(adder, req, has_chunked_req, truncation_align_size)
    refused = result is schedule_policy.AddReqResult.NO_TOKEN and len(adder.can_run_list) == admitted
    if refused and provisioning.grow_for(adder, req, schedule_policy.CLIP_MAX_NEW_TOKENS):
        return original(adder, req, has_chunked_req, truncation_align_size)
    return result


def retraction(original: Callable[..., Any], batch: Any) -> Any:
    """Counts and reports the requests that SGLang retracts. A request that SGLang would abort, because it does not fit
    even alone, goes back to the shared queue. Beside a half computed prompt it is not alone: there it is retracted as
    others are, and goes on once that prompt has made room. A request that was about to end anyway ends at once: SGLang
    would compute its prompt again before that, or forget why it ends. If no request is left, the share of outputs for
    which SGLang keeps memory stays as it was: SGLang would take none for the next requests."""
    ending = {id(request): request.to_finish for request in batch.reqs if request.to_finish is not None}
    model = current.model()
    retracted, ratio, given_up = original(batch)
    if not batch.reqs:
        ratio = model.scheduler.new_token_ratio_tracker.current
    over = [request for request in (*retracted, *given_up) if id(request) in ending]
    for request in over:
        request.to_finish = ending[id(request)]
    retracted, given_up = ([each for each in some if id(each) not in ending] for some in (retracted, given_up))
    if model.scheduler.chunked_req is not None:
        for request in given_up:
            request.to_finish = None
        retracted, given_up = [*retracted, *given_up], []
    for request in retracted:
        model.retracted(request, "no KV memory for the running batch")
    model.counters.retractions += len(given_up)
    for request in given_up:
        current.loop().parked(request)
    return retracted, ratio, over


HOOKS = [
    Hook("sglang.srt.managers.schedule_policy.PrefillAdder.add_one_req", add_request, "AROUND"),
    Hook("sglang.srt.managers.schedule_batch.ScheduleBatch.retract_decode", retraction, "AROUND"),
]
