"""Sizes of an engine's room for adapters (LoRA) of its model; pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MOST_SLOTS = 8
"""Most adapters in one batch of an engine. With more, those that were used longest ago make way; their requests take
turns."""
MOST_RANK = 256
_JOINED = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))
"""Linear layers that may have adapters. Engines join some of them into one."""
MODULES = tuple(name for joined in _JOINED for name in joined)
_ALIGN_BYTES = 256


@dataclass(frozen=True)
class Linear:
    """A linear layer that each decoder layer has."""

    name: str
    rows: int
    columns: int


@dataclass(frozen=True)
class Pool:
    """Room for adapters: `slots` at a time, of ranks up to `rank`, on the layers named `modules`."""

    slots: int
    rank: int
    modules: tuple[str, ...]
    nbytes: int


def pool(ranks: Sequence[int], changed: Iterable[str], linears: Iterable[Linear], layers: int, item_bytes: int) -> Pool:
    """The room that a model with `layers` decoder layers of these `linears` needs for its adapters, of these ranks,
    which change the layers named `changed`. `item_bytes`: bytes of one number. The number of slots is rounded up, so
    that an adapter more seldom needs another engine; requests without an adapter take one slot more."""
    slots = 1 + min(MOST_SLOTS, 1 << (len(ranks) - 1).bit_length())
    rank, wanted = max(ranks), set(changed)
    sizes = {each.name: each for each in linears}
    groups = [joined for joined in _JOINED if wanted.intersection(joined)]
    nbytes = 0
    for joined in groups:
        there = [sizes[name] for name in joined]
        for numbers in (len(there) * rank * there[0].columns, rank * sum(each.rows for each in there)):
            nbytes += -(-slots * numbers * item_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
    return Pool(slots, rank, tuple(name for joined in groups for name in joined), layers * nbytes)
