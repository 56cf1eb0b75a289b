"""Limits of sampling: top-k, top-p and min-p of each request of a batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class SamplingLimits:
    """Limits on the tokens that each request may draw; one value per request, (requests,), on the device of the
    probabilities."""

    top_ks: torch.Tensor
    """int32, 1 or more: only the most likely tokens, so many of them."""
    top_ps: torch.Tensor
    """float32, above 0 up to 1: only the most likely tokens that have this probability together. 1: all tokens."""
    min_ps: torch.Tensor | None = None
    """float32, 0 to 1: only tokens at least so many times as likely as the likeliest. 0: all tokens; None: 0 for all
    requests."""

    def of(self, rows: slice) -> SamplingLimits:
        """The limits of some requests of the batch."""
        return SamplingLimits(self.top_ks[rows], self.top_ps[rows], None if self.min_ps is None else self.min_ps[rows])

    def to(self, device: str) -> SamplingLimits:
        """The limits on another device."""
        min_ps = None if self.min_ps is None else self.min_ps.to(device)
        return SamplingLimits(self.top_ks.to(device), self.top_ps.to(device), min_ps)
