"""The arithmetic of comparisons in pairs."""

import math

import pytest

from benchmarks.gpu.pairs import Interval, interval, poisson, ratios, student_t


@pytest.mark.parametrize(
    ("freedom", "t"), [(1, 12.706), (4, 2.776), (9, 2.262), (30, 2.042), (31, 2.0395), (60, 2.0003), (1000, 1.9623)]
)
def test_student_t_is_that_of_the_tables(freedom, t):
    assert student_t(freedom) == pytest.approx(t, abs=5e-4)


def test_an_interval_is_the_mean_and_its_standard_error_times_t():
    found = interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert found.mean == 3.0 and found.n == 5
    assert found.half == pytest.approx(2.776 * math.sqrt(2.5) / math.sqrt(5))


def test_equal_samples_leave_no_doubt_and_a_single_one_leaves_all():
    assert interval([2.0, 2.0, 2.0]) == Interval(2.0, 0.0, 3)
    assert interval([2.0]).half == math.inf
    assert math.isnan(interval([]).mean)


def test_ratios_are_pair_by_pair():
    assert ratios([1.0, 6.0], [2.0, 3.0]) == [0.5, 2.0]
    with pytest.raises(ValueError, match="longer"):
        ratios([1.0], [2.0, 3.0])


def test_arrivals_are_the_same_for_the_same_seed_and_other_ones_for_another():
    assert poisson(28.0, 10.0, 7) == poisson(28.0, 10.0, 7) != poisson(28.0, 10.0, 8)


def test_arrivals_come_at_the_rate_with_gaps_as_uneven_as_a_poisson_process_has():
    times = poisson(50.0, 400.0, 3)
    assert times == sorted(times) and 0 <= times[0] and times[-1] < 400.0
    assert len(times) == pytest.approx(20_000, rel=0.03)
    gaps = [after - before for before, after in zip(times, times[1:], strict=False)]
    mean = sum(gaps) / len(gaps)
    deviation = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert deviation == pytest.approx(mean, rel=0.03)
