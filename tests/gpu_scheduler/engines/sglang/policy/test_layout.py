"""What touches what, counted byte by byte."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_scheduler.engines.sglang.policy.layout import BlockLayout, distinct

layouts = st.builds(BlockLayout, st.integers(1, 40), st.sampled_from([1, 7, 16, 24, 32]), st.integers(1, 40))


@given(layouts)
def test_block_layout_agrees_with_a_count_of_every_byte(layout: BlockLayout) -> None:
    touching: dict[int, list[int]] = {extent: [] for extent in range(layout.n_extents)}
    for envelope in range(layout.total):
        start = envelope * layout.envelope_bytes
        extents = sorted({byte // layout.extent_bytes for byte in range(start, start + layout.envelope_bytes)})
        assert list(layout.extents_of(envelope)) == extents
        row = layout.touched(np.array([envelope]))[0].tolist()
        assert row == extents + [layout.n_extents] * (len(row) - len(extents))
        for extent in extents:
            touching[extent].append(envelope)
    every = np.arange(layout.total)
    assert layout.homes(every).tolist() == layout.touched(every)[:, 0].tolist()
    assert layout.ends(every).tolist() == [layout.extents_of(envelope)[-1] for envelope in range(layout.total)]
    for extent, expected in touching.items():
        assert layout.touching(np.array([extent])).tolist() == expected
        alone = [envelope for envelope in expected if list(layout.extents_of(envelope)) == [extent]]
        assert layout.inside(np.array([extent])).tolist() == [len(alone)]
        assert layout.crossing(np.array([extent])).tolist() == sorted(set(expected) - set(alone))


@given(layouts, st.data())
def test_envelopes_touching_several_given_extents_are_named_once(layout: BlockLayout, data: st.DataObject) -> None:
    extents = data.draw(st.lists(st.integers(0, layout.n_extents - 1)))
    expected = {e for e in range(layout.total) if set(layout.extents_of(e)) & set(extents)}
    assert layout.touching(np.array(extents, dtype=np.int64)).tolist() == sorted(expected)


@pytest.mark.parametrize("envelope_bytes", [1 << 10, 6 << 10, 20 << 10, 48 << 10, 64 << 10, 96 << 10])
def test_range_of_small_envelopes_as_large_as_a_gpu_costs_no_memory(envelope_bytes: int) -> None:
    extent_bytes, few = 8 << 20, 100_000
    count = (192 << 30) // envelope_bytes
    tracemalloc.start()
    try:
        layout = BlockLayout(envelope_bytes, extent_bytes, count)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    first, last = np.arange(few), np.arange(count - few, count)
    assert (layout.touched(first) == BlockLayout(envelope_bytes, extent_bytes, few).touched(first)).all(
        where=layout.touched(first) < layout.n_extents
    )
    for envelopes in (first, last):
        touched = layout.touched(envelopes)
        assert touched[:, 0].tolist() == layout.homes(envelopes).tolist()
        ends = np.where(touched < layout.n_extents, touched, -1).max(axis=1)
        assert ends.tolist() == layout.ends(envelopes).tolist()


@pytest.mark.parametrize("sizes", [(0, 16, 4), (4, 0, 4), (4, 16, 0)])
def test_a_range_without_envelopes_is_refused(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="envelopes of"):
        BlockLayout(*sizes)


@given(st.lists(st.integers(-3, 8)))
def test_distinct_numbers_are_sorted_and_each_there_once(numbers: list[int]) -> None:
    given = np.array(numbers, dtype=np.int64)
    assert distinct(given).tolist() == sorted(set(numbers)) and given.tolist() == numbers
