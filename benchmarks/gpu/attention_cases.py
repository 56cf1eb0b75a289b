"""Shapes, page tables, poisoned KV and an exact reference for the attention comparison. Runs on any torch device."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Shape:
    """What decides an envelope's size and the kernel that is chosen."""

    name: str
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int

    def envelope_bytes(self, page_size: int) -> int:
        return self.layers * 2 * page_size * self.kv_heads * self.head_dim * 2


SHAPES = (Shape("1B", 16, 32, 8, 64), Shape("3B", 28, 24, 8, 128), Shape("8B", 32, 32, 8, 128))
# One, a page, a page and one, more than a kernel tile, multiples and not.
LENGTHS = (1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 333, 1000, 1024, 1777)


@dataclass(frozen=True)
class Batch:
    """Requests with their pages. `table` is padded with pages that nobody owns, which hold NaN."""

    lengths: list[int]
    new: list[int]  # tokens of each request that are queried now: the last ones of its length
    table: torch.Tensor  # int32 (requests, most pages of any + 2)
    slots: list[torch.Tensor]  # token ids of each request, in order
    pages: int  # pages of the pool


def make_batch(lengths: list[int], new: list[int], page_size: int, seed: int, device: str) -> Batch:
    """Scatter the requests' pages at random over a pool with as many spare pages as live ones."""
    chance = random.Random(seed)
    need = [-(-n // page_size) for n in lengths]
    pages = 1 + 2 * sum(need) + 8
    order = list(range(1, pages))
    chance.shuffle(order)
    width = max(need) + 2
    rows, slots = [], []
    spare = order[sum(need) :]
    at = 0
    for length, count in zip(lengths, need, strict=True):
        own = order[at : at + count]
        at += count
        rows.append(own + [chance.choice(spare) for _ in range(width - count)])
        ids = torch.tensor(own)[:, None] * page_size + torch.arange(page_size)
        slots.append(ids.reshape(-1)[:length].to(device))
    return Batch(lengths, new, torch.tensor(rows, dtype=torch.int32, device=device), slots, pages)


def page_major_views(raw: torch.Tensor, shape: Shape, page_size: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of one layer in a byte buffer of packed envelopes: (pages, page_size, heads, dim), strided."""
    envelopes = raw.view(torch.bfloat16).view(-1, shape.layers, 2, page_size, shape.kv_heads, shape.head_dim)
    return envelopes[:, layer, 0], envelopes[:, layer, 1]


def poison(raw: torch.Tensor) -> None:
    """Every bf16 of the buffer becomes NaN."""
    raw.fill_(0xFF)


def write_slots(view: torch.Tensor, slots: torch.Tensor, values: torch.Tensor) -> None:
    """Store by token id, as the pool does."""
    page_size = view.shape[1]
    view[slots // page_size, slots % page_size] = values


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal attention of one request in float64: q (new, heads, dim) are the last of the tokens of k and v."""
    new, heads, _ = q.shape
    length, kv_heads, _ = k.shape
    group = heads // kv_heads
    qs = q.double().view(new, kv_heads, group, -1).permute(1, 2, 0, 3)
    ks, vs = k.double().permute(1, 2, 0)[:, None], v.double().transpose(0, 1)[:, None]
    scores = qs @ ks * scale
    position = torch.arange(length, device=q.device)
    hidden = position[None, :] > position[length - new :, None]
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return (weights @ vs).permute(2, 0, 1, 3).reshape(new, heads, -1)


def relative_error(out: torch.Tensor, exact: torch.Tensor) -> float:
    return float((out.double() - exact).norm() / exact.norm())


def gathered_attention(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, **call: Any) -> torch.Tensor:
    """The arguments of FlashAttention's call answered in plain torch: lets the harness be tried without a GPU."""
    page_size = k_cache.shape[1]
    starts = call["cu_seqlens_q"].tolist()
    out = []
    for i, length in enumerate(call["cache_seqlens"].tolist()):
        position = torch.arange(length, device=q.device)
        page, within = call["page_table"][i][position // page_size].long(), position % page_size
        mine = q[starts[i] : starts[i + 1]]
        out.append(reference(mine, k_cache[page, within], v_cache[page, within], call["softmax_scale"]).to(q.dtype))
    return torch.cat(out)
