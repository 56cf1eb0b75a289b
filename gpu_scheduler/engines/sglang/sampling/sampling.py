"""The next token of each request, by its own seed: the same whatever runs beside it, and after it was interrupted.

Each token of the vocabulary has noise of its own: a hash of the request's seed, the position in the text and the token.
Among the allowed tokens the one with the largest sum of log-probability and Gumbel noise is drawn (Gumbel-max;
Maddison, Tarlow, Minka 2014), as in SGLang's deterministic mode. SGLang has two ways, over the vocabulary as it is and
over the most likely first, which draw differently by the same seed; the second sorts the vocabulary for every token.
Here the noise belongs to the token, so that other limits do not change it, and on a GPU nothing is sorted
(`sampling_kernel`).

The allowed tokens follow SGLang's rule: the most likely `top_k`, of these the ones before which `top_p` lies or less,
and of those the ones that are at least `min_p` times as likely as the likeliest. Of equally likely tokens the lower
number comes first.
"""

from __future__ import annotations

import numpy as np
import torch

from gpu_scheduler.engines.sglang.sampling.limits import SamplingLimits
from gpu_scheduler.engines.sglang.sampling.murmur import murmur3

_ROWS = 32
"""Rows that are sorted at a time."""


def draw(
    probs: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, limits: SamplingLimits | None
) -> torch.Tensor:
    """Draws a token for each row: (requests,) int32. `probs`: (requests, vocabulary) float32; `seeds`: (requests,)
    int64, not negative; `positions`: (requests,) positions in the text; `limits`: None if no request has any."""
    if probs.device.type == "cuda":
        from gpu_scheduler.engines.sglang.sampling import sampling_kernel

        return sampling_kernel.draw(probs, seeds, positions, limits)
    return by_sorting(probs, seeds, positions, limits)


def by_sorting(
    probs: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, limits: SamplingLimits | None
) -> torch.Tensor:
    """Draws as `draw` does, in the plainest way, on a CPU. It takes some dozen times the bytes of `_ROWS` rows."""
    drawn = []
    for start in range(0, len(probs), _ROWS):
        some = slice(start, start + _ROWS)
        within = None if limits is None else limits.of(some)
        drawn.append(_by_sorting(probs[some], seeds[some], positions[some], within))
    return torch.cat(drawn)


def _by_sorting(
    probs: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, limits: SamplingLimits | None
) -> torch.Tensor:
    # The largest of log p - log(-log u) is the largest of p / -log u.
    scores = torch.where(probs > 0, probs / torch.log(_uniform(seeds, positions, probs.shape[1])).abs(), -1.0)
    if limits is not None:
        scores.masked_fill_(~_allowed(probs, limits), -1.0)
    return scores.argmax(dim=1).to(torch.int32)


def _uniform(seeds: torch.Tensor, positions: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Uniform noise from 0 to 1 for each row and token: (rows, vocabulary) float64."""
    words = seeds.numpy().astype(np.uint64)[:, None]
    hashed = murmur3(
        [
            (words & np.uint64(0xFFFFFFFF)).astype(np.uint32),
            (words >> np.uint64(32)).astype(np.uint32),
            positions.numpy().astype(np.uint32)[:, None],
            np.arange(vocabulary, dtype=np.uint32)[None, :],
        ]
    )
    return torch.from_numpy(hashed.astype(np.float64) / (2**32 - 1))


def _allowed(probs: torch.Tensor, limits: SamplingLimits) -> torch.Tensor:
    """Whether each token may be drawn: (rows, vocabulary) bool."""
    likely, tokens = probs.sort(dim=1, descending=True, stable=True)
    before = likely.to(torch.float64).cumsum(dim=1) - likely
    rank = torch.arange(probs.shape[1], device=probs.device)
    open_ = (before <= limits.top_ps[:, None]) | (limits.top_ps[:, None] >= 1)
    if limits.min_ps is not None:
        open_ &= likely >= limits.min_ps[:, None] * likely[:, :1]
    return torch.zeros_like(open_).scatter_(1, tokens, open_ & (rank < limits.top_ks[:, None]))
