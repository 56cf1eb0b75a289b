"""Hooks on what SGLang draws tokens with, each time it makes a batch of prompts: a request draws as if it had never
been interrupted.

Imports SGLang: only the engine process may import this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpu_scheduler.engines.sglang import current
from gpu_scheduler.engines.sglang.plugin import Hook


def seeds(result: Any, _kind: Any, batch: Any, *_args: Any, **_kwargs: Any) -> Any:
    """Every request draws by its own seed and the position of the token: the same after a retraction. Where nobody
    draws there are no seeds to carry along.

    SGLang has two ways to draw, over the vocabulary as it is and over the most likely first, and takes the second, for
    the whole batch, as soon as one request limits its choices. The same seed draws differently in either; so where
    somebody named one, it is always the second."""
    if not result.is_all_greedy:
        from gpu_scheduler.engines.sglang import device

        numbers = [request.sampling_params.sampling_seed or 0 for request in batch.reqs]
        result.sampling_seed = device.put(numbers, result.temperatures.device)
        open_here = [current.instance().book.by_rid(request.rid) for request in batch.reqs]
        if any(entry is not None and entry.seeded for entry in open_here):
            result.need_top_p_sampling = True
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
    from gpu_scheduler.engines.sglang.penalties import count

    orchestrator = result.penalizer_orchestrator
    if orchestrator.is_required:
        book = current.instance().book
        for row, request in enumerate(batch.reqs):
            entry = book.by_rid(request.rid)
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


_DRAWN_TOGETHER = 32
"""Rows: drawing takes a dozen times the bytes of the probabilities, most of them as 64-bit numbers."""


def draw_in_parts(original: Callable[..., Any], probs: Any, *arguments: Any, **named: Any) -> Any:
    """The same for every row, with less memory at a time. What has not one value for each row is for all."""
    import torch

    rows = len(probs)
    if rows <= _DRAWN_TOGETHER:
        return original(probs, *arguments, **named)

    def part(value: Any, start: int) -> Any:
        return value[start : start + _DRAWN_TOGETHER] if isinstance(value, torch.Tensor) else value

    drawn = []
    for start in range(0, rows, _DRAWN_TOGETHER):
        some = [part(value, start) for value in (probs, *arguments)]
        drawn.append(original(*some, **{name: part(value, start) for name, value in named.items()}))
    return torch.cat(drawn)


_SAMPLING = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo"
_SAMPLER = "sglang.srt.layers.sampler"
_BATCH = "sglang.srt.managers.schedule_batch.ScheduleBatch"
HOOKS = [
    Hook(f"{_SAMPLING}.from_schedule_batch", seeds, "AFTER"),
    Hook(f"{_SAMPLING}.from_schedule_batch", penalties, "AFTER"),
    Hook(f"{_SAMPLING}.merge_batch", seeds_in_both, "BEFORE"),
    Hook(f"{_BATCH}.cumulate_penalty_output_tokens", count_last_tokens, "AROUND"),
    Hook("sglang.srt.managers.overlap_utils.resolve_forward_inputs", count_resolved_tokens, "AFTER"),
    Hook(f"{_SAMPLER}.top_k_top_p_min_p_sampling_from_probs_torch", draw_in_parts, "AROUND"),
    Hook(f"{_SAMPLER}.sampling_from_probs_torch", draw_in_parts, "AROUND"),
]
