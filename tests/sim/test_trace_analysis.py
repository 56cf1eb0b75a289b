"""Figures of small traces whose answers are known by arithmetic."""

from math import isnan

import pytest

from sim.trace_analysis import DAY_BIN_S, DAY_S, analyse


def trace(**arrivals):
    return sorted((at, name, 100, 10) for name, times in arrivals.items() for at in times)


STEADY = [60.0 * i for i in range(10)]


def test_active_shares_switches_and_silence_are_of_the_time_after_the_first_two_minutes():
    found = analyse(trace(steady=STEADY, burst=[200.0, 210.0]), seconds=600.0)
    steady, burst = found.models["steady"], found.models["burst"]
    assert steady.active_share == pytest.approx(1.0)
    assert burst.active_share == pytest.approx(130 / 480)
    assert found.active_share == pytest.approx((1 + 130 / 480) / 2)
    assert found.switches_per_hour == pytest.approx(2 / 480 * 3600)  # on at 200 s, off at 330
    assert steady.silent_share == pytest.approx(5 / 6)
    assert burst.silent_share == pytest.approx(1 - 20 / 480)


def test_models_that_come_at_one_moment_change_the_active_set_once():
    found = analyse(trace(a=[300.0], b=[300.0], steady=STEADY), seconds=600.0)
    assert found.switches_per_hour == pytest.approx(2 / 480 * 3600)


def test_model_without_a_request_for_two_minutes_is_switched_off_and_on():
    found = analyse(trace(a=[0.0, 100.0, 400.0], steady=STEADY), seconds=450.0)
    assert found.switches_per_hour == pytest.approx(2 / 330 * 3600)  # off at 220 s, on at 400
    assert found.models["a"].active_share == pytest.approx((100 + 50) / 330)


def test_gaps_are_those_above_ten_seconds_and_cv_is_of_whole_minutes():
    found = analyse(trace(steady=STEADY, burst=[200.0, 210.0, 220.5]), seconds=630.0)
    assert found.models["steady"].gaps_per_hour == pytest.approx(9 / 630 * 3600)
    assert found.models["burst"].gaps_per_hour == pytest.approx(1 / 630 * 3600)
    assert found.models["steady"].cv == pytest.approx(0.0)
    assert found.models["burst"].cv == pytest.approx(3.0)  # three requests in one minute of ten
    assert found.cv_above_one == 0.5 and found.many_gaps == 0.5


def test_correlation_is_of_consecutive_days():
    bins = [DAY_BIN_S * i for i in range(int(DAY_S / DAY_BIN_S))]
    half = len(bins) // 2
    days = {"same": bins[:half] + [DAY_S + at for at in bins[:half]]}
    days["other"] = bins[:half] + [DAY_S + at for at in bins[half:]]
    days["constant"] = [*bins, *(DAY_S + at for at in bins)]
    found = analyse(trace(**days), seconds=2 * DAY_S)
    assert found.models["same"].day_correlations == pytest.approx((1.0,))
    assert found.models["other"].day_correlations == pytest.approx((-1.0,))
    assert found.models["constant"].day_correlations == ()
    assert found.day_correlation.middle == pytest.approx(0.0)


def test_trace_of_less_than_two_days_has_no_correlation():
    assert isnan(analyse(trace(steady=STEADY), seconds=600.0).day_correlation.middle)


def test_rates_tokens_and_the_busiest_fifth_are_of_all_requests():
    rows = [(float(i), "busy" if i % 5 else f"m{i % 4}", 1 + i, 5) for i in range(200)]
    found = analyse(rows, seconds=200.0)
    assert (found.requests, found.requests_per_s, found.peak_requests_per_s) == (200, 1.0, 1.0)
    assert next(iter(found.models)) == "busy" and found.busiest_share == pytest.approx(0.8)
    assert found.prompt_tokens.low == pytest.approx(100.5) and found.output_tokens.high == 5


@pytest.mark.parametrize("begins", [300.0, 1_780_000_000.0])
def test_trace_begins_with_its_first_request_whatever_the_times_count_from(begins):
    rows = trace(steady=STEADY, burst=[200.0, 210.0])
    assert analyse([(begins + at, *rest) for at, *rest in rows]) == analyse(rows)


@pytest.mark.parametrize(
    ("rows", "options", "says"),
    [
        ([], {}, "no request"),
        (trace(a=STEADY), {"start_s": 1000.0}, "no request"),
        (trace(a=STEADY), {"seconds": 100.0}, "100 s are too short"),
        (trace(a=[5.0]), {}, "0 s are too short"),
    ],
)
def test_part_that_says_nothing_is_refused(rows, options, says):
    with pytest.raises(ValueError, match=says):
        analyse(rows, **options)
