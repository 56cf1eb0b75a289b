"""Hooks on the data that SGLang draws tokens with, each time it makes a batch of prompts: a request draws as if it had
never been interrupted.

Imports SGLang: only the engine process may import this.

Target in SGLang                      Why                                        Without it
------------------------------------  -----------------------------------------  ---------------------------------------
SamplingBatchInfo                     Every request draws by its own seed        seeds have no effect, and tokens change
.from_schedule_batch (`seeds`)                                                   after a retraction
SamplingBatchInfo                     Earlier output counts for penalties from   a retracted or resumed request repeats
.from_schedule_batch (`penalties`)    the first token on                         itself more than it may
SamplingBatchInfo.merge_batch         Both batches have seeds when they are      seeds are lost where only one has some
                                      merged
ScheduleBatch                         With overlap, nothing is counted on the    SGLang counts the tokens before the
.cumulate_penalty_output_tokens       host                                       last ones
overlap_utils                         With overlap, last tokens are counted      the last tokens are never counted
.resolve_forward_inputs               once the device knows them
Sampler._sample_from_probs            Tokens are drawn by seeds, without         SGLang draws in two ways that differ
                                      sorting the vocabulary                     for one seed, and one sorts the
                                                                                 vocabulary for every token
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpu_scheduler.engines.sglang.hooks.hook import Hook
from gpu_scheduler.engines.sglang.step import current


def seeds(result: Any, _kind: Any, batch: Any, *_args: Any, **_kwargs: Any) -> Any:
    """Gives every request of a new batch its own seed. A token is drawn by the seed and its position, so a retracted
    request draws the same tokens again. If all requests are greedy there are no seeds to carry along."""
    if not result.is_all_greedy:
        from gpu_scheduler.engines.sglang.base import device

        numbers = [request.sampling_params.sampling_seed or 0 for request in batch.reqs]
        result.sampling_seed = device.put(numbers, result.temperatures.device)
    return result


def seeds_in_both(mine: Any, other: Any) -> None:
    """Gives a batch without seeds zeros before it is merged with one that has some: SGLang merges seeds only where both
    batches have them."""
    import torch

    if (mine.sampling_seed is None) != (other.sampling_seed is None):
        without = mine if mine.sampling_seed is None else other
        without.sampling_seed = torch.zeros(len(without), dtype=torch.int64, device=without.temperatures.device)


def penalties(result: Any, _kind: Any, batch: Any, *_args: Any, **_kwargs: Any) -> Any:
    """Counts earlier output of requests for penalties from the first token on: what they had here before a retraction,
    or elsewhere before they were resumed. SGLang begins to count anew with every prompt."""
    from gpu_scheduler.engines.sglang.sampling.penalties import count

    orchestrator = result.penalizer_orchestrator
    if orchestrator.is_required:
        request_table = current.model().request_table
        for row, request in enumerate(batch.reqs):
            entry = request_table.by_rid(request.rid)
            resumed = entry.resumed_tokens if entry is not None else 0
            elsewhere = request.origin_input_ids[len(request.origin_input_ids) - resumed :]
            count(orchestrator, row, list(elsewhere), list(request.output_ids))
    return result


def count_last_tokens(original: Callable[..., None], batch: Any) -> None:
    """Counts the last tokens for penalties, unless steps overlap. With overlap the host prepares the next step before
    it knows them, and SGLang would count the tokens before them; `count_resolved_tokens` counts them then."""
    if not batch.enable_overlap:
        original(batch)


def count_resolved_tokens(result: Any, batch: Any, *_args: Any) -> Any:
    """Counts the last tokens for penalties as an overlapping step begins, when the device knows them. Later changes of
    the penalties on the host's stream come behind the step, by SGLang's own barrier."""
    if batch.enable_overlap and batch.forward_mode.is_decode():
        orchestrator = batch.sampling_info.penalizer_orchestrator
        if orchestrator.is_required:
            orchestrator.cumulate_output_tokens(batch.input_ids)
    return result


def draw(
    original: Callable[..., Any], sampler: Any, probs: Any, sampling_info: Any, positions: Any, unlimited: bool
) -> Any:
    """Draws tokens by seeds, without sorting the vocabulary. Where all requests are greedy there are no seeds, and
    SGLang draws."""
    from gpu_scheduler.engines.sglang.sampling import sampling
    from gpu_scheduler.engines.sglang.sampling.limits import SamplingLimits

    if sampling_info.sampling_seed is None:
        return original(sampler, probs, sampling_info, positions, unlimited)
    # SGLang's second value says which tokens could have been drawn, for requests that ask for it; none does here.
    limits = None
    if not unlimited:
        min_ps = sampling_info.min_ps if sampling_info.need_min_p_sampling else None
        limits = SamplingLimits(sampling_info.top_ks, sampling_info.top_ps, min_ps)
    return sampling.draw(probs, sampling_info.sampling_seed, positions, limits), None


_SAMPLING = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo"
_SAMPLER = "sglang.srt.layers.sampler.Sampler"
_BATCH = "sglang.srt.managers.schedule_batch.ScheduleBatch"
HOOKS = [
    Hook(f"{_SAMPLING}.from_schedule_batch", seeds, "AFTER"),
    Hook(f"{_SAMPLING}.from_schedule_batch", penalties, "AFTER"),
    Hook(f"{_SAMPLING}.merge_batch", seeds_in_both, "BEFORE"),
    Hook(f"{_BATCH}.cumulate_penalty_output_tokens", count_last_tokens, "AROUND"),
    Hook("sglang.srt.managers.overlap_utils.resolve_forward_inputs", count_resolved_tokens, "AFTER"),
    Hook(f"{_SAMPLER}._sample_from_probs", draw, "AROUND"),
]
