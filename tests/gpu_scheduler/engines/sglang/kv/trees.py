"""SGLang's prefix cache with our core, over an allocator that only keeps account. Imports SGLang: for processes that
have it."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from gpu_scheduler.engines.sglang.kv import prefix_tree


class Slots:
    """An allocator of slots, of which it knows those that were freed."""

    device = torch.device("cpu")
    evicted: list[torch.Tensor] | None = None

    def __init__(self) -> None:
        self.next = 0
        self.freed: list[int] = []

    def take(self, count: int, page_size: int) -> torch.Tensor:
        """Slots of `count` tokens in whole new pages."""
        first, self.next = self.next, self.next + -(-count // page_size) * page_size
        return torch.arange(first, first + count)

    def eviction_begins(self) -> None:
        self.evicted = []

    def eviction_ends(self) -> None:
        self.evicted = None

    def free_segment(self, indices: torch.Tensor, *, start_pos: int) -> None:
        assert start_pos == 0
        self.freed += indices.tolist()


def cache_over(slots: Slots, page_size: int) -> Any:
    prefix_tree.register()
    return UnifiedRadixCache(
        CacheInitParams(
            disable=False,
            req_to_token_pool=None,  # type: ignore[arg-type]
            token_to_kv_pool_allocator=slots,  # type: ignore[arg-type]
            page_size=page_size,
            tree_components=(ComponentType.FULL,),
            tree_core_backend=prefix_tree.CORE,
        )
    )
