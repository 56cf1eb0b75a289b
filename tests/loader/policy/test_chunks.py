"""Chunk plans cover an image once, in order, within extents."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loader.policy.chunks import Chunk, Pair, pairs, plan


def test_chunks_do_not_cross_extents_and_leave_the_padding_alone():
    assert plan([10, 10], total_bytes=17, chunk_bytes=8) == (
        Chunk(extent=0, offset=0, at=0, nbytes=8),
        Chunk(extent=0, offset=8, at=8, nbytes=2),
        Chunk(extent=1, offset=0, at=10, nbytes=7),
    )


def test_extents_beyond_the_image_are_not_touched():
    assert plan([4, 4, 4], total_bytes=4, chunk_bytes=100) == (Chunk(0, 0, 0, 4),)


def test_extents_that_are_too_small_are_refused_with_the_arithmetic():
    with pytest.raises(ValueError, match="2 extents of 20 bytes do not hold 21"):
        plan([10, 10], total_bytes=21, chunk_bytes=8)


@given(
    extents=st.lists(st.integers(1, 50), max_size=8),
    missing=st.integers(0, 60),
    chunk_bytes=st.integers(1, 60),
)
def test_chunk_plan_copies_every_byte_of_the_image_once_in_order(extents, missing, chunk_bytes):
    total = max(0, sum(extents) - missing)
    source = [bytearray(index % 251 for index in range(size)) for size in extents]
    for number, extent in enumerate(source):
        extent[0] = 200 + number
    image = bytearray()
    for chunk in plan(extents, total, chunk_bytes):
        assert chunk.at == len(image) and 0 < chunk.nbytes <= chunk_bytes
        part = source[chunk.extent][chunk.offset : chunk.offset + chunk.nbytes]
        assert len(part) == chunk.nbytes
        image += part
    assert image == b"".join(source)[:total]


def test_chunk_pair_lies_within_one_extent_on_either_side():
    assert pairs([10, 10], [15, 5], total_bytes=17, chunk_bytes=100) == (
        Pair(Chunk(extent=0, offset=0, at=0, nbytes=10), Chunk(extent=0, offset=0, at=0, nbytes=10)),
        Pair(Chunk(extent=1, offset=0, at=10, nbytes=5), Chunk(extent=0, offset=10, at=10, nbytes=5)),
        Pair(Chunk(extent=1, offset=5, at=15, nbytes=2), Chunk(extent=1, offset=0, at=15, nbytes=2)),
    )


def test_sources_and_targets_that_are_too_small_are_refused_alike():
    for sizes in ([20], [21]), ([21], [20]):
        with pytest.raises(ValueError, match="1 extents of 20 bytes do not hold 21"):
            pairs(*sizes, total_bytes=21, chunk_bytes=8)


@given(
    sources=st.lists(st.integers(1, 50), max_size=8),
    targets=st.lists(st.integers(1, 50), max_size=8),
    missing=st.integers(0, 60),
    chunk_bytes=st.integers(1, 60),
)
def test_pairs_cover_every_byte_once_and_lie_at_the_same_place_of_both_ranges(sources, targets, missing, chunk_bytes):
    total = max(0, min(sum(sources), sum(targets)) - missing)
    at = 0
    for pair in pairs(sources, targets, total, chunk_bytes):
        assert 0 < pair.nbytes == pair.source.nbytes == pair.target.nbytes <= chunk_bytes
        for side, sizes in ((pair.source, sources), (pair.target, targets)):
            assert side.at == at == sum(sizes[: side.extent]) + side.offset
            assert side.offset + side.nbytes <= sizes[side.extent]
        at += pair.nbytes
    assert at == total
