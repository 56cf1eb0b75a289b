"""Probabilities of all kinds, with seeds and limits, for the tests of drawing on a CPU and on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from gpu_scheduler.engines.sglang.sampling.limits import SamplingLimits

ALL = 1 << 30
"""SGLang's top_k of who has none."""


def probabilities(rows: int, vocabulary: int, chance: torch.Generator) -> Iterator[torch.Tensor]:
    """Flat and peaked ones, with many that are equal, and with a grammar that forbids most."""
    logits = torch.randn(rows, vocabulary, generator=chance)
    for scale in (0.1, 1.0, 4.0, 12.0):
        yield (logits * scale).softmax(dim=1)
    yield (logits * 4).round().softmax(dim=1)
    yield torch.where(torch.arange(vocabulary) % 7 == 3, logits, -torch.inf).softmax(dim=1)


def limits_of(rows: int, chance: torch.Generator) -> Iterator[SamplingLimits | None]:
    yield None
    some = torch.tensor([1.0, 0.9, 0.5, 0.01, 1.0]).repeat(rows)[:rows]
    yield SamplingLimits(torch.full((rows,), ALL, dtype=torch.int32), some)
    yield SamplingLimits(torch.tensor([1, 2, 20, ALL], dtype=torch.int32).repeat(rows)[:rows], torch.ones(rows))
    yield SamplingLimits(
        torch.randint(1, 50, (rows,), generator=chance).int(), torch.rand(rows, generator=chance).clamp(0.01)
    )
    everything = torch.full((rows,), ALL, dtype=torch.int32)
    yield SamplingLimits(everything, torch.ones(rows), torch.tensor([0.0, 0.05, 0.5, 1.0]).repeat(rows)[:rows])
    yield SamplingLimits(
        torch.randint(1, 50, (rows,), generator=chance).int(),
        torch.rand(rows, generator=chance).clamp(0.01),
        torch.rand(rows, generator=chance) ** 3,
    )


def seeds_and_places(rows: int, chance: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Seeds of 62 bits, and positions."""
    return (
        torch.randint(0, 2**62, (rows,), generator=chance),
        torch.randint(0, 100_000, (rows,), generator=chance),
    )
