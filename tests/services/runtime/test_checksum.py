"""The checksum that host and GPU share."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.runtime.checksum import MULTIPLIER, ROW_BYTES, Checksum, as_text, checksum


def by_definition(data: bytes) -> str:
    total = 0
    for row in range(len(data) // ROW_BYTES):
        words = np.frombuffer(data, "<u8")[row * ROW_BYTES // 8 : (row + 1) * ROW_BYTES // 8]
        total += sum(map(int, words)) * (2 * row + 1) * MULTIPLIER
    return as_text(total)


def test_checksum_equals_its_definition() -> None:
    data = os.urandom(5 * ROW_BYTES)
    assert checksum(data) == by_definition(data)


@given(st.permutations(range(4)), st.integers(0, 4 * ROW_BYTES - 1), st.integers(1, 255))
def test_checksum_ignores_the_order_of_pieces_and_shows_a_changed_byte(
    order: list[int], where: int, change: int
) -> None:
    data = bytearray(bytes(range(256)) * (4 * ROW_BYTES // 256))
    pieces = Checksum()
    for row in order:
        pieces.add(row * ROW_BYTES, memoryview(data)[row * ROW_BYTES : (row + 1) * ROW_BYTES])
    assert pieces.text() == checksum(data)
    data[where] ^= change
    assert pieces.text() != checksum(data)


def test_checksum_shows_rows_that_changed_places() -> None:
    first, second = os.urandom(ROW_BYTES), os.urandom(ROW_BYTES)
    assert checksum(first + second) != checksum(second + first)


def test_checksum_pads_a_short_last_row_and_refuses_pieces_that_begin_within_a_row() -> None:
    data = os.urandom(ROW_BYTES + 100)
    assert checksum(data) == checksum(data + bytes(ROW_BYTES - 100)) != checksum(data[:-1])
    with pytest.raises(ValueError, match="no row of 4096 bytes begins at 8"):
        Checksum().add(8, bytes(ROW_BYTES))


def test_checksums_of_parts_of_a_memory_are_joined() -> None:
    data = os.urandom(3 * ROW_BYTES + 100)
    first, second = Checksum(), Checksum()
    first.add(ROW_BYTES, data[ROW_BYTES:])
    second.add(0, data[:ROW_BYTES])
    first.join(second)
    assert first.text() == checksum(data)
