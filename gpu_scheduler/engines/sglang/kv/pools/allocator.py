"""SGLang's token allocator over an elastic range in host memory, and the base classes of all allocators of tokens over
a range. Imports SGLang: only the engine process may import this.

`available_size` counts slots that have memory now. Memory grows before SGLang asks for it (`provisioning`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.allocator import BaseTokenToKVPoolAllocator, TokenToKVPoolAllocator
from typing_extensions import override

from gpu_scheduler.engines.sglang.base import current
from gpu_scheduler.engines.sglang.kv.elastic_kv import ElasticKv
from gpu_scheduler.engines.sglang.policy.parts import SLOTS_TOGETHER


class GrowingAllocator(BaseTokenToKVPoolAllocator):  # type: ignore[misc]
    """An allocator of SGLang's for which memory grows before prefixes are evicted."""

    evicted: list[torch.Tensor] | None = None
    """Slots of prefixes that were evicted and are to be freed as one: those of the first kind of KV, also where it is
    their places in the window that are to be freed. None: nothing is evicted now."""
    _evicted_slots = 0
    """Number of those slots."""

    @override
    def evict_to_free_tokens(self, tree_cache: Any, num_tokens: int) -> None:
        """Makes room until `num_tokens` slots are free, as far as it can. SGLang calls this before it allocates, and
        before each decode step. SGLang's own method evicts prefixes; here memory grows, and prefixes are evicted only
        for slots that growth does not bring."""
        if tree_cache is not None and tree_cache.supports_prefix_sharing():
            current.model().provisioning.before_allocation(tree_cache, num_tokens)

    def eviction_begins(self) -> None:
        """From here on, only prefixes are freed, until `eviction_ends`."""
        self.evicted, self._evicted_slots = [], 0

    def eviction_ends(self) -> None:
        """Frees what was evicted."""
        evicted, self.evicted = self.evicted, None
        if evicted:
            self._free_evicted(torch.cat(evicted))

    def note_evicted(self, slots: torch.Tensor) -> None:
        """Keeps slots of whole pages that were evicted, until the eviction ends or they are many."""
        assert self.evicted is not None and len(slots) % self.page_size == 0, "what is evicted is not whole pages"
        self.evicted.append(slots)
        self._evicted_slots += len(slots)
        if self._evicted_slots >= SLOTS_TOGETHER:
            self.eviction_ends()
            self.eviction_begins()

    def _free_evicted(self, slots: torch.Tensor) -> None:
        """Frees slots of whole pages, (slots,)."""
        raise NotImplementedError


class OneKindAllocator(GrowingAllocator):
    """An allocator of the slots of one kind of KV. Methods override SGLang's."""

    kv: ElasticKv
    """Set before SGLang's constructor, which clears the allocator."""

    @property
    def kinds(self) -> tuple[ElasticKv, ...]:
        """The kinds of KV that it hands out."""
        return (self.kv,)

    @override
    def clear(self) -> None:
        self.free_group: list[torch.Tensor] | None = None
        # Read only by SGLang's debug output.
        self.free_pages = self.release_pages = torch.empty(0, dtype=torch.int64, device=self.device)
        self.kv.free_all()

    @override
    def available_size(self) -> int:
        return self.kv.available

    def _free_evicted(self, slots: torch.Tensor) -> None:
        self.free(slots)


@contextmanager
def evicted_together(allocator: GrowingAllocator) -> Iterator[None]:
    """Has an allocator return as one, for each kind of KV, whatever is evicted in the block: that takes a few kernels
    and one copy of numbers from the device, not some for each prefix. Nothing changes inside another such block."""
    if allocator.evicted is not None:
        yield
        return
    allocator.eviction_begins()
    try:
        yield
    finally:
        allocator.eviction_ends()


class ElasticAllocator(OneKindAllocator, TokenToKVPoolAllocator):  # type: ignore[misc]
    """An allocator whose slots are KV blocks (envelopes) of one token each; slot 0 is the dummy. Methods override
    SGLang's, with its shapes and types."""

    def __init__(self, size: int, *, dtype: torch.dtype, device: str, kvcache: Any, kv: ElasticKv) -> None:
        self.kv = kv
        super().__init__(size, dtype, device, kvcache, need_sort=False)

    @override
    def alloc(self, need_size: int) -> torch.Tensor | None:
        taken = self.kv.envelopes.take(need_size)
        return None if taken is None else torch.from_numpy(taken)

    @override
    def free(self, free_index: torch.Tensor) -> None:
        if free_index.numel() == 0:
            return
        if self.evicted is not None:
            self.note_evicted(free_index)
            return
        if self.free_group is not None:
            # The index may be a view of a row that is written again before the group ends.
            self.free_group.append(free_index.clone())
            return
        self.kv.envelopes.give(free_index.numpy().astype(np.int64, copy=False))
