"""The ledger of hourly traffic."""

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.policy.traffic import HOUR_S, KEPT_HOURS, TrafficCounts, TrafficHours

NOON = datetime(2026, 11, 29, 12, tzinfo=UTC).timestamp()
STEPS = st.lists(
    st.tuples(st.floats(0, 3 * HOUR_S), st.sampled_from("abc"), st.integers(0, 50), st.integers(0, 50)), max_size=60
)


def watched(hours, since, until, model="", tokens=0, returns=0):
    """Adds the hours from `since` to `until`, in which the model was asked for so many tokens each hour."""
    hours.observed(since, until)
    at = since
    while model and at < until:
        hours.observe(model, at, TrafficCounts(1, tokens, 0, returns))
        at += HOUR_S


def test_expected_traffic_is_that_of_the_present_hour_and_the_one_before():
    hours = TrafficHours()
    watched(hours, NOON - 2 * HOUR_S, NOON - HOUR_S, "a", 999_999)
    watched(hours, NOON - HOUR_S, NOON, "a", 7200, returns=60)
    watched(hours, NOON, NOON + HOUR_S / 2, "a", 3600, returns=30)
    expected = hours.expected(NOON + HOUR_S / 2)["a"]
    assert expected.tokens_per_s == pytest.approx(10_800 / 5400)
    assert expected.returns_per_s == pytest.approx(90 / 5400)


def test_expected_traffic_of_an_hour_that_was_observed_in_part_is_that_of_the_part():
    hours = TrafficHours()
    watched(hours, NOON - 600, NOON, "a", 600)
    assert hours.expected(NOON)["a"].tokens_per_s == pytest.approx(1.0)


def test_expected_traffic_after_a_night_off_is_that_of_the_same_hour_of_the_day_before():
    hours = TrafficHours()
    watched(hours, NOON - 24 * HOUR_S, NOON - 23 * HOUR_S, "a", 3600)
    watched(hours, NOON - 12 * HOUR_S, NOON - 11 * HOUR_S, "a", 999_999)
    assert hours.expected(NOON + 60)["a"].tokens_per_s == pytest.approx(1.0)
    assert hours.expected(NOON + HOUR_S + 60) == {}


def test_expected_traffic_is_unknown_after_a_minute_of_observation():
    hours = TrafficHours()
    watched(hours, NOON - 60, NOON, "a", 600)
    assert hours.expected(NOON) == {}


def test_hours_that_are_yet_to_come_are_forgotten_once_the_clock_is_right():
    hours = TrafficHours()
    watched(hours, NOON + 30 * HOUR_S, NOON + 31 * HOUR_S, "a", 1)
    hours.observed(NOON, NOON + 1)
    assert list(hours.hours) == [NOON // HOUR_S]


def test_clock_that_was_set_back_observes_no_time():
    hours = TrafficHours()
    hours.observed(NOON, NOON - 7200)
    assert all(hour.observed_s == 0 for hour in hours.hours.values())


@given(STEPS)
def test_ledger_has_all_that_came_within_the_hours_it_keeps_and_no_more_than_those(steps):
    hours, at, came = TrafficHours(), NOON, []
    for passed, model, tokens, returns in steps:
        hours.observed(at, at + passed)
        at += passed
        hours.observe(model, at, TrafficCounts(1, tokens, 2 * tokens, returns))
        came.append((int(at // HOUR_S), model, tokens, returns))
    hours.observed(at, at)
    present = int(at // HOUR_S)
    kept = range(present - KEPT_HOURS, present + 1)
    assert set(hours.hours) <= {*kept}
    assert all(hour.observed_s <= HOUR_S for hour in hours.hours.values())
    assert sum(hour.observed_s for hour in hours.hours.values()) <= at - NOON + 1e-3
    for number in hours.hours:
        for model in "abc":
            mine = [each for each in came if each[:2] == (number, model)]
            counts = hours.hours[number].models.get(model, TrafficCounts())
            assert (counts.requests, counts.prompt_tokens, counts.output_tokens, counts.returns) == (
                len(mine),
                sum(tokens for *_, tokens, _ in mine),
                2 * sum(tokens for *_, tokens, _ in mine),
                sum(returns for *_, returns in mine),
            )
