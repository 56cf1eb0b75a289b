"""What became of models' requests."""

import pytest

from placement.policy.outcomes import LATELY_S, MISSES_S, Outcomes, will_return


def test_missed_target_counts_lately_and_as_a_rate_that_decays():
    outcomes = Outcomes()
    outcomes.observe("a", 100.0, missed=6)
    assert outcomes.missed("a", 100.0) and not outcomes.missed("b", 100.0)
    assert outcomes.missed_per_s("a", 100.0) == pytest.approx(6 / MISSES_S)
    assert outcomes.missed_per_s("a", 100.0 + MISSES_S) < 6 / MISSES_S / 2
    assert not outcomes.missed("a", 100.0 + LATELY_S)


def test_waiting_late_request_counts_though_no_target_was_missed_yet():
    outcomes = Outcomes()
    outcomes.observe("a", 100.0, late=True)
    assert outcomes.missed("a", 101.0) and outcomes.missed_per_s("a", 101.0) == 0.0


def test_misses_of_a_model_on_two_groups_are_told_apart():
    outcomes = Outcomes()
    outcomes.observe("a", 100.0, missed=6, group="g0")
    outcomes.observe("a", 101.0, late=True, group="g1")
    assert [outcomes.missed("a", 120.5, group) for group in (None, "g0", "g1", "g2")] == [True, False, True, False]
    assert outcomes.missed_per_s("a", 101.0, "g0") > 0.0 == outcomes.missed_per_s("a", 101.0, "g1")
    assert outcomes.missed_per_s("a", 101.0) == outcomes.missed_per_s("a", 101.0, "g0")


def test_model_is_expected_back_after_two_returns_in_two_minutes_or_one_each_half_minute_of_an_hour():
    outcomes = Outcomes()
    outcomes.observe("a", 100.0, returns=1)
    assert not will_return(outcomes, "a", 100.0)
    outcomes.observe("a", 120.0, returns=1)
    assert will_return(outcomes, "a", 120.0) and not will_return(outcomes, "a", 400.0)
    for minute in range(120):
        outcomes.observe("b", 30.0 * minute, returns=1)
    assert will_return(outcomes, "b", 3600.0 + 300.0)


def test_model_that_left_the_catalogue_is_forgotten():
    outcomes = Outcomes()
    outcomes.observe("a", 100.0, missed=1, returns=1)
    outcomes.keep(())
    assert not outcomes.missed("a", 100.0) and outcomes.returns_per_s("a", 100.0) == 0.0
