"""What of the device's time went into each prefill."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_scheduler.policy.queue.service_time import ServiceTime


def test_service_time_of_a_prefill_alone_is_the_time_that_passes():
    times = ServiceTime()
    times.begin("1", "a", 10.0)
    assert times.end("1", 10.5) == pytest.approx(0.5)
    times.begin("2", "a", 12.0)
    assert times.end("2", 12.25) == pytest.approx(0.25)


def test_service_time_of_two_models_side_by_side_is_half_of_the_time_each():
    times = ServiceTime()
    times.begin("1", "a", 0.0)
    times.begin("2", "b", 1.0)
    assert times.end("1", 3.0) == pytest.approx(1.0 + 1.0)
    assert times.end("2", 4.0) == pytest.approx(1.0 + 1.0)


def test_service_time_of_requests_of_one_model_runs_one_after_the_other():
    times = ServiceTime()
    times.begin("1", "a", 0.0)
    times.begin("2", "a", 0.5)
    assert times.end("1", 1.0) == pytest.approx(1.0)
    assert times.end("2", 1.75) == pytest.approx(0.75)


def test_service_time_of_requests_that_end_in_one_step_counts_once():
    times = ServiceTime()
    times.begin("1", "a", 0.0)
    times.begin("2", "a", 0.0)
    assert times.end("1", 1.0) == pytest.approx(1.0)
    assert times.end("2", 1.0) == 0.0


def test_service_time_of_a_request_is_not_reduced_by_one_given_up_behind_it():
    times = ServiceTime()
    times.begin("1", "a", 0.0)
    times.begin("2", "a", 0.5)
    times.give_up("2", 1.75)
    assert times.end("1", 2.0) == pytest.approx(2.0)


def test_service_time_behind_a_request_that_was_given_up_is_not_measured():
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


def test_service_time_of_a_request_that_never_began_is_zero():
    assert ServiceTime().end("1", 5.0) == 0.0


@given(
    st.lists(st.tuples(st.floats(0.001, 2.0), st.sampled_from("abc"), st.floats(0.001, 5.0)), min_size=1, max_size=12)
)
def test_service_times_add_up_to_no_more_than_the_time_with_requests_under_way(drawn):
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
