"""Empties extents by evicting cached prefixes. Works on SGLang's radix tree, imports nothing of SGLang.

SGLang frees slots, oldest leaf first, which leaves many extents partly used. When memory has to leave, only what leaves
whole counts, an extent or several that are mapped as one: those that hold nothing but cached prefixes are emptied, the
one whose youngest prefix is oldest first. A prefix is cut where it first meets such an extent, and the part before the
cut stays cached.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gpu_scheduler.engines.sglang.policy.envelopes import EnvelopePiece, Envelopes, coldest_first

if TYPE_CHECKING:
    from gpu_scheduler.engines.sglang.kv.elastic_kv import ElasticKv

Places = NDArray[np.int64]
"""Numbers of KV blocks (envelopes)."""


def all_nodes(tree: Any) -> Iterator[tuple[Any, int]]:
    """The tree's nodes, each with the number of tokens before it; parents before children."""
    waiting = [(node, 0) for node in tree.root_node.children.values()]
    while waiting:
        node, depth = waiting.pop()
        yield node, depth
        waiting.extend((child, depth + len(node.value)) for child in node.children.values())


def unlocked_nodes(tree: Any) -> Iterator[tuple[Any, int]]:
    """The nodes that no running request uses, each with the number of tokens before it; parents before children."""
    return ((node, depth) for node, depth in all_nodes(tree) if node.lock_ref == 0)


def envelopes_of(slots: Iterable[Any], page_size: int) -> list[Places]:
    """The envelopes of each tensor of slots, in order; fetched from the device in one go. Tensors hold whole pages,
    each with its slots in a row, as those of a tree's nodes do."""
    import torch

    firsts = [each[::page_size] for each in slots]
    if not firsts:
        return []
    here = torch.cat(firsts).to(device="cpu").numpy() // page_size
    return np.split(here, np.cumsum([len(first) for first in firsts])[:-1])


def empty_extents(tree: Any, kv: ElasticKv, wanted: int) -> int:
    """Evicts so that `wanted` more extents can leave, or as many as can; returns how many tokens were evicted. Extents
    that a running request touches cannot be emptied. Evicted places are available at once: their numbers are known
    here, and the device is not asked for them."""
    now = time.monotonic()
    envelopes, units = kv.envelopes, kv.units()
    nodes = list(unlocked_nodes(tree))
    places = envelopes_of((node.value for node, _ in nodes), kv.page_size)
    pieces = [
        EnvelopePiece(now - node.last_access_time, depth // kv.page_size, *touched(envelopes, some))
        for (node, depth), some in zip(nodes, places, strict=True)
    ]
    chosen = coldest_first(pieces, envelopes.live_by_extent(), wanted, units)
    if not len(chosen):
        return 0
    doomed = np.isin(units, chosen)
    there = {id(node): some for (node, _), some in zip(nodes, places, strict=True)}
    gone: list[Places] = []
    # A parent is cut before its children are looked at; the children of a cut parent went with it.
    for node, _ in nodes:
        if (some := there.get(id(node))) is not None and len(hit := on_any(envelopes, some, doomed)):
            gone += cut(tree, node, int(hit[0]), kv.page_size, there)
    if not gone:
        return 0
    evicted = np.concatenate(gone)
    envelopes.give(evicted)
    return len(evicted) * kv.page_size


def touched(envelopes: Envelopes, places: Places) -> tuple[Places, Places]:
    """(extents, positions): the extents that these envelopes touch, one entry for each envelope and extent, and for
    each entry the envelope's position in `places`."""
    position = np.arange(len(places))
    extents, last = envelopes.homes(places), envelopes.ends(places)
    parts = [(extents, position)]
    while (more := extents < last).any():
        extents, last, position = extents[more] + 1, last[more], position[more]
        parts.append((extents, position))
    return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])


def on_any(envelopes: Envelopes, places: Places, doomed: NDArray[np.bool_]) -> Places:
    """Positions in `places` of the envelopes that touch a doomed extent. `doomed`: one flag per extent."""
    counts = np.concatenate(([0], np.cumsum(doomed)))
    return np.flatnonzero(counts[envelopes.ends(places) + 1] - counts[envelopes.homes(places)])


def cut(tree: Any, node: Any, keep: int, page_size: int, there: dict[int, Places]) -> list[Places]:
    """Takes `node` out of the tree from its page `keep` on, with everything below it; returns the envelopes of that.
    `there`: the envelopes of each node in the tree, by its identity; taken nodes are removed from it."""
    gone: list[Places] = []
    for child in list(node.children.values()):
        gone += cut(tree, child, 0, page_size, there)
    if keep > 0:
        tree._split_node(node.key, node, keep * page_size)  # `node` is the rear part afterwards
    gone.append(there.pop(id(node))[keep:])
    tree._delete_leaf(node)
    tree._record_remove_event(node)
    return gone


def cached_by_age(tree: Any, kv: ElasticKv, now: float) -> list[tuple[float, int]]:
    """(seconds since last use, at least; bytes) of the prefixes that no running request uses, in at most a dozen steps
    of doubling age."""
    # It walks the whole tree while requests run, so it is written for speed.
    steps: dict[int, int] = {}
    waiting = list(tree.root_node.children.values())
    while waiting:
        node = waiting.pop()
        if node.lock_ref == 0:
            step = max(0, int(now - node.last_access_time)).bit_length()
            steps[step] = steps.get(step, 0) + node.value.numel()
        if node.children:
            waiting.extend(node.children.values())
    return [(float(1 << step >> 1), kv.bytes_of(tokens)) for step, tokens in sorted(steps.items())]
