"""`sampling.draw` as one kernel that reads the probabilities a few times and sorts nothing.

Without limits one pass finds the token. With limits the token that would be drawn without them is found first; if it is
not allowed, no less likely one is either, and the next pass looks for a token among the likelier ones. The token on
which that ends is the one that is drawn if only the allowed ones are looked at. Every pass leaves half of the remaining
tokens on average, and where a few tokens have nearly all of the probability one or two passes are enough. (FlashInfer's
sampling without sorting rejects in the same way, but draws anew each time.)

Imports Triton: only an engine process with a GPU may import this.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gpu_scheduler.engines.sglang.sampling.limits import SamplingLimits

_TOKENS = 8192
"""Tokens that a program looks at at once."""
_WARPS = 16


@triton.jit
def _mixed(hashed, block):  # type: ignore[no-untyped-def]
    """Mixes one more word of the message into a MurmurHash3 (x86, 32 bits)."""
    block = block * 0xCC9E2D51
    block = ((block << 15) | (block >> 17)) * 0x1B873593
    hashed = hashed ^ block
    return ((hashed << 13) | (hashed >> 19)) * 5 + 0xE6546B64


@triton.jit
def _noise(hashed, token):  # type: ignore[no-untyped-def]
    """-log u (exponentially distributed) for a message whose last word is `token`. u is the hash divided by 2^32 - 1;
    from one half on its distance from 1 is used, of which a 32-bit number near 1 would keep too little."""
    hashed = _mixed(hashed, token) ^ 16
    hashed = (hashed ^ (hashed >> 16)) * 0x85EBCA6B
    hashed = (hashed ^ (hashed >> 13)) * 0xC2B2AE35
    hashed = hashed ^ (hashed >> 16)
    distance = (0xFFFFFFFF - hashed).to(tl.float32) * (1.0 / 4294967295.0)
    u = 1.0 - distance
    # log(1 - d), exact also where 1 - d is rounded (W. Kahan).
    near_1 = tl.where(u == 1.0, distance, -tl.log(u) * (distance / tl.where(u == 1.0, 1.0, 1.0 - u)))
    return tl.where(hashed < 0x80000000, -tl.log(hashed.to(tl.float32) * (1.0 / 4294967295.0)), near_1)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["row_stride"],
    do_not_specialize_on_alignment=["seeds", "positions", "top_ks", "top_ps", "min_ps"],
)
def _draw(  # type: ignore[no-untyped-def]
    probs,
    row_stride,
    seeds,
    positions,
    top_ks,
    top_ps,
    min_ps,
    drawn,
    VOCABULARY: tl.constexpr,
    LIMITED: tl.constexpr,
    BY_MOST: tl.constexpr,
    TOKENS: tl.constexpr,
):
    row = tl.program_id(0)
    probs += row.to(tl.int64) * row_stride
    seed = tl.load(seeds + row).to(tl.uint64)
    hashed = _mixed(tl.zeros((), tl.uint32), (seed & 0xFFFFFFFF).to(tl.uint32))
    hashed = _mixed(hashed, (seed >> 32).to(tl.uint32))
    hashed = _mixed(hashed, tl.load(positions + row).to(tl.uint32))
    lanes = tl.arange(0, TOKENS)

    # Only tokens before this one are looked at: those that are likelier, or as likely and lower.
    least = tl.full((), -1.0, tl.float32)
    least_at = tl.zeros((), tl.int32)
    token = tl.zeros((), tl.int32)
    found = False
    while not found:
        best = tl.full((TOKENS,), -1.0, tl.float32)
        best_at = tl.zeros((TOKENS,), tl.int32)  # so that 0 is drawn where nothing can be
        for start in range(0, VOCABULARY, TOKENS):
            at = start + lanes
            p = tl.load(probs + at, mask=at < VOCABULARY, other=0.0)
            open_ = (p > 0.0) & ((p > least) | ((p == least) & (at < least_at)))
            score = tl.where(open_, p / _noise(hashed, at.to(tl.uint32)), -1.0)
            better = score > best
            best = tl.where(better, score, best)
            best_at = tl.where(better, at, best_at)
        highest = tl.max(best, axis=0)
        token = tl.min(tl.where(best == highest, best_at, VOCABULARY), axis=0)
        found = True
        if LIMITED:
            top_k = tl.load(top_ks + row)
            top_p = tl.load(top_ps + row)
            min_p = 0.0
            if BY_MOST:
                min_p = tl.load(min_ps + row)
            if ((top_k < VOCABULARY) | (top_p < 1.0) | (min_p > 0.0)) & (highest >= 0.0):
                least = tl.load(probs + token)
                least_at = token
                mass = tl.zeros((TOKENS,), tl.float32)
                count = tl.zeros((TOKENS,), tl.int32)
                most = tl.zeros((TOKENS,), tl.float32)
                for start in range(0, VOCABULARY, TOKENS):
                    at = start + lanes
                    p = tl.load(probs + at, mask=at < VOCABULARY, other=0.0)
                    before = (at < VOCABULARY) & ((p > least) | ((p == least) & (at < least_at)))
                    mass += tl.where(before, p, 0.0)
                    count += before.to(tl.int32)
                    if BY_MOST:
                        most = tl.maximum(most, p)
                found = ((top_p >= 1.0) | (tl.sum(mass, axis=0) <= top_p)) & (tl.sum(count, axis=0) < top_k)
                if BY_MOST:
                    found = found & (least >= min_p * tl.max(most, axis=0))
    tl.store(drawn + row, token)


def draw(
    probs: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, limits: SamplingLimits | None
) -> torch.Tensor:
    """Draws a token for each row, with the arguments of `sampling.draw`, all on the GPU."""
    assert probs.dtype == torch.float32 and probs.stride(1) == 1
    rows, vocabulary = probs.shape
    drawn = torch.empty(rows, dtype=torch.int32, device=probs.device)
    top_ks, top_ps = (limits.top_ks, limits.top_ps) if limits is not None else (seeds, seeds)
    min_ps = limits.min_ps if limits is not None else None
    _draw[(rows,)](
        probs,
        probs.stride(0),
        seeds,
        positions,
        top_ks,
        top_ps,
        top_ps if min_ps is None else min_ps,
        drawn,
        VOCABULARY=vocabulary,
        LIMITED=limits is not None,
        BY_MOST=min_ps is not None,
        TOKENS=_TOKENS,
        num_warps=_WARPS,
    )
    return drawn
