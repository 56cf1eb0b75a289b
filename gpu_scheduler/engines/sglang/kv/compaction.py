"""Moves live KV blocks (envelopes) together, so that few extents hold them. Works on SGLang's objects, imports nothing
of SGLang.

Requests of mixed lifetimes grow side by side, so their pages lie between those of others, and the room that they leave
is too scattered for whole extents to leave. An idle engine moves its prefixes together. A running engine moves live
blocks when memory has to leave: otherwise nearly every request would have to be retracted before one extent of 32 pages
is empty, since each has some of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gpu_scheduler.engines.sglang.kv.prefix_eviction import Places, all_nodes, envelopes_of, unlocked_nodes
from gpu_scheduler.engines.sglang.policy.compaction import begun, moves, moves_within
from gpu_scheduler.engines.sglang.policy.layout import Indices

if TYPE_CHECKING:
    import torch

    from gpu_scheduler.engines.sglang.kv.elastic_kv import ElasticKv

RATIO = 1.1
"""Ratio of the bytes of extents in use to the bytes of live blocks, above which prefixes of an idle engine are
moved."""
_TOGETHER_BYTES = 32 << 20
"""Bytes copied at a time: the source is held twice meanwhile, in memory that torch has to spare."""
_SLOTS_TOGETHER = 1 << 18
"""Entries of the table of requests' slots rewritten at a time: the intermediate results are five times as large."""


def is_scattered(kv: ElasticKv) -> bool:
    """Whether the extents with live blocks have more bytes than `RATIO` times the live blocks, plus one extent."""
    envelopes = kv.envelopes
    nbytes = begun(envelopes, kv.units()) * envelopes.extent_bytes
    return nbytes > RATIO * envelopes.live * envelopes.envelope_bytes + envelopes.extent_bytes


def compact(tree: Any, kv: ElasticKv) -> int:
    """Moves cached prefixes so that extents empty, and returns how many envelopes were moved. SGLang must be idle, so
    that only the prefix tree knows where a prefix lies. The device copies asynchronously: work queued after it finds
    the prefixes at their new places."""
    envelopes = kv.envelopes
    nodes = [node for node, _ in unlocked_nodes(tree)]
    places = envelopes_of((node.value for node in nodes), kv.page_size)
    stays = np.zeros(envelopes.total, dtype=bool)
    stays[envelopes.all_live()] = True
    for some in places:
        stays[some] = False
    sources, destinations = moves(envelopes, RATIO, kv.units(), np.flatnonzero(stays))
    if len(sources):
        _move(kv, nodes, places, sources, destinations)
    return len(sources)


def make_leave(scheduler: Any, kv: ElasticKv, extents: int, fixed: Sequence[int]) -> int:
    """Moves prefixes and the KV of running requests so that `extents` more extents empty, or as many as can, and
    returns how many envelopes were moved. Call it between two steps, when the device has nothing left to do. `fixed`
    envelopes stay where they are; every other live one must be known to the prefix tree or to the table of requests'
    slots."""
    units = kv.units()
    sources, destinations = moves_within(kv.envelopes, begun(kv.envelopes, units) - extents, units, fixed)
    if not len(sources):
        return 0
    nodes = [node for node, _ in all_nodes(scheduler.tree_cache)]
    now = _move(kv, nodes, envelopes_of((node.value for node in nodes), kv.page_size), sources, destinations)
    to_now = _Slots(kv, now)
    pool = scheduler.req_to_token_pool
    table = pool.req_to_token
    free = set(pool.free_slots)
    rows = [row for row in range(1, len(table)) if row not in free]
    together = max(1, _SLOTS_TOGETHER // table.shape[1])
    for start in range(0, len(rows), together):
        part = rows[start : start + together]
        table[part] = to_now(table[part])
    to_now.each(
        [(request, "prefix_indices") for request in _requests(scheduler)]
        + [(batch, "out_cache_loc") for batch in _batches(scheduler)]
    )
    return len(sources)


def _move(kv: ElasticKv, nodes: list[Any], places: list[Places], sources: Indices, destinations: Indices) -> Indices:
    """Moves the contents, and updates the tree's nodes and the accounting. Returns the new place of each envelope,
    (total,)."""
    import torch

    envelopes = kv.envelopes
    # A thread of a GPU copies an element: eight bytes, where it can.
    rows = kv.rows.view(torch.int64) if envelopes.envelope_bytes % 8 == 0 else kv.rows
    together = max(1, _TOGETHER_BYTES // envelopes.envelope_bytes)
    for start in range(0, len(sources), together):
        part = slice(start, start + together)
        rows[kv.ids.send(destinations[part])] = rows[kv.ids.send(sources[part])]
    now = np.arange(envelopes.total)
    now[sources] = destinations
    moved = [(node, now[some]) for node, some in zip(nodes, places, strict=True) if not np.array_equal(now[some], some)]
    if moved:
        firsts = kv.ids.send(np.concatenate([some for _, some in moved]) * kv.page_size)
        slots = (firsts[:, None] + torch.arange(kv.page_size, device=firsts.device)).reshape(-1)
        # Pages are whole: a node's tokens are as many as before.
        parts = slots.split([len(some) * kv.page_size for _, some in moved])
        for (node, _), value in zip(moved, parts, strict=True):
            node.value = value.to(node.value.dtype, copy=True)  # a view would keep all of them
    envelopes.move(sources, destinations)
    return now


class _Slots:
    """Translates old slots into new ones, on the device."""

    def __init__(self, kv: ElasticKv, now: Indices) -> None:
        self._size = kv.page_size
        self._now = kv.ids.send(now)

    def __call__(self, slots: torch.Tensor) -> torch.Tensor:
        """The new slots for these, of the same shape and dtype."""
        pages = slots.long() // self._size
        return (self._now[pages] * self._size + slots % self._size).to(slots.dtype)

    def each(self, holders: Iterable[tuple[Any, str]]) -> None:
        """Translates the attributes named in `holders`, (object, attribute), each a tensor of slots, all in one go."""
        import torch

        found = [(holder, name, slots) for holder, name in holders if len(slots := getattr(holder, name)) > 0]
        if not found:
            return
        parts = self(torch.cat([slots.long() for *_, slots in found])).split([len(slots) for *_, slots in found])
        for (holder, name, slots), part in zip(found, parts, strict=True):
            setattr(holder, name, part.to(slots.dtype))


def _batches(scheduler: Any) -> Iterator[Any]:
    """Batches that name the slots of a step, each once."""
    launched = [batch for batch, *_ in getattr(scheduler, "result_queue", ())]
    found = [scheduler.running_batch, scheduler.last_batch, getattr(scheduler, "cur_batch", None), *launched]
    yield from _each(batch for batch in found if batch is not None and batch.out_cache_loc is not None)


def _requests(scheduler: Any) -> Iterator[Any]:
    """Requests that may hold slots of their prefixes, each once."""
    found = [*scheduler.waiting_queue, *scheduler.running_batch.reqs]
    if scheduler.chunked_req is not None:
        found.append(scheduler.chunked_req)
    if scheduler.last_batch is not None:
        found += scheduler.last_batch.reqs
    yield from _each(found)


def _each(found: Iterable[Any]) -> Iterator[Any]:
    """Each object once."""
    yield from {id(one): one for one in found}.values()
