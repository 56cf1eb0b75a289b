import pytest
from hypothesis import given
from hypothesis import strategies as st

from balloond.driver.kv.watermarks import IDLE_S, Watermarks


def test_watermarks_without_growth_keep_the_low_mark():
    marks = Watermarks(2, 10)
    assert marks.target(100.0) == 2
    assert marks.missing(1, 100.0) == 1
    assert marks.missing(2, 100.0) == 0
    assert marks.surplus(5, 100.0) == 3


def test_watermarks_target_follows_growth_up_to_the_high_mark():
    marks = Watermarks(2, 10)
    marks.took(5, 100.0)
    assert 2 < marks.target(100.0) < 10
    marks.took(1000, 100.1)
    assert marks.target(100.1) == 10
    assert marks.surplus(12, 100.1) == 2
    assert marks.surplus(10, 100.1) == 0


def test_watermarks_of_an_idle_engine_fall_back_to_the_low_mark():
    marks = Watermarks(2, 10)
    marks.took(100, 100.0)
    assert not marks.idle(100.0 + IDLE_S / 2)
    later = 100.0 + 5 * IDLE_S
    assert marks.idle(later)
    assert marks.target(later) == 2
    assert marks.surplus(10, later) == 8
    # From the first idle moment on, nothing is fetched that is given back at once.
    assert marks.missing(2, 100.0 + IDLE_S) == 0 == marks.surplus(2, 100.0 + IDLE_S)


def test_watermarks_fill_a_reserve_of_which_half_is_used():
    marks = Watermarks(0, 10)
    marks.took(100, 100.0)
    assert marks.missing(6, 100.0) == 0
    assert marks.missing(5, 100.0) == 5


@pytest.mark.parametrize("marks", [(3, 2), (-1, 2)])
def test_watermarks_that_are_negative_or_crossed_are_refused(marks):
    with pytest.raises(ValueError):
        Watermarks(*marks)


@given(
    st.integers(0, 20),
    st.integers(0, 20),
    st.lists(st.tuples(st.integers(1, 50), st.floats(0, 2))),
    st.integers(0, 60),
)
def test_watermarks_target_stays_between_the_marks_after_any_growth(low, more, growth, reserve):
    marks = Watermarks(low, low + more)
    now = 0.0
    for count, wait in growth:
        now += wait
        marks.took(count, now)
    assert low <= marks.target(now) <= low + more
    assert 0 <= marks.missing(reserve, now) <= low + more
    # What was just filled is not given back.
    filled = reserve + marks.missing(reserve, now)
    assert marks.idle(now) or filled <= low + more or marks.surplus(filled, now) == filled - low - more
    assert marks.missing(filled, now) == 0
