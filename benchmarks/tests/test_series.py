"""The arithmetic of samples over time."""

import math

import pytest

from benchmarks.gpu.series import Account, Held, drift, fastest, gaps, gaps_of, ratios


def test_gaps_are_those_that_touch_the_window_and_count_whole():
    arrived = [0.0, 1.0, 3.0, 7.0]
    assert gaps(arrived, 0.0, 10.0) == [1.0, 2.0, 4.0]
    assert gaps(arrived, 4.0, 5.0) == [4.0]
    assert gaps(arrived, 1.0, 3.0) == [2.0]
    assert gaps(arrived, 7.0, 9.0) == []
    assert gaps([1.0], 0.0, 9.0) == []


def test_gaps_of_several_streams_do_not_cross_from_one_to_the_next():
    assert gaps_of([[0.0, 1.0], [5.0, 8.0], []], 0.0, 10.0) == [1.0, 3.0]


def test_the_fastest_rise_is_over_no_less_than_the_time_asked_for():
    samples = [(0.0, 0.0), (1.0, 10.0), (2.0, 100.0), (3.0, 110.0)]
    assert fastest(samples, 1.0) == pytest.approx(90.0)
    assert fastest(samples, 2.0) == pytest.approx(50.0)
    assert fastest([(0.0, 5.0), (1.0, 3.0)], 1.0) == pytest.approx(-2.0)
    assert math.isnan(fastest(samples, 10.0))
    assert math.isnan(fastest([], 1.0))


def test_what_is_mapped_is_counted_with_and_without_the_reserve():
    held = Held(0.0, held=120, used=30, cached=50, reserve=20)
    assert (held.live, held.ratio, held.ratio_with_reserve) == (80, 1.25, 1.5)
    assert math.isnan(Held(0.0, 10, 0, 0, 10).ratio)


def test_moments_with_little_live_do_not_count():
    found = ratios([Held(0.0, 10, 1, 0, 0), Held(1.0, 110, 50, 50, 0)], least_live=100)
    assert found["without reserve"]["n"] == 1
    assert found["without reserve"]["p50"] == pytest.approx(1.1)


def account(leased, used, still=True):
    return Account(0.0, leased=leased, booked=30, set_aside=10, used=used, still=still)


def test_what_the_ledger_does_not_lease_is_the_engines_own():
    one = account(leased=60, used=95)
    assert one.private == 25
    assert one.difference == pytest.approx(100 / 95 - 1)


def test_a_ledger_of_real_bytes_does_not_drift_whatever_is_leased():
    assert drift([account(60, 95), account(10, 45), account(0, 95, still=False)]) == 0
    assert drift([account(60, 95), account(10, 52)]) == 7
    assert drift([]) == 0
