"""Extents and addresses of one process."""

import os

import pytest

from balloond.backends import maker, mapper
from balloond.node.extent_pool import ExtentPool
from balloond.policy.capacity import check
from tests.balloond.conftest import TIMEOUT_S
from tests.gpu.conftest import DEVICE, MIB, free_bytes, taken, until_free

PAGE = 2 * MIB


@pytest.fixture(scope="module")
def gpu():
    from tests.gpu.device import Gpu

    return Gpu()


@pytest.fixture
def gate(gpu):
    from tests.gpu.device import Gate

    gate = Gate(gpu)
    yield gate
    gate.open()


@pytest.fixture
def one(gpu, gate):
    """A mapper, and the first of 64 MiB of addresses."""
    one = mapper(DEVICE, lambda: [gate.stream])
    address = one.reserve(64 * MIB)
    yield one, address
    one.release(address, 64 * MIB)


def put_there(mapper, address, nbytes):
    fd = maker(DEVICE).create(nbytes)
    mapper.map(address, fd, nbytes)
    os.close(fd)


def test_cuda_device_passes_the_checks_of_balloond():
    from balloond.backends import look

    hardware = look(DEVICE)
    check(DEVICE, hardware, PAGE)
    assert 0 < hardware.free_bytes <= hardware.total_bytes


def test_a_mapped_extent_is_zero_and_stays_when_its_descriptor_closes(gpu, one):
    mapper, address = one
    put_there(mapper, address + 8 * MIB, 4 * MIB)
    assert gpu.get(address + 8 * MIB, 4 * MIB) == bytes(4 * MIB)
    gpu.fill(address + 8 * MIB, 7, 4 * MIB)
    assert set(gpu.get(address + 8 * MIB, 4 * MIB)) == {7}


def test_unmapped_extent_keeps_its_content_while_its_descriptor_is_open(gpu, one):
    mapper, address = one
    fd = maker(DEVICE).create(PAGE)
    mapper.map(address, fd, PAGE)
    gpu.put(address, b"content")
    mapper.unmap(address, PAGE)
    mapper.map(address + PAGE, fd, PAGE)
    os.close(fd)
    assert gpu.get(address + PAGE, 7) == b"content"


def test_extents_unmapped_together_make_place_for_an_empty_one(gpu, one):
    mapper, address = one
    for size, at in ((PAGE, 0), (3 * PAGE, PAGE), (PAGE, 4 * PAGE)):
        put_there(mapper, address + at, size)
    gpu.fill(address, 9, 5 * PAGE)
    mapper.unmap(address, 5 * PAGE)
    put_there(mapper, address, 5 * PAGE)
    assert gpu.get(address, 5 * PAGE) == bytes(5 * PAGE)


async def test_releasing_a_range_frees_the_extents_mapped_in_it(gpu):
    one = mapper(DEVICE)
    before = free_bytes()
    address = one.reserve(64 * MIB)
    put_there(one, address, 16 * MIB)
    put_there(one, address + 32 * MIB, 8 * MIB)
    assert taken(before) == 24 * MIB
    one.release(address, 64 * MIB)
    await until_free(before)


def test_poisoned_extent_reads_as_not_a_number(gpu, one):
    mapper, address = one
    put_there(mapper, address, PAGE)
    mapper.poison(address, PAGE)
    assert set(gpu.get(address, PAGE)) == {0xFF}


def test_a_fence_opens_when_the_work_before_it_is_done(gpu, gate, one):
    mapper, _ = one
    gate.close()
    fences = [mapper.fence(), mapper.fence()]
    assert not any(fence.done() for fence in fences)
    gate.open()
    while not all(fence.done() for fence in fences):
        pass
    gate.close()
    assert not mapper.fence().done(), "events that are used again are closed again"


@pytest.mark.parametrize("nbytes", [PAGE + 4096, 0])
def test_extent_of_no_whole_pages_is_an_error_of_one_line(nbytes):
    with pytest.raises(OSError, match="cuMemCreate: CUDA_ERROR_INVALID_VALUE"):
        maker(DEVICE).create(nbytes)


def test_extent_larger_than_the_device_is_out_of_memory():
    with pytest.raises(OSError, match="cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY") as error:
        maker(DEVICE).create(1 << 40)
    assert error.value.errno == 12


def test_mapping_a_descriptor_that_is_no_extent_is_an_error(one):
    mapper, address = one
    fd = os.memfd_create("not an extent")
    os.ftruncate(fd, PAGE)
    try:
        with pytest.raises(OSError, match="cuMemImportFromShareableHandle"):
            mapper.map(address, fd, PAGE)
    finally:
        os.close(fd)


async def test_spares_take_what_was_set_aside_and_no_more(gpu):
    before = free_bytes()
    spares = ExtentPool(maker(DEVICE), 64 * MIB, 8 * MIB)
    assert spares.wait_full(TIMEOUT_S)
    assert spares.ready == {8 * MIB: 8}
    assert spares.set_aside_bytes == 66 * MIB
    assert taken(before) == 66 * MIB
    fds = [spares.create(8 * MIB) for _ in range(8)]
    assert spares.wait_full(TIMEOUT_S)
    assert taken(before) == 130 * MIB
    spares.close()
    for fd in fds:
        os.close(fd)
    await until_free(before)
