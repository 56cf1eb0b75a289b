"""Parts of long lists."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpu_scheduler.engines.sglang.policy.parts import slices


@given(st.lists(st.integers(0, 10)), st.integers(0, 12))
def test_parts_are_the_list_in_order_and_no_two_neighbours_fit_into_one(sizes: list[int], most: int) -> None:
    parts = [sizes[part] for part in slices(sizes, most)]
    assert [size for part in parts for size in part] == sizes and all(parts)
    assert all(sum(part) <= most or len(part) == 1 for part in parts)
    assert all(sum(part) + after[0] > most for part, after in zip(parts, parts[1:], strict=False))
