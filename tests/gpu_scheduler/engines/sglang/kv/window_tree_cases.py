"""The prefix tree of a model whose windows have a KV pool of their own, over our allocator of both kinds, whose pages
only keep account. Imports SGLang: `test_prefix_tree.py` runs it in a process that has it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from gpu_scheduler.engines.sglang.kv import prefix_tree
from gpu_scheduler.engines.sglang.kv.pools import allocator as allocators
from gpu_scheduler.engines.sglang.kv.pools.paged_allocator import ElasticPagedAllocator
from gpu_scheduler.engines.sglang.kv.pools.window_allocator import ElasticWindowAllocator
from gpu_scheduler.engines.sglang.kv.prefix_tree import PrefixTree

SIZE, PAGES, WINDOW = 4, 512, 8


class Pages:
    """The pages of one kind, of which it knows those that are free."""

    page_size = SIZE

    def __init__(self) -> None:
        self.free_pages = set(range(1, PAGES))

    def free(self, numbers: torch.Tensor) -> None:
        freed = numbers.tolist()
        assert 0 not in freed and not self.free_pages.intersection(freed) and len(set(freed)) == len(freed)
        self.free_pages.update(freed)

    @property
    def available(self) -> int:
        return len(self.free_pages) * SIZE

    def take(self, count: int) -> torch.Tensor:
        """Slots of the lowest `count` free pages."""
        taken = sorted(self.free_pages)[:count]
        self.free_pages.difference_update(taken)
        return torch.cat([torch.empty(0, dtype=torch.int64), *(torch.arange(SIZE) + page * SIZE for page in taken)])


def _of_kind() -> Any:
    made = object.__new__(ElasticPagedAllocator)
    made.page_size, made.free_group, made.size, made.debug_mode = SIZE, None, PAGES * SIZE, True
    made.kv = Pages()  # type: ignore[assignment]
    return made


class Bench:
    def __init__(self) -> None:
        prefix_tree.register()
        self.allocator: Any = object.__new__(ElasticWindowAllocator)
        self.allocator.page_size, self.allocator.free_group = SIZE, None
        self.allocator.device = torch.device("cpu")
        self.allocator.swa_free_group, self.allocator.swa_page_ids_group = [], []
        self.allocator.full_attn_allocator, self.allocator.swa_attn_allocator = _of_kind(), _of_kind()
        self.every, self.window = (
            each.kv for each in (self.allocator.full_attn_allocator, self.allocator.swa_attn_allocator)
        )
        self.table = self.allocator.full_to_swa_index_mapping = torch.zeros(PAGES * SIZE + 1, dtype=torch.int64)
        self.table[-1] = -1
        self.allocator._kvcache = SimpleNamespace(
            full_to_swa_index_mapping=self.table, translate_loc_from_full_to_swa=lambda slots: self.table[slots]
        )
        cache: Any = UnifiedRadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=None,  # type: ignore[arg-type]
                token_to_kv_pool_allocator=self.allocator,
                page_size=SIZE,
                tree_components=(ComponentType.FULL, ComponentType.SWA),
                sliding_window_size=WINDOW,
                tree_core_backend=prefix_tree.CORE,
            )
        )
        self.tree, self.core = PrefixTree(cache), cache.tree_core

    def put(self, words: list[int]) -> None:
        """Caches a prompt that has a page for each word."""
        key = self.tree.key([word for word in words for _ in range(SIZE)])
        there = self.tree.match(key).slots
        pages = (len(key) - len(there)) // SIZE
        fresh = self.every.take(pages)
        self.table[fresh] = self.window.take(pages)
        self.tree.insert(key, torch.cat([there, fresh]), len(there))

    def cut(self, which: int) -> None:
        """Takes an unlocked node and all below it out of the tree, as eviction by extents does."""
        nodes = [node for node, _ in self.tree.unlocked_nodes()]
        if nodes:
            with self.tree.evicted_together():
                for gone in self.tree.cut(nodes[which % len(nodes)], 0):
                    self.every.free(self.tree.slots(gone)[::SIZE] // SIZE)

    def check(self) -> None:
        """Every page of each kind is free or in one node, and the table leads from the one to the other."""
        pages: list[set[int]] = [set(), set()]
        for node, _ in self.tree.nodes():
            slots = self.tree.slots(node)
            in_window = node.component_data[ComponentType.SWA].value
            pages[0].update((slots[::SIZE] // SIZE).tolist())
            if in_window is None:
                assert not self.table[slots].any()
            else:
                assert torch.equal(self.table[slots], in_window)
                pages[1].update((in_window[::SIZE] // SIZE).tolist())
        for used, kind in zip(pages, (self.every, self.window), strict=True):
            assert used.isdisjoint(kind.free_pages) and used | kind.free_pages == set(range(1, PAGES))
        assert self.allocator.evicted is None and self.allocator.full_attn_allocator.evicted is None
        self.tree.check()


_WORDS = st.lists(st.integers(0, 2), min_size=1, max_size=8)
_STEP = st.tuples(
    st.sampled_from(["put"] * 5 + ["evict", "evict in window", "evict both", "in a group", "cut", "lock", "unlock"]),
    _WORDS,
)


@settings(max_examples=80, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(st.lists(_STEP, min_size=30, max_size=60), st.sampled_from([8, 1 << 20]))
def pages_of_both_kinds_are_free_or_in_one_node(steps: list[tuple[str, list[int]]], together: int) -> None:
    with patch.object(allocators, "SLOTS_TOGETHER", together):
        bench, locks = Bench(), list[Any]()
        for kind, words in steps:
            some, more = 3 * sum(words), 3 * len(words)
            if kind == "put":
                bench.put(words)
            elif kind == "evict":
                bench.tree.evict(some)
            elif kind == "evict in window":
                bench.tree.evict(0, some)
            elif kind == "evict both":
                bench.tree.evict(some, more)
            elif kind == "in a group":  # of SGLang's own
                bench.allocator.free_group_begin()
                bench.tree.evict(some, more)
                bench.allocator.free_group_end()
            elif kind == "cut":
                bench.cut(some + more)
            elif kind == "lock":
                key = bench.tree.key([word for word in words for _ in range(SIZE)])
                locks.append(bench.tree.lock(bench.tree.match(key).node))
            elif locks:
                bench.tree.unlock(locks.pop(some % len(locks)))
            bench.check()
