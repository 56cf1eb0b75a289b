"""Pages that SGLang evicts one after the other in a block of ours go back in one call for each kind of KV, also where
the block fails."""

from __future__ import annotations

import pytest

from tests.gpu_scheduler.engines.sglang.forks import Imported

pytestmark = pytest.mark.sglang
TOGETHER = """
from types import SimpleNamespace

import torch

from gpu_scheduler.engines.sglang.kv.pools.allocator import evicted_together
from gpu_scheduler.engines.sglang.kv.pools.paged_allocator import ElasticPagedAllocator

freed = []
pages = object.__new__(ElasticPagedAllocator)
pages.page_size, pages.free_group = 16, None
pages.kv = SimpleNamespace(free=lambda numbers: freed.append(numbers.tolist()))
with evicted_together(pages):
    pages.free(torch.arange(0, 32))
    with evicted_together(pages):
        pages.free(torch.arange(64, 80))
    assert not freed, "the inner block does not end the outer one"
assert freed == [[0, 1, 4]]
try:
    with evicted_together(pages):
        pages.free(torch.arange(32, 48))
        raise KeyError
except KeyError:
    pass
assert freed[1:] == [[2]] and pages.free_group is None
pages.free(torch.arange(48, 64))
assert freed[2:] == [[3]], "outside a block at once"
"""
IN_WINDOWS = """
from types import SimpleNamespace

import torch

from gpu_scheduler.engines.sglang.kv.pools.allocator import evicted_together
from gpu_scheduler.engines.sglang.kv.pools.paged_allocator import ElasticPagedAllocator
from gpu_scheduler.engines.sglang.kv.pools.window_allocator import ElasticWindowAllocator

SIZE = 16
freed = []


def of_kind(name):
    pages = object.__new__(ElasticPagedAllocator)
    pages.page_size, pages.free_group, pages.size, pages.debug_mode = SIZE, None, 256, False
    pages.kv = SimpleNamespace(free=lambda numbers: freed.append((name, numbers.tolist())), available=0)
    return pages


def slots(*pages):
    return torch.cat([torch.arange(page * SIZE, (page + 1) * SIZE) for page in pages])


allocator = object.__new__(ElasticWindowAllocator)
allocator.page_size, allocator.free_group, allocator._evicted = SIZE, None, None
allocator.swa_free_group, allocator.swa_page_ids_group = [], []
allocator.full_attn_allocator, allocator.swa_attn_allocator = of_kind("every"), of_kind("window")
table = allocator.full_to_swa_index_mapping = torch.zeros(8 * SIZE, dtype=torch.int64)
for page in range(1, 8):  # page 7 of the window for page 1 of the other kind, and so on
    table[slots(page)] = slots(8 - page)
kept = slots(4)

with evicted_together(allocator):
    allocator.free_swa_segment(slots(1, 2), start_pos=0)
    allocator.full_attn_allocator.free_segment(slots(1, 2), start_pos=0)
    allocator.free_swa_segment(slots(3), start_pos=0)  # a node that loses what is in the window, and stays
    assert not freed
assert sorted(freed) == [("every", [1, 2]), ("window", [7, 6, 5])]
assert not table[slots(1, 2, 3)].any() and table[kept].tolist() == kept.tolist(), "pages that left have no place"
freed.clear()
try:
    with evicted_together(allocator):
        allocator.free_swa_segment(slots(5), start_pos=0)
        raise KeyError
except KeyError:
    pass
assert freed == [("window", [3])]
allocator.free_swa_segment(slots(6), start_pos=0)
assert freed[1:] == [("window", [2])], "outside a block at once"

# In a group of SGLang's own the places are looked up at once: pages may get others before that ends.
allocator.free_group_begin()
allocator.free_swa_segment(slots(7), start_pos=0)
assert not table[slots(7)].any() and len(freed) == 2
allocator.free_group_end()
assert freed[2:] == [("window", [1])]
"""


def test_pages_that_are_evicted_in_one_block_return_as_one(imported: Imported) -> None:
    imported.run(TOGETHER)


def test_pages_of_both_kinds_that_are_evicted_in_one_block_return_as_one_each(imported: Imported) -> None:
    imported.run(IN_WINDOWS)
