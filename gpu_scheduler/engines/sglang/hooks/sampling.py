"""Hooks on what SGLang draws tokens with, each time it makes a batch of prompts: a request draws as if it had never
been interrupted.

Imports SGLang: only the engine process may import this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpu_scheduler.engines.sglang.hooks.hook import Hook
from gpu_scheduler.engines.sglang.step import current


def seeds(result: Any, _kind: Any, batch: Any, *_args: Any, **_kwargs: Any) -> Any:
    """Every request draws by its own seed and the position of the token: the same after a retraction. Where nobody
    draws there are no seeds to carry along."""
    if not result.is_all_greedy:
        from gpu_scheduler.engines.sglang.base import device

        numbers = [request.sampling_params.sampling_seed or 0 for request in batch.reqs]
        result.sampling_seed = device.put(numbers, result.temperatures.device)
    return result


def seeds_in_both(mine: Any, other: Any) -> None:
    """SGLang merges seeds only where both batches have some."""
    import torch

    if (mine.sampling_seed is None) != (other.sampling_seed is None):
        without = mine if mine.sampling_seed is None else other
        without.sampling_seed = torch.zeros(len(without), dtype=torch.int64, device=without.temperatures.device)


def penalties(result: Any, _kind: Any, batch: Any, *_args: Any, **_kwargs: Any) -> Any:
    """SGLang begins to count anew with every prompt. What a request said before, here (it was retracted) or elsewhere
    (its stream was taken up), counts from the first token on."""
    from gpu_scheduler.engines.sglang.sampling.penalties import count

    orchestrator = result.penalizer_orchestrator
    if orchestrator.is_required:
        request_table = current.instance().request_table
        for row, request in enumerate(batch.reqs):
            entry = request_table.by_rid(request.rid)
            resumed = entry.resumed_tokens if entry is not None else 0
            elsewhere = request.origin_input_ids[len(request.origin_input_ids) - resumed :]
            count(orchestrator, row, list(elsewhere), list(request.output_ids))
    return result


def count_last_tokens(original: Callable[..., None], batch: Any) -> None:
    """Where steps overlap, the host does not know the last tokens yet as it prepares the next step: SGLang would count
    those before them."""
    if not batch.enable_overlap:
        original(batch)


def count_resolved_tokens(result: Any, batch: Any, *_args: Any) -> Any:
    """The device knows them as the step begins. What the host's stream does to the penalties later is ordered behind
    the step, by SGLang's own barrier."""
    if batch.enable_overlap and batch.forward_mode.is_decode():
        orchestrator = batch.sampling_info.penalizer_orchestrator
        if orchestrator.is_required:
            orchestrator.cumulate_output_tokens(batch.input_ids)
    return result


def draw(
    original: Callable[..., Any], sampler: Any, probs: Any, sampling_info: Any, positions: Any, unlimited: bool
) -> Any:
    """Tokens by seeds, of which SGLang has none where all are greedy, and without sorting the vocabulary."""
    from gpu_scheduler.engines.sglang.sampling import sampling
    from gpu_scheduler.engines.sglang.sampling.limits import SamplingLimits

    if sampling_info.sampling_seed is None:
        return original(sampler, probs, sampling_info, positions, unlimited)
    limits = None
    if not unlimited:
        min_ps = sampling_info.min_ps if sampling_info.need_min_p_sampling else None
        limits = SamplingLimits(sampling_info.top_ks, sampling_info.top_ps, min_ps)
    return sampling.draw(probs, sampling_info.sampling_seed, positions, limits)


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
