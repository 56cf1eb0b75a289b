"""Moving cached prefixes together, so that few extents hold what lives. Works on SGLang's radix tree, imports nothing
of SGLang.

Only while SGLang is idle: then nothing but the tree knows where a prefix lies. What leaves room behind are requests of
mixed lifetimes; what they leave is too scattered for whole extents to go back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from gpu_scheduler.engines.sglang.eviction import envelopes_of, unlocked_nodes
from gpu_scheduler.engines.sglang.policy.compaction import moves

if TYPE_CHECKING:
    from gpu_scheduler.engines.sglang.kv import ElasticKv

RATIO = 1.1
"""Bytes of extents that something lives on, to bytes that live, above which prefixes are moved."""
_TOGETHER_BYTES = 64 << 20
"""Copied at a time: what is read is held twice meanwhile."""


def is_scattered(kv: ElasticKv) -> bool:
    envelopes, units = kv.envelopes, kv.units()
    in_use = np.unique(units[np.flatnonzero(envelopes.live_by_extent())])
    begun = int(np.count_nonzero(np.isin(units, in_use)))
    return begun * envelopes.extent_bytes > RATIO * envelopes.live * envelopes.envelope_bytes + envelopes.extent_bytes


def compact(tree: Any, kv: ElasticKv) -> int:
    """Moves cached prefixes so that extents empty; returns how many envelopes. The device does it in its own time:
    what is queued after it finds the prefixes where they are now."""
    import torch

    envelopes = kv.envelopes
    nodes = [node for node, _ in unlocked_nodes(tree)]
    places = envelopes_of(nodes, kv.page_size)
    stays = np.zeros(envelopes.total, dtype=bool)
    stays[envelopes.all_live()] = True
    for some in places:
        stays[some] = False
    sources, destinations = moves(envelopes, RATIO, kv.units(), np.flatnonzero(stays))
    if not len(sources):
        return 0
    together = max(1, _TOGETHER_BYTES // envelopes.envelope_bytes)
    for start in range(0, len(sources), together):
        part = slice(start, start + together)
        kv.rows[kv.ids.send(destinations[part])] = kv.rows[kv.ids.send(sources[part])]
    now = np.arange(envelopes.total)
    now[sources] = destinations
    moved = [(node, now[some]) for node, some in zip(nodes, places, strict=True) if not np.array_equal(now[some], some)]
    firsts = kv.ids.send(np.concatenate([some for _, some in moved]) * kv.page_size)
    slots = (firsts[:, None] + torch.arange(kv.page_size, device=firsts.device)).reshape(-1)
    # Whole pages: a node's tokens are as many as before.
    parts = slots.split([len(some) * kv.page_size for _, some in moved])
    for (node, _), value in zip(moved, parts, strict=True):
        node.value = value.to(node.value.dtype)
    envelopes.move(sources, destinations)
    return len(sources)
