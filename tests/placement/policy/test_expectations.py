"""What is expected at the start, and how long it counts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.policy.expectations import WORTH_S, Expectations
from placement.policy.outcomes import Outcomes, will_return
from placement.policy.traffic import ExpectedTraffic

STARTED = 1000.0


def expecting(tokens_per_s=100.0, returns_per_s=0.05):
    return Expectations({"a": ExpectedTraffic(tokens_per_s, returns_per_s)}, STARTED)


def test_rate_at_the_start_is_the_expected_one_and_that_of_unknown_models_what_was_observed():
    assert expecting().rate("a", 0.0, STARTED) == 100.0
    assert expecting().rate("b", 3.0, STARTED) == 3.0


def test_rate_that_is_observed_counts_where_it_is_higher():
    assert expecting().rate("a", 250.0, STARTED) == 250.0


@given(st.floats(0, 2 * WORTH_S), st.floats(0, WORTH_S))
def test_expectation_never_rises_and_is_gone_after_its_time(age, more):
    it, now = expecting(), STARTED + age
    assert it.rate("a", 0.0, now + more) <= it.rate("a", 0.0, now) <= 100.0
    assert it.returns_s("a", now + more) <= it.returns_s("a", now) <= 20.0
    assert it.any(now) is (it.rate("a", 0.0, now) > 0.0)
    assert it.rate("a", 0.0, STARTED + WORTH_S) == 0.0


def test_clock_before_the_start_makes_nothing_more_than_was_expected():
    assert expecting().rate("a", 0.0, STARTED - 1e6) == 100.0


def test_returns_of_earlier_hours_are_known_at_the_start_and_decay():
    outcomes = Outcomes()
    expecting().tell(outcomes)
    assert outcomes.returns_per_s("a", STARTED) == pytest.approx(0.05)
    assert will_return(outcomes, "a", STARTED)
    assert not will_return(outcomes, "a", STARTED + 7200.0)


def test_model_that_never_returned_is_not_expected_back():
    outcomes = Outcomes()
    it = expecting(returns_per_s=0.0)
    it.tell(outcomes)
    assert it.returns_s("a", STARTED) == outcomes.returns_per_s("a", STARTED) == 0.0
