"""Limits of sampling: top-k, top-p and min-p of each request of a batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class SamplingLimits:
    """What each request may draw from; a value for each, on the device of the probabilities."""

    top_ks: torch.Tensor
    """int32, 1 or more."""
    top_ps: torch.Tensor
    """float32, above 0; 1: all."""
    min_ps: torch.Tensor | None = None
    """float32, from 0 (all) to 1; None: all of everybody."""

    def of(self, rows: slice) -> SamplingLimits:
        """Of some requests."""
        return SamplingLimits(self.top_ks[rows], self.top_ps[rows], None if self.min_ps is None else self.min_ps[rows])

    def to(self, device: str) -> SamplingLimits:
        min_ps = None if self.min_ps is None else self.min_ps.to(device)
        return SamplingLimits(self.top_ks.to(device), self.top_ps.to(device), min_ps)
