import asyncio
import ctypes

import pytest

from balloond.backends.cpu import CpuMapper
from balloond.driver.connection.lease import GrowRefused, Lease
from balloond.driver.weights import WeightsRange, _parts
from tests.balloond.conftest import KIB, MIB, TIMEOUT_S


@pytest.fixture
def lease(shared):
    asyncio.run(shared.book("a", weights=8 * MIB))
    lease = Lease.attach(shared.handoff, shared.name, "a", timeout_s=TIMEOUT_S)
    yield lease
    lease.detach()


def make(lease, span=8 * MIB, extent=MIB):
    return WeightsRange(lease, CpuMapper(), span_bytes=span, extent_bytes=extent)


def test_weights_are_mapped_in_a_row_in_large_extents_and_one_of_the_rest(shared, lease):
    weights = make(lease)
    weights.grow(3 * MIB + 100, timeout_s=TIMEOUT_S)
    assert weights.mapped_bytes == 3 * MIB + 64 * KIB
    assert ctypes.string_at(weights.address, weights.mapped_bytes) == bytes(weights.mapped_bytes)
    ctypes.memset(weights.address, 1, weights.mapped_bytes)
    (state,) = asyncio.run(shared.device()).leases
    assert (state.weights_bytes, state.extents) == (3 * MIB + 64 * KIB, 4)
    weights.close()
    asyncio.run(shared.until(lambda device: device.leased_bytes == 0))


def test_weights_of_many_extents_are_requested_in_parts_large_ones_first(shared, lease):
    weights = make(lease, extent=64 * KIB)
    asked, grow = [], lease.grow

    def counting(kind, nbytes, count, **keys):
        asked.append((nbytes, count))
        return grow(kind, nbytes, count, **keys)

    lease.grow = counting
    weights.grow(8 * MIB - 64 * KIB, timeout_s=TIMEOUT_S)
    assert asked == [(768 * KIB, 10), (64 * KIB, 7)]
    assert weights.mapped_bytes == 8 * MIB - 64 * KIB
    ctypes.memset(weights.address, 1, weights.mapped_bytes)
    weights.close()


def test_weights_request_is_for_no_more_extents_than_one_message_carries():
    assert list(_parts([8] * 130 + [1])) == [(8, 64), (8, 64), (8, 2), (1, 1)]


def test_weights_leave_and_come_back_at_the_same_address_empty(shared, lease):
    weights = make(lease)
    address = weights.address
    for _ in range(2):
        weights.grow(2 * MIB, timeout_s=TIMEOUT_S)
        assert ctypes.string_at(address, 2 * MIB) == bytes(2 * MIB)
        ctypes.memset(address, 7, 2 * MIB)
        weights.leave()
        assert weights.mapped_bytes == 0
    weights.leave()
    asyncio.run(shared.until(lambda device: device.leased_bytes == 0))
    weights.close()


def test_weights_growth_that_is_refused_leaves_nothing_mapped_or_held(shared, lease):
    weights = make(lease, span=32 * MIB)
    with pytest.raises(GrowRefused, match="exhausted"):
        weights.grow(16 * MIB + 1, timeout_s=TIMEOUT_S)
    assert weights.mapped_bytes == 0
    assert lease.held_ids == set()
    asyncio.run(shared.until(lambda device: device.leased_bytes == 0))
    weights.grow(16 * MIB, timeout_s=TIMEOUT_S)
    weights.close()


def test_weights_that_do_not_fit_the_addresses_are_refused(lease):
    weights = make(lease, span=MIB)
    with pytest.raises(ValueError, match="do not fit"):
        weights.grow(2 * MIB, timeout_s=TIMEOUT_S)
    weights.grow(MIB, timeout_s=TIMEOUT_S)
    weights.close()
    weights.close()


def test_weights_grow_behind_earlier_extents_until_one_is_cut(shared, lease):
    weights = make(lease)
    weights.grow(2 * MIB, timeout_s=TIMEOUT_S)
    ctypes.memset(weights.address, 7, 2 * MIB)
    weights.grow(2 * MIB, timeout_s=TIMEOUT_S)
    weights.grow(3 * MIB + 1, timeout_s=TIMEOUT_S)
    assert ctypes.string_at(weights.address, 2 * MIB) == b"\7" * (2 * MIB)
    assert ctypes.string_at(weights.address + 2 * MIB, MIB + 64 * KIB) == bytes(MIB + 64 * KIB)
    with pytest.raises(ValueError, match="the last extent is cut"):
        weights.grow(4 * MIB, timeout_s=TIMEOUT_S)
    weights.close()
    asyncio.run(shared.until(lambda device: device.leased_bytes == 0))


def test_weights_further_growth_that_is_refused_keeps_earlier_extents(shared, lease):
    weights = make(lease, span=32 * MIB)
    weights.grow(2 * MIB, timeout_s=TIMEOUT_S)
    ctypes.memset(weights.address, 7, 2 * MIB)
    with pytest.raises(GrowRefused, match="exhausted"):
        weights.grow(17 * MIB, timeout_s=TIMEOUT_S)
    assert weights.mapped_bytes == 2 * MIB and len(lease.held_ids) == 2
    assert ctypes.string_at(weights.address, 2 * MIB) == b"\7" * (2 * MIB)
    weights.close()
