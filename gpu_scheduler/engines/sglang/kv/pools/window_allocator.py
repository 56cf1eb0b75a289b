"""SGLang's allocator for models whose KV is of two kinds: every token in some layers, the latest tokens in the layers
with a window. Imports SGLang: only the engine process may import this.

A token has a slot in each kind. SGLang names the token by its slot of the first kind. A table leads from there to its
slot in the window, which is 0 once the token has left the window.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from typing_extensions import override

from gpu_scheduler.engines.sglang.kv.elastic_kv import ElasticKv
from gpu_scheduler.engines.sglang.kv.pools.allocator import ElasticAllocator
from gpu_scheduler.engines.sglang.kv.pools.paged_allocator import ElasticPagedAllocator, StepAllocator
from gpu_scheduler.engines.sglang.kv.renumbering import Renumbering
from gpu_scheduler.engines.sglang.policy.envelopes import Indices

_SLOTS_TOGETHER = 1 << 18
"""Entries of the table rewritten at a time: the intermediate results are five times as large, and all entries of live
pages are millions."""


class ElasticWindowAllocator(StepAllocator, SWATokenToKVPoolAllocator):  # type: ignore[misc]
    """An allocator composed of one for each kind. Methods override SGLang's."""

    def __init__(
        self, size: int, size_in_window: int, page_size: int, *, dtype: torch.dtype, device: str, kvcache: SWAKVPool
    ) -> None:
        """`size` and `size_in_window`: tokens of each kind for which there are addresses."""
        # SGLang's constructor would make allocators of its own, with lists of all slots.
        self._size_full, self._size_swa = size, size_in_window
        self.page_size, self.dtype, self.device = page_size, dtype, device
        self._kvcache = kvcache
        self.need_sort = False
        self._swa_req_ring, self._swa_ring_cost, self._req_to_token_pool = False, 0, None
        pools = kvcache.full_kv_pool, kvcache.swa_kv_pool
        self.kinds: tuple[ElasticKv, ...] = tuple(pool.kv for pool in pools)
        every, window = self.kinds
        window.ids = every.ids  # one queue, so that numbers of both kinds arrive in the order in which they were freed
        self.full_attn_allocator, self.swa_attn_allocator = (
            _allocator(tokens, page_size, dtype=dtype, device=device, kvcache=pool, kv=pool.kv)
            for tokens, pool in zip((size, size_in_window), pools, strict=True)
        )
        self.free_pages = self.release_pages = None
        # The last entry is for slot -1, as SGLang calls the slot before the first one of a request.
        self.full_to_swa_index_mapping = torch.zeros(size + page_size + 1, dtype=torch.int64, device=device)
        self.full_to_swa_index_mapping[-1] = -1
        self.clear()
        kvcache.register_mapping(self.full_to_swa_index_mapping)
        every.moved, window.moved = self._every_moved, self._window_moved

    def _take(self, count: int) -> torch.Tensor | None:
        """The lowest `count` free pages of each kind, (2, count) int64, sent to the device as one; None when a kind has
        fewer."""
        if any(kind.envelopes.available < count for kind in self.kinds):
            return None
        numbers = np.empty((len(self.kinds), count), dtype=np.int64)
        for kind, row in zip(self.kinds, numbers, strict=True):
            taken = kind.envelopes.take(count)
            assert taken is not None
            row[:] = taken
        return self.kinds[0].ids.send(numbers.ravel()).view(numbers.shape)

    def place_prompts(
        self, pages: torch.Tensor, before: torch.Tensor, after: torch.Tensor, last: torch.Tensor, tokens: int
    ) -> torch.Tensor:
        last_in_window = self.translate_loc_from_full_to_swa(last)
        slots = self.full_attn_allocator.place_prompts(pages[0], before, after, last, tokens)
        in_window = self.swa_attn_allocator.place_prompts(pages[1], before, after, last_in_window, tokens)
        self.full_to_swa_index_mapping[slots] = in_window
        return slots

    def place_decode(self, pages: torch.Tensor, after: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        last_in_window = self.translate_loc_from_full_to_swa(last)
        slots = self.full_attn_allocator.place_decode(pages[0], after, last)
        self.full_to_swa_index_mapping[slots] = self.swa_attn_allocator.place_decode(pages[1], after, last_in_window)
        return slots

    def eviction_begins(self) -> None:
        super().eviction_begins()
        self.full_attn_allocator.eviction_begins()

    def eviction_ends(self) -> None:
        try:
            self.full_attn_allocator.eviction_ends()
        finally:
            super().eviction_ends()

    @override
    def free_swa_segment(self, free_index: torch.Tensor, *, start_pos: int) -> None:
        """Frees places in the window. `free_index`: slots of the first kind."""
        # SGLang looks the places up in the table and clears them there, for each prefix. Nothing that is evicted gets
        # another place before the eviction ends, so that once is enough.
        if self.evicted is None:
            super().free_swa_segment(free_index, start_pos=start_pos)
        else:
            self.note_evicted(free_index)

    def _free_evicted(self, slots: torch.Tensor) -> None:
        super().free_swa_segment(slots, start_pos=0)

    def _pages(self) -> torch.Tensor:
        """The table as (pages of the first kind, page size)."""
        return self.full_to_swa_index_mapping[:-1].view(-1, self.page_size)

    def _every_moved(self, sources: Indices, destinations: Indices) -> None:
        """Moves entries of the table along with pages of the first kind that were moved."""
        ids, pages = self.kinds[0].ids, self._pages()
        old = ids.send(sources)
        pages[ids.send(destinations)] = pages[old]
        pages[old] = 0

    def _window_moved(self, sources: Indices, destinations: Indices) -> None:
        """Writes the new slots of pages of the window that were moved into the table."""
        every, pages = self.kinds[0], self._pages()
        renumbering = Renumbering(every.ids, sources, destinations, self.page_size)
        live, together = every.envelopes.all_live(), max(1, _SLOTS_TOGETHER // self.page_size)
        for start in range(0, len(live), together):
            some = every.ids.send(live[start : start + together])
            pages[some] = renumbering.of(pages[some])


def _allocator(
    size: int, page_size: int, *, dtype: torch.dtype, device: str, kvcache: Any, kv: ElasticKv
) -> ElasticAllocator | ElasticPagedAllocator:
    """The allocator of one kind."""
    if device == "cpu" and page_size == 1:
        return ElasticAllocator(size, dtype=dtype, device=device, kvcache=kvcache, kv=kv)
    return ElasticPagedAllocator(size, page_size, dtype=dtype, device=device, kvcache=kvcache, kv=kv)
