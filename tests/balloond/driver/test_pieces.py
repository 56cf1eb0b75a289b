import asyncio
import ctypes

import pytest

from balloond.backends.cpu import CpuMapper
from balloond.driver.connection.lease import GrowRefused, Lease
from balloond.driver.pieces import PieceRange
from tests.balloond.conftest import KIB, MIB, TIMEOUT_S


@pytest.fixture
def lease(shared):
    asyncio.run(shared.book("a", weights=8 * MIB))
    lease = Lease.attach(shared.handoff, shared.name, "a", timeout_s=TIMEOUT_S)
    yield lease
    lease.detach()


@pytest.fixture
def pieces(lease):
    pieces = PieceRange(lease, CpuMapper(), span_bytes=32 * MIB, extent_bytes=MIB, timeout_s=TIMEOUT_S)
    yield pieces
    pieces.close()


def test_pieces_lie_in_a_row_in_whole_extents(shared, pieces):
    first, second = pieces.take(MIB), pieces.take(100)
    assert (first, second) == (pieces.address, pieces.address + MIB)
    assert (pieces.mapped_bytes, pieces.taken_bytes) == (2 * MIB, MIB + 64 * KIB)
    ctypes.memset(second, 1, 64 * KIB)
    (state,) = asyncio.run(shared.device()).leases
    assert (state.weights_bytes, state.extents) == (2 * MIB, 2)


def test_piece_range_reserved_bytes_are_taken_without_mapping(pieces):
    pieces.reserve(3 * MIB)
    assert pieces.mapped_bytes == 3 * MIB
    pieces.take(2 * MIB)
    pieces.take(MIB)
    assert pieces.mapped_bytes == 3 * MIB


def test_trimming_returns_the_extents_without_a_piece(pieces):
    pieces.reserve(6 * MIB)
    pieces.take(MIB + 1)
    pieces.trim()
    assert pieces.mapped_bytes == 2 * MIB
    pieces.take(2 * MIB)
    assert pieces.mapped_bytes == 4 * MIB


def test_pieces_leave_and_come_back_at_the_same_addresses_empty(shared, pieces):
    address = pieces.take(2 * MIB)
    ctypes.memset(address, 7, 2 * MIB)
    pieces.leave()
    pieces.leave()
    assert (pieces.mapped_bytes, pieces.taken_bytes) == (0, 2 * MIB)
    asyncio.run(shared.until(lambda device: device.leased_bytes == 0))
    pieces.come_back()
    pieces.come_back()
    assert ctypes.string_at(address, 2 * MIB) == bytes(2 * MIB)


def test_addresses_of_pieces_are_taken_again_when_no_piece_lies_behind_them(pieces):
    first, second, third = (pieces.take(MIB) for _ in range(3))
    pieces.give(second)
    assert pieces.take(MIB) == third + MIB
    for address in (first, third, third + MIB):
        pieces.give(address)
    assert pieces.taken_bytes == 0
    assert pieces.take(MIB) == first


def test_a_piece_that_is_refused_changes_nothing(pieces):
    pieces.take(MIB)
    with pytest.raises(GrowRefused, match="exhausted"):
        pieces.take(24 * MIB)
    with pytest.raises(ValueError, match="do not fit"):
        pieces.take(64 * MIB)
    assert (pieces.mapped_bytes, pieces.taken_bytes) == (MIB, MIB)


def test_piece_range_that_finds_no_memory_stays_away(shared, lease, pieces):
    pieces.take(8 * MIB)
    pieces.leave()
    asyncio.run(shared.until(lambda device: device.leased_bytes == 0))
    asyncio.run(shared.book("b"))
    other = Lease.attach(shared.handoff, shared.name, "b", timeout_s=TIMEOUT_S)
    taken = PieceRange(other, CpuMapper(), span_bytes=16 * MIB, extent_bytes=MIB, timeout_s=TIMEOUT_S)
    taken.take(12 * MIB)
    with pytest.raises(GrowRefused):
        pieces.come_back()
    taken.close()
    asyncio.run(shared.until(lambda device: device.leased_bytes == 0))
    pieces.come_back()
    assert pieces.mapped_bytes == 8 * MIB
    other.detach()
