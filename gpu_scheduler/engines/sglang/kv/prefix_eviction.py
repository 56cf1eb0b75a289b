"""Empties extents by evicting cached prefixes. Knows the cache as a `PrefixTree`, and imports nothing of SGLang.

SGLang's own eviction frees slots, oldest leaf first, which leaves many extents partly used. Memory leaves only by whole
units, an extent or several that are mapped as one. This module therefore empties units that hold nothing but cached
prefixes. A unit is as old as its youngest prefix, and the oldest unit is first. A prefix is cut where it first meets
such a unit, and the part before the cut stays cached.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from gpu_scheduler.engines.sglang.policy.envelopes import CachedPieces, Indices, coldest_first
from gpu_scheduler.engines.sglang.policy.parts import SLOTS_TOGETHER, slices

if TYPE_CHECKING:
    from gpu_scheduler.engines.sglang.kv.elastic_kv import ElasticKv
    from gpu_scheduler.engines.sglang.kv.engine_kv import EngineKv
    from gpu_scheduler.engines.sglang.kv.prefix_tree import KindOfTree, PrefixTree


def envelopes_of(slots: Iterable[Any], page_size: int) -> list[Indices]:
    """Numbers of the envelopes of each tensor of slots, in the order of the slots. The numbers are fetched from the
    device together, as many at a time as its quota has room for. Each tensor has whole pages, and the slots of a page
    in a row, as those of a tree's nodes do."""
    import torch

    firsts = [each[::page_size] for each in slots]
    found: list[Indices] = []
    for part in slices([len(first) for first in firsts], SLOTS_TOGETHER):
        here = torch.cat(firsts[part]).to(device="cpu").numpy() // page_size
        found += np.split(here, np.cumsum([len(first) for first in firsts[part]])[:-1])
    return found


def empty_extents(tree: KindOfTree, kv: ElasticKv, wanted: int) -> int:
    """Evicts until `wanted` more extents can leave, or as many as can; returns how many tokens were evicted. Extents
    that a running request touches cannot be emptied. Evicted envelopes are available at once: their numbers are known
    on the host already."""
    now = time.monotonic()
    envelopes, units = kv.envelopes, kv.units()
    nodes = list(tree.unlocked_nodes())
    places = envelopes_of((tree.slots(node) for node, _ in nodes), kv.page_size)
    ages, depths = [now - tree.used_at(node) for node, _ in nodes], [depth // kv.page_size for _, depth in nodes]
    pieces = CachedPieces.of(envelopes, places, ages, depths)
    chosen = coldest_first(pieces, envelopes.live_by_extent(), wanted, units)
    if not len(chosen):
        return 0
    doomed = np.isin(units, chosen)  # for each extent, whether it is to be emptied
    there = {id(node): some for (node, _), some in zip(nodes, places, strict=True)}
    gone: list[Indices] = []
    # A parent is cut before its children are looked at; the children of a cut parent went with it.
    with tree.evicted_together():
        for (node, _), hit in zip(nodes, pieces.first_on(doomed), strict=True):
            if hit is not None and id(node) in there:
                keep = 0 if tree.cuts_whole else hit
                for taken in tree.cut(node, keep * kv.page_size):
                    gone.append(there.pop(id(taken))[keep if taken is node else 0 :])
    if not gone:
        return 0
    evicted = np.concatenate(gone)
    envelopes.give(evicted)
    return len(evicted) * kv.page_size


def cached_by_age(tree: PrefixTree, kv: EngineKv, now: float) -> list[tuple[float, int]]:
    """(least seconds since the last use, bytes) of the prefixes that no running request uses, joined in steps of age,
    each of which is twice as long as the one before it."""
    steps: dict[int, int] = {}
    for number, kind in enumerate(kv.kinds):
        page_bytes = kind.bytes_of(kv.page_size)
        for age, tokens in tree.of(number).unlocked_ages(now):
            step = max(0, int(age)).bit_length()
            steps[step] = steps.get(step, 0) + tokens * page_bytes
    if kv.states is not None and tree.states is not None:
        for age, states in tree.states.unlocked_ages(now):
            step = max(0, int(age)).bit_length()
            steps[step] = steps.get(step, 0) + kv.states.bytes_of(states) * kv.page_size
    return [(float(1 << step >> 1), nbytes // kv.page_size) for step, nbytes in sorted(steps.items())]
