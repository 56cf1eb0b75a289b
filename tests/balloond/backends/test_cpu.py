import ctypes
import math
import os
import struct
import subprocess
import sys

import pytest

from balloond import backends
from balloond.backends.cpu import PAGE_BYTES, CpuMaker, CpuMapper
from services.errors import Invalid


@pytest.fixture
def mapper():
    return CpuMapper()


@pytest.fixture
def address(mapper):
    address = mapper.reserve(16 * PAGE_BYTES)
    yield address
    mapper.release(address, 16 * PAGE_BYTES)


@pytest.fixture
def extent():
    fd = CpuMaker().create(2 * PAGE_BYTES)
    yield fd
    os.close(fd)


def test_reserved_addresses_are_whole_pages(mapper, address):
    assert address % PAGE_BYTES == 0


def test_cpu_new_extent_is_zero_and_shared_by_all_its_mappings(mapper, address, extent):
    mapper.map(address, extent, 2 * PAGE_BYTES)
    mapper.map(address + 4 * PAGE_BYTES, extent, 2 * PAGE_BYTES)
    assert ctypes.string_at(address, 2 * PAGE_BYTES) == bytes(2 * PAGE_BYTES)
    ctypes.memmove(address, b"here", 4)
    assert ctypes.string_at(address + 4 * PAGE_BYTES, 4) == b"here"


def test_a_mapping_keeps_the_memory_when_its_descriptor_is_closed(mapper, address):
    fd = CpuMaker().create(PAGE_BYTES)
    mapper.map(address, fd, PAGE_BYTES)
    os.close(fd)
    ctypes.memmove(address, b"x", 1)
    assert ctypes.string_at(address, 1) == b"x"


@pytest.mark.parametrize("mapped_before", [False, True])
def test_touching_an_address_without_memory_is_a_fault(mapped_before):
    code = f"""
import ctypes
from balloond.backends.cpu import CpuMaker, CpuMapper
mapper = CpuMapper()
address = mapper.reserve({PAGE_BYTES})
if {mapped_before}:
    mapper.map(address, CpuMaker().create({PAGE_BYTES}), {PAGE_BYTES})
    ctypes.string_at(address, 1)
    mapper.unmap(address, {PAGE_BYTES})
ctypes.string_at(address, 1)
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == -11


def test_poison_is_not_a_number_in_any_float_type(mapper, address, extent):
    mapper.map(address, extent, 2 * PAGE_BYTES)
    mapper.poison(address, PAGE_BYTES)
    poisoned = ctypes.string_at(address, PAGE_BYTES)
    for kind in "edf":
        assert all(math.isnan(x) for (x,) in struct.iter_unpack(f"<{kind}", poisoned[:1024]))
    (bfloat16,) = struct.unpack("<f", b"\0\0" + poisoned[:2])
    assert math.isnan(bfloat16)
    assert ctypes.string_at(address + PAGE_BYTES, 1) == b"\0"


def test_an_unmapped_range_can_be_mapped_again_at_the_same_address(mapper, address, extent):
    mapper.map(address, extent, 2 * PAGE_BYTES)
    ctypes.memmove(address, b"kept", 4)
    mapper.unmap(address, 2 * PAGE_BYTES)
    mapper.map(address, extent, 2 * PAGE_BYTES)
    assert ctypes.string_at(address, 4) == b"kept"


def test_mapping_an_invalid_descriptor_is_an_error(mapper, address):
    with pytest.raises(OSError, match="mapping 65536 bytes"):
        mapper.map(address, -1, PAGE_BYTES)


def test_cpu_fence_is_open_because_host_code_has_no_queue(mapper):
    assert mapper.fence().done()


@pytest.mark.parametrize("name", ["tpu:0", "cpu", "cpu:x", "cuda", "cuda:-1"])
def test_a_device_without_a_backend_is_refused_by_name(name):
    with pytest.raises(Invalid, match=name):
        backends.maker(name)
    with pytest.raises(Invalid, match=name):
        backends.mapper(name)
