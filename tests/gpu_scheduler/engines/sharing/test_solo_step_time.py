"""What a decode step takes alone, as an engine sees it beside others."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_scheduler.engines.sharing.solo_step_time import ENOUGH, LASTS_S, MOST, DecodeStep, SoloStepTime

LEAST_S = 0.003


def given_steps(
    *apart_s: float, undisturbed: bool = True, seen: SoloStepTime | None = None, at: float = 0.0
) -> SoloStepTime:
    """One more step than these seconds lie between."""
    seen = seen or SoloStepTime()
    seen.given(at, undisturbed)
    for seconds in apart_s:
        at += seconds
        seen.given(at, undisturbed)
    return seen


def test_solo_step_time_without_undisturbed_steps_is_that_of_one_request() -> None:
    assert SoloStepTime().seen(LEAST_S, 0.0) == DecodeStep(LEAST_S, False)
    assert given_steps(*[0.005] * 20, undisturbed=False).seen(LEAST_S, 0.1) == DecodeStep(LEAST_S, False)


def test_solo_step_time_is_the_quickest_undisturbed_step_but_no_less_than_one_requests() -> None:
    took = given_steps(0.009, 0.005, 0.012).seen(LEAST_S, 0.03)
    assert took.measured and took.seconds == pytest.approx(0.005)
    assert given_steps(0.002, 0.002).seen(LEAST_S, 0.01) == DecodeStep(LEAST_S, True)


def test_solo_step_time_of_too_few_steps_is_not_measured() -> None:
    assert given_steps(*[0.030] * (ENOUGH - 1)).seen(LEAST_S, 0.03) == DecodeStep(LEAST_S, False)


def test_solo_step_time_leaves_disturbed_steps_out() -> None:
    seen = given_steps(0.005, 0.005)
    seen.disturbed()  # a prefill step
    seen.given(0.012, True)
    assert seen.seen(LEAST_S, 0.012).seconds == pytest.approx(0.005)
    assert given_steps(0.001, seen=seen, at=0.020).seen(LEAST_S, 0.021).seconds == LEAST_S


def test_solo_step_time_of_few_undisturbed_steps_is_bounded_by_the_mean_of_all() -> None:
    """A step each 4 ms cannot take 14 alone."""
    seen = given_steps(0.014, 0.015)
    given_steps(*[0.004] * MOST, undisturbed=False, seen=seen, at=0.04)
    took = seen.seen(LEAST_S, 0.12)
    assert took.measured and took.seconds == pytest.approx(0.004 * MOST / (MOST - 1))
    assert seen.at_most_s == took.seconds


def test_solo_step_time_forgets_old_steps_and_those_of_another_model() -> None:
    seen = given_steps(0.005, 0.005)
    assert seen.seen(LEAST_S, 0.01 + LASTS_S) == DecodeStep(LEAST_S, False)
    assert seen.seen(LEAST_S, 0.02).measured
    seen.forget()
    assert not seen.seen(LEAST_S, 0.02).measured and seen.at_most_s == inf


@given(st.lists(st.tuples(st.floats(0.0001, 0.1), st.booleans(), st.booleans()), max_size=60), st.floats(0.0, 0.01))
def test_solo_step_time_is_between_one_requests_and_the_mean_of_the_last_steps(
    steps: list[tuple[float, bool, bool]], least_s: float
) -> None:
    seen, now = SoloStepTime(), 0.0
    for apart_s, undisturbed, prefill in steps:
        now += apart_s
        if prefill:
            seen.disturbed()
        seen.given(now, undisturbed)
    took = seen.seen(least_s, now)
    assert least_s <= took.seconds <= max(least_s, seen.at_most_s)
    assert took.measured or took.seconds == least_s
