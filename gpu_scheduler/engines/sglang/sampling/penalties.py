"""Counts tokens for SGLang's penalizers that they did not see: by themselves they take one new token of each request a
step, and nothing else.

Imports SGLang: only the engine process may import this.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from sglang.srt.sampling.penaltylib import (
    BatchedFrequencyPenalizer,
    BatchedMinNewTokensPenalizer,
    BatchedPenalizerOrchestrator,
    BatchedPresencePenalizer,
    BatchedRepetitionPenalizer,
)

from gpu_scheduler.engines.sglang.base import device


def count(orchestrator: BatchedPenalizerOrchestrator, row: int, elsewhere: Sequence[int], here: Sequence[int]) -> None:
    """Counts output that the request in `row` of the batch has already: `elsewhere`, from another engine, and then
    `here`. Its `min_new_tokens` is what it still has to say on this engine, without `elsewhere`. Raises RuntimeError
    for a penalizer that is not known here."""
    if not (elsewhere or here):
        return
    said = device.put([*elsewhere, *here], torch.device(orchestrator.device))
    for penalizer in orchestrator.penalizers.values():
        if not penalizer.is_prepared():
            continue
        match penalizer:
            case BatchedFrequencyPenalizer():
                each = penalizer.frequency_penalties[row].expand(len(said))
                penalizer.cumulated_frequency_penalties[row].scatter_add_(0, said, each)
            case BatchedPresencePenalizer():
                each = penalizer.presence_penalties[row].expand(len(said))
                penalizer.cumulated_presence_penalties[row].scatter_(0, said, each)
            case BatchedRepetitionPenalizer():
                each = penalizer.repetition_penalties[row].expand(len(said))
                penalizer.cumulated_repetition_penalties[row].scatter_(0, said, each)
            case BatchedMinNewTokensPenalizer():
                penalizer.len_output_tokens[row] += len(here)
            case _:
                raise RuntimeError(f"unknown penalizer {type(penalizer).__name__}")
