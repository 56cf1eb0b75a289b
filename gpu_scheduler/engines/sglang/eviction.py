"""Emptying extents by evicting cached prefixes. Works on SGLang's radix tree, imports nothing of SGLang.

SGLang frees slots, oldest leaf first, which leaves many extents partly used. When memory has to leave, what counts
is whole extents: those that hold nothing but cached prefixes are emptied, the one whose youngest prefix is oldest
first. A prefix is cut where the first such extent is met, and what is before the cut stays cached.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpu_scheduler.engines.sglang.policy.envelopes import Envelopes, coldest_first

Slots = NDArray[np.int64]


def unlocked_nodes(tree: Any) -> Iterator[Any]:
    """Nodes that no running request is on, parents before children."""
    waiting = list(tree.root_node.children.values())
    while waiting:
        node = waiting.pop()
        if node.lock_ref == 0:
            yield node
        waiting.extend(node.children.values())


def slots_of(node: Any) -> Slots:
    slots: Slots = node.value.to(device="cpu").numpy()
    return slots


def empty_extents(tree: Any, envelopes: Envelopes, wanted: int) -> int:
    """Evicts so that up to `wanted` more extents become empty; returns how many tokens were evicted. Extents that
    a running request touches cannot be emptied."""
    now = time.monotonic()
    nodes = list(unlocked_nodes(tree))
    slots = [slots_of(node) for node in nodes]
    ages = [now - node.last_access_time for node in nodes]
    chosen = coldest_first(ages, envelopes.live_by_extent(), [touched(envelopes, some) for some in slots], wanted)
    if not chosen:
        return 0
    doomed = np.zeros(envelopes.n_extents, dtype=bool)
    doomed[chosen] = True
    evicted = 0
    # A parent is cut before its children are looked at; those of a parent that was cut went with it.
    gone: set[int] = set()
    for node, some in zip(nodes, slots, strict=True):
        if id(node) in gone:
            continue
        hit = on_any(envelopes, some, doomed)
        if len(hit):
            evicted += cut(tree, node, int(hit[0]), gone)
    return evicted


def touched(envelopes: Envelopes, slots: Slots) -> Slots:
    """The extents that these slots touch, one entry for each slot and extent."""
    first, last = envelopes.homes(slots), envelopes.ends(slots)
    parts = [first]
    beyond = first + 1
    while len(beyond):
        more = beyond <= last
        first, last, beyond = first[more], last[more], beyond[more]
        if len(beyond):
            parts.append(beyond)
            beyond = beyond + 1
    return np.concatenate(parts)


def on_any(envelopes: Envelopes, slots: Slots, doomed: NDArray[np.bool_]) -> Slots:
    """Positions in `slots` of those that touch a doomed extent."""
    counts = np.concatenate(([0], np.cumsum(doomed)))
    return np.flatnonzero(counts[envelopes.ends(slots) + 1] - counts[envelopes.homes(slots)])


def cut(tree: Any, node: Any, keep: int, gone: set[int]) -> int:
    """Evicts `node` from its token `keep` on, and everything below it; returns how many tokens."""
    evicted = 0
    for child in list(node.children.values()):
        evicted += cut(tree, child, 0, gone)
    if keep > 0:
        tree._split_node(node.key, node, keep)  # `node` is the rear part afterwards
    gone.add(id(node))
    tree.token_to_kv_pool_allocator.free(node.value)
    evicted += len(node.value)
    tree._delete_leaf(node)
    tree._record_remove_event(node)
    return evicted


def cached_by_age(tree: Any, envelope_bytes: int, now: float) -> list[tuple[float, int]]:
    """(seconds since last use, at least; bytes) of what no running request is on, in at most a dozen steps of
    doubling age."""
    steps: dict[int, int] = {}
    for node in unlocked_nodes(tree):
        age = max(0.0, now - node.last_access_time)
        steps[int(age).bit_length()] = steps.get(int(age).bit_length(), 0) + len(node.value)
    return [(float(1 << step >> 1), tokens * envelope_bytes) for step, tokens in sorted(steps.items())]
