import gc
import os

import pytest
import torch

from balloond.backends.cpu import PAGE_BYTES, CpuMaker, CpuMapper
from balloond.driver import tensor
from balloond.driver.tensor import tensor_over


@pytest.fixture
def mapped():
    mapper = CpuMapper()
    address = mapper.reserve(8 * PAGE_BYTES)

    def put(page):
        fd = CpuMaker().create(PAGE_BYTES)
        mapper.map(address + page * PAGE_BYTES, fd, PAGE_BYTES)
        os.close(fd)

    yield mapper, address, put
    mapper.release(address, 8 * PAGE_BYTES)


def test_a_tensor_over_addresses_without_memory_can_be_made_and_viewed(mapped):
    _, address, put = mapped
    whole = tensor_over(address, 8 * PAGE_BYTES)
    assert (whole.data_ptr(), whole.dtype, whole.shape) == (address, torch.uint8, (8 * PAGE_BYTES,))
    rows = whole.view(torch.bfloat16).view(8, -1)
    put(5)
    rows[5].fill_(1.5)
    assert rows[5].float().sum().item() == 1.5 * PAGE_BYTES / 2
    assert rows[5].data_ptr() == address + 5 * PAGE_BYTES


def test_views_stay_valid_when_the_memory_under_them_changes(mapped):
    mapper, address, put = mapped
    row = tensor_over(address, 8 * PAGE_BYTES).view(8, -1)[2]
    put(2)
    row.fill_(9)
    mapper.unmap(address + 2 * PAGE_BYTES, PAGE_BYTES)
    put(2)
    assert row.sum().item() == 0
    mapper.poison(address + 2 * PAGE_BYTES, PAGE_BYTES)
    assert torch.isnan(row.view(torch.bfloat16)).all()


def test_a_tensor_that_is_gone_leaves_nothing_behind(mapped):
    _, address, _ = mapped
    before = len(tensor._alive)
    view = tensor_over(address, PAGE_BYTES)[:10]
    assert len(tensor._alive) == before + 1
    del view
    gc.collect()
    assert len(tensor._alive) == before
