"""Places of tensors in a weights range, against a plain model: one flag a byte."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpu_scheduler.engines.sglang.policy.tensor_spans import Places, Span, joined, moved_down, overlapping, without

ALIGN = 4
SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9)).map(lambda each: (each[0], sum(each))), max_size=12)


def flags(spans: list[Span]) -> set[int]:
    return {byte for start, end in spans for byte in range(start, end)}


@given(SPANS, SPANS)
def test_spans_joined_and_without_others_have_the_bytes_that_they_should(first: list[Span], second: list[Span]) -> None:
    for made, bytes_ in (
        (joined(first), flags(first)),
        (overlapping(first), flags(first)),
        (without(first, second), flags(first) - flags(second)),
    ):
        assert flags(made) == bytes_
        assert all(a[1] <= b[0] for a, b in zip(made, made[1:], strict=False)) and all(a < b for a, b in made)


@given(SPANS)
def test_spans_moved_down_keep_their_order_length_and_alignment_and_nothing_moves_up(spans: list[Span]) -> None:
    given_ = overlapping(spans)
    starts = moved_down(given_, ALIGN)
    end = 0
    for (first, last), start in zip(given_, starts, strict=True):
        assert end <= start <= first and (start - first) % ALIGN == 0 and start - end < ALIGN
        end = start + last - first


@given(st.lists(st.one_of(st.integers(1, 20), st.tuples(st.integers(0, 9), st.booleans())), max_size=30))
def test_places_are_taken_once_until_they_are_released(steps: list[int | tuple[int, bool]]) -> None:
    places = Places(ALIGN)
    held: list[Span] = []
    for step in steps:
        if isinstance(step, int):
            start = places.take(step)
            assert start % ALIGN == 0
            assert not flags(held) & set(range(start, start + step))
            held.append((start, start + step))
        elif held:
            start, end = held.pop(step[0] % len(held))
            kept = [(start, (start + end) // 2)] if step[1] and end - start > 1 else []
            places.release([(start, end)], kept)
            held += kept
        assert places.used >= max((end for _, end in held), default=0)


def test_place_that_was_released_is_taken_again_before_the_range_grows() -> None:
    places = Places(ALIGN)
    first, _, third = places.take(8), places.take(8), places.take(8)
    places.release([(8, 16)], [(8, 16)])
    assert not places.released
    places.release([(first, 7), (8, 16), (third, 21)], [(8, 16)])
    assert places.released
    assert (places.take(4), places.take(8), places.take(4), places.used) == (first, third, first + 4, 24)
    places.restart(6)
    assert (places.take(1), places.used) == (8, 12)
