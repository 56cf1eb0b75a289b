"""Pages that SGLang frees one after the other in a block of ours go back in one call, also where the block fails."""

from __future__ import annotations

import pytest

from tests.gpu_scheduler.engines.sglang.forks import Imported

pytestmark = pytest.mark.sglang
TOGETHER = """
from types import SimpleNamespace

import torch

from gpu_scheduler.engines.sglang.kv.pools.allocator import freed_together
from gpu_scheduler.engines.sglang.kv.pools.paged_allocator import ElasticPagedAllocator
from gpu_scheduler.engines.sglang.kv.pools.window_allocator import ElasticWindowAllocator

freed = []
pages = object.__new__(ElasticPagedAllocator)
pages.page_size, pages.free_group = 16, None
pages.kv = SimpleNamespace(free=lambda numbers: freed.append(numbers.tolist()))
with freed_together(pages):
    pages.free(torch.arange(0, 32))
    with freed_together(pages):
        pages.free(torch.arange(64, 80))
    assert not freed, "the inner block does not end the outer one"
assert freed == [[0, 1, 4]]
try:
    with freed_together(pages):
        pages.free(torch.arange(32, 48))
        raise KeyError
except KeyError:
    pass
assert freed[1:] == [[2]] and pages.free_group is None
pages.free(torch.arange(48, 64))
assert freed[2:] == [[3]], "outside a block at once"

with freed_together(object.__new__(ElasticWindowAllocator)):
    pass
"""


def test_pages_that_are_freed_in_one_block_return_as_one(imported: Imported) -> None:
    imported.run(TOGETHER)
