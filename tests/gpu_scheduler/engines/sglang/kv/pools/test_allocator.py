"""Allocators of pages: what a step gets in one kind of KV or two, and pages that SGLang evicts one after the other in a
block of ours, which go back in one call for each kind, also where the block fails."""

from __future__ import annotations

import pytest

from tests.gpu_scheduler.engines.sglang.forks import Imported

pytestmark = pytest.mark.sglang
TOGETHER = """
from types import SimpleNamespace

import torch

from gpu_scheduler.engines.sglang.kv.pools import allocator
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
allocator.SLOTS_TOGETHER = 32
with evicted_together(pages):
    for first in (64, 80, 96):
        pages.free(torch.arange(first, first + 16))
    assert freed[3:] == [[4, 5]], "so many have no room together"
assert freed[4:] == [[6]]
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
allocator.page_size, allocator.free_group = SIZE, None
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

PLACED = """
from types import SimpleNamespace

import torch

from gpu_scheduler.engines.sglang.kv.pools.paged_allocator import ElasticPagedAllocator
from gpu_scheduler.engines.sglang.kv.pools.window_allocator import ElasticWindowAllocator
from gpu_scheduler.engines.sglang.kv.slot_transfer import HostIds
from gpu_scheduler.engines.sglang.policy.envelopes import Envelopes

SIZE, PAGES = 4, 32
sent = []


class Sent(HostIds):
    def send(self, numbers):
        sent.append(numbers.tolist())
        return super().send(numbers)


def of_kind(first):
    pages = object.__new__(ElasticPagedAllocator)
    pages.page_size, pages.device, pages._on_host = SIZE, "cpu", True
    envelopes = Envelopes(envelope_bytes=64, extent_bytes=64, count=PAGES)
    envelopes.hold(range(first, PAGES))
    pages.kv = SimpleNamespace(envelopes=envelopes, ids=Sent())
    return pages


allocator = object.__new__(ElasticWindowAllocator)
allocator.page_size, allocator.device = SIZE, "cpu"
allocator.full_attn_allocator, allocator.swa_attn_allocator = of_kind(3), of_kind(20)
allocator.kinds = allocator.full_attn_allocator.kv, allocator.swa_attn_allocator.kv
table = allocator.full_to_swa_index_mapping = torch.zeros(PAGES * SIZE + 1, dtype=torch.int64)
table[-1] = -1
allocator._kvcache = SimpleNamespace(
    full_to_swa_index_mapping=table, translate_loc_from_full_to_swa=lambda slots: table[slots]
)


def numbers(*values):
    return torch.tensor(values)


# Two prompts of six and three tokens: two pages and one.
before, after = numbers(0, 0), numbers(6, 3)
slots = allocator.alloc_extend(before, before, after, after, numbers(-1, -1), 9)
assert slots.tolist() == [12, 13, 14, 15, 16, 17, 20, 21, 22]
assert table[slots].tolist() == [80, 81, 82, 83, 84, 85, 88, 89, 90]
assert sent == [[3, 4, 5, 20, 21, 22]], "one copy"

# The first goes on on its page, the second for the second time on a page of its own.
after = numbers(7, 4)
slots = allocator.alloc_decode(after, after, numbers(17, 22))
assert slots.tolist() == [18, 23] and table[slots].tolist() == [86, 91]
after = numbers(8, 5)
slots = allocator.alloc_decode(after, after, numbers(18, 23))
assert slots.tolist() == [19, 24] and table[slots].tolist() == [87, 92]

# What one kind has no room for takes nothing of the other either.
live = [kind.envelopes.live for kind in allocator.kinds]
before, after = numbers(0), numbers(9 * SIZE)
assert allocator.kinds[0].envelopes.available > 9 > allocator.kinds[1].envelopes.available
assert allocator.alloc_extend(before, before, after, after, numbers(-1), 9 * SIZE) is None
assert live == [kind.envelopes.live for kind in allocator.kinds]
"""


def test_a_token_gets_a_place_in_each_kind_or_in_none(imported: Imported) -> None:
    imported.run(PLACED)


def test_pages_that_are_evicted_in_one_block_return_as_one(imported: Imported) -> None:
    imported.run(TOGETHER)


def test_pages_of_both_kinds_that_are_evicted_in_one_block_return_as_one_each(imported: Imported) -> None:
    imported.run(IN_WINDOWS)
