"""Hooks on what SGLang draws tokens with, each time it makes a batch of prompts: a request draws as if it had never
been interrupted.

Imports SGLang: only the engine process may import this.
"""

from __future__ import annotations

from typing import Any

from gpu_scheduler.engines.sglang import current
from gpu_scheduler.engines.sglang.plugin import Hook


def seeds(result: Any, _kind: Any, batch: Any, *_args: Any, **_kwargs: Any) -> Any:
    """Every request draws by its own seed and the position of the token: the same after a retraction, and beside
    whatever runs."""
    import torch

    numbers = [request.sampling_params.sampling_seed or 0 for request in batch.reqs]
    result.sampling_seed = torch.tensor(numbers, dtype=torch.int64).to(result.temperatures.device, non_blocking=True)
    return result


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


_FROM_BATCH = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch"
HOOKS = [Hook(_FROM_BATCH, seeds, "AFTER"), Hook(_FROM_BATCH, penalties, "AFTER")]
