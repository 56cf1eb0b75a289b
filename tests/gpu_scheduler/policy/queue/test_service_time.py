"""What of the device's time went into each prefill."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_scheduler.policy.queue.service_time import ServiceTime


def test_one_alone_takes_what_passes():
    times = ServiceTime()
    times.begin("1", "a", 10.0)
    assert times.end("1", 10.5) == pytest.approx(0.5)
    times.begin("2", "a", 12.0)
    assert times.end("2", 12.25) == pytest.approx(0.25)


def test_two_models_side_by_side_have_half_of_the_time_each():
    times = ServiceTime()
    times.begin("1", "a", 0.0)
    times.begin("2", "b", 1.0)
    assert times.end("1", 3.0) == pytest.approx(1.0 + 1.0)
    assert times.end("2", 4.0) == pytest.approx(1.0 + 1.0)


def test_requests_of_one_model_go_one_after_the_other():
    times = ServiceTime()
    times.begin("1", "a", 0.0)
    times.begin("2", "a", 0.5)
    assert times.end("1", 1.0) == pytest.approx(1.0)
    assert times.end("2", 1.75) == pytest.approx(0.75)


def test_those_that_end_in_one_step_count_once():
    times = ServiceTime()
    times.begin("1", "a", 0.0)
    times.begin("2", "a", 0.0)
    assert times.end("1", 1.0) == pytest.approx(1.0)
    assert times.end("2", 1.0) == 0.0


def test_one_that_is_given_up_behind_another_takes_nothing_of_its_time():
    times = ServiceTime()
    times.begin("1", "a", 0.0)
    times.begin("2", "a", 0.5)
    times.give_up("2", 1.75)
    assert times.end("1", 2.0) == pytest.approx(2.0)


def test_who_comes_after_one_that_is_given_up_is_not_measured_and_those_after_it_are():
    times = ServiceTime()
    for name in ("1", "2", "3"):
        times.begin(name, "a", 0.0)
    times.give_up("1", 1.0)
    assert times.end("2", 1.125) == 0.0
    assert times.end("3", 1.625) == pytest.approx(0.5)
    times.begin("4", "a", 2.0)
    assert times.end("4", 2.25) == pytest.approx(0.25)
    times.give_up("4", 3.0)
    assert times.end("4", 3.0) == 0.0


def test_one_that_never_began_took_nothing():
    assert ServiceTime().end("1", 5.0) == 0.0


@given(
    st.lists(st.tuples(st.floats(0.001, 2.0), st.sampled_from("abc"), st.floats(0.001, 5.0)), min_size=1, max_size=12)
)
def test_what_requests_took_is_never_more_than_the_time_in_which_some_were_under_way(drawn):
    """A gap, a model, and how long after its begin a request ends."""
    times, events, now = ServiceTime(), [], 0.0
    for number, (gap, model, lasts) in enumerate(drawn):
        now += gap
        events += [(now, 0, f"{number}", model), (now + lasts, 1, f"{number}", model)]
    took, busy, under_way, before = 0.0, 0.0, 0, 0.0
    for at, ends, name, model in sorted(events):
        busy += (at - before) * (under_way > 0)
        before = at
        if ends:
            took += times.end(name, at)
            under_way -= 1
        else:
            times.begin(name, model, at)
            under_way += 1
    assert took <= busy + 1e-9
