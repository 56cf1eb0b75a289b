"""Moves live KV blocks (envelopes) together, so that few extents hold them. Works on SGLang's scheduler and on the
prefix cache as a `PrefixTree`; imports nothing of SGLang.

Requests grow side by side and end at different times, so the room that they leave is scattered, and few extents are
wholly empty. An idle engine moves its prefixes together. A running engine moves live blocks when memory has to leave:
each of its requests has pages in nearly every extent, and without moving nearly all would have to be retracted before
one extent is empty.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gpu_scheduler.engines.sglang.kv.prefix_eviction import envelopes_of
from gpu_scheduler.engines.sglang.kv.renumbering import Renumbering
from gpu_scheduler.engines.sglang.policy.compaction import begun, moves, moves_within, renumbered
from gpu_scheduler.engines.sglang.policy.envelopes import Envelopes, Indices
from gpu_scheduler.engines.sglang.policy.parts import SLOTS_TOGETHER, slices

if TYPE_CHECKING:
    from gpu_scheduler.engines.sglang.kv.elastic_kv import ElasticKv
    from gpu_scheduler.engines.sglang.kv.prefix_tree import KindOfTree

RATIO = 1.1
"""Bytes of extents in use for each byte of live blocks, above which prefixes of an idle engine are moved together."""
_TOGETHER_BYTES = 32 << 20
"""Bytes copied at a time. Torch needs as much spare memory meanwhile, since it copies by way of a temporary tensor."""
_NONE: Indices = np.empty(0, dtype=np.int64)
_SLOTS_TOGETHER = 1 << 18
"""Entries of the table of requests' slots rewritten at a time: the intermediate results are five times as large."""


def is_scattered(kv: ElasticKv) -> bool:
    """Whether the extents with live blocks have more bytes than `RATIO` times the live blocks, plus one extent."""
    envelopes = kv.envelopes
    nbytes = begun(envelopes, kv.units()) * envelopes.extent_bytes
    return nbytes > RATIO * envelopes.live * envelopes.envelope_bytes + envelopes.extent_bytes


def compact(tree: KindOfTree, kv: ElasticKv) -> int:
    """Moves cached prefixes so that extents empty, and returns how many envelopes were moved. SGLang must be idle, so
    that only the prefix tree knows where a prefix lies. The device copies asynchronously: work queued after it finds
    the prefixes at their new places."""
    envelopes = kv.envelopes
    nodes = [node for node, _ in tree.unlocked_nodes()]
    places = envelopes_of((tree.slots(node) for node in nodes), kv.page_size)
    stays = envelopes.all_live_but(np.concatenate([_NONE, *places]))
    sources, destinations = moves(envelopes, RATIO, kv.units(), stays)
    if len(sources):
        _move(tree, kv, nodes, places, sources, destinations)
    return len(sources)


def make_leave(scheduler: Any, tree: KindOfTree, kv: ElasticKv, extents: int, fixed: Sequence[int]) -> int:
    """Moves prefixes and the KV of running requests so that `extents` more extents empty, or as many as can, and
    returns how many envelopes were moved. Call it between two steps, when the device has nothing left to do. Envelopes
    in `fixed` stay where they are. All other live ones must be named by the prefix tree, by the table of requests'
    slots, or by what `kv.moved` corrects. `scheduler`: SGLang's, if its table has slots of this kind of KV; else
    None."""
    units = kv.units()
    sources, destinations = moves_within(kv.envelopes, begun(kv.envelopes, units) - extents, units, fixed)
    if not len(sources):
        return 0
    nodes = [node for node, _ in tree.nodes()]
    places = envelopes_of((tree.slots(node) for node in nodes), kv.page_size)
    _move(tree, kv, nodes, places, sources, destinations)
    if scheduler is None:
        return len(sources)
    renumbering = Renumbering(kv.ids, sources, destinations, kv.page_size)
    pool = scheduler.req_to_token_pool
    table = pool.req_to_token
    free = set(pool.free_slots)
    rows = [row for row in range(1, len(table)) if row not in free]
    width = table.shape[1]
    together = max(1, _SLOTS_TOGETHER // width)
    for start in range(0, len(rows), together):
        part = rows[start : start + together]
        for first in range(0, width, _SLOTS_TOGETHER):  # a row is as long as the context, which may be a million
            columns = slice(first, first + _SLOTS_TOGETHER)
            table[part, columns] = renumbering.of(table[part, columns])
    _renumber(renumbering, [(batch, "out_cache_loc") for batch in _batches(scheduler)])
    return len(sources)


def _move(
    tree: KindOfTree,
    kv: ElasticKv,
    nodes: list[Any],
    places: list[Indices],
    sources: Indices,
    destinations: Indices,
) -> None:
    """Moves envelopes from `sources` to `destinations`: first their contents, then the accounting, then the slots of
    the tree's `nodes`, whose envelopes are `places`, and what `kv.moved` corrects."""
    import torch

    envelopes = kv.envelopes
    # A thread of a GPU copies an element: eight bytes, where it can.
    rows = kv.rows.view(torch.int64) if envelopes.envelope_bytes % 8 == 0 else kv.rows
    together = max(1, _TOGETHER_BYTES // envelopes.envelope_bytes)
    for start in range(0, len(sources), together):
        part = slice(start, start + together)
        rows[kv.ids.send(destinations[part])] = rows[kv.ids.send(sources[part])]
    envelopes.move(sources, destinations)
    moved = _moved(envelopes, nodes, places, sources, destinations)
    for part in slices([len(some) * kv.page_size for _, some in moved], SLOTS_TOGETHER):
        firsts = kv.ids.send(np.concatenate([some for _, some in moved[part]]) * kv.page_size)
        slots = (firsts[:, None] + torch.arange(kv.page_size, device=firsts.device)).reshape(-1)
        # Pages are whole: a node's tokens are as many as before.
        values = slots.split([len(some) * kv.page_size for _, some in moved[part]])
        for (node, _), value in zip(moved[part], values, strict=True):
            tree.set_slots(node, value.to(tree.slots(node).dtype, copy=True))  # a view would keep all of them
    kv.moved(sources, destinations)


def _moved(
    envelopes: Envelopes, nodes: Sequence[Any], places: Sequence[Indices], sources: Indices, destinations: Indices
) -> list[tuple[Any, Indices]]:
    """The nodes of which envelopes were moved, each with the numbers of all its envelopes after the move. `places`: the
    numbers before. The accounting must know of the move: those that are not live any more are looked up, as there may
    be far more that stayed."""
    every = np.concatenate([_NONE, *places])
    gone = np.flatnonzero(~envelopes.are_live(every))
    every[gone] = renumbered(every[gone], sources, destinations)
    ends = np.cumsum([len(some) for some in places], dtype=np.int64)
    *after, _ = np.split(every, ends)
    changed = np.diff(np.searchsorted(gone, ends), prepend=0) > 0
    return [(node, new) for node, new, some in zip(nodes, after, changed.tolist(), strict=True) if some]


def _renumber(renumbering: Renumbering, holders: Iterable[tuple[Any, str]]) -> None:
    """Gives the attributes named in `holders`, (object, attribute), each a tensor of slots, their new slots, all in one
    go."""
    import torch

    found = [(holder, name, slots) for holder, name in holders if len(slots := getattr(holder, name)) > 0]
    if not found:
        return
    parts = renumbering.of(torch.cat([slots.long() for *_, slots in found])).split([len(slots) for *_, slots in found])
    for (holder, name, slots), part in zip(found, parts, strict=True):
        setattr(holder, name, part.to(slots.dtype))


def _batches(scheduler: Any) -> Iterator[Any]:
    """Batches of SGLang's that name slots of their step, each once."""
    found = [scheduler.running_batch, scheduler.last_batch, *(batch for batch, *_ in scheduler.result_queue)]
    yield from _distinct(batch for batch in found if batch is not None and batch.out_cache_loc is not None)


def _distinct(found: Iterable[Any]) -> Iterator[Any]:
    """The objects, each once."""
    yield from {id(one): one for one in found}.values()
