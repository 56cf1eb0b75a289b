"""Searches find what is there to be found, with few measurements."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks._search import Aim, Crossing, fewest, first_crossing, locate


def test_first_crossing_is_linear_between_points_and_the_lowest_of_several():
    values = {1.0: 100.0, 2.0: 98.0, 3.0: 99.5, 4.0: 90.0}
    assert first_crossing(values, 99.0) == Crossing(1.5)
    assert first_crossing(values, 95.0) == Crossing(3.0 + 4.5 / 9.5)


def test_first_crossing_counts_from_rate_1_on_and_below_it_only_where_that_does_not_hold():
    assert first_crossing({0.25: 98.0, 0.5: 100.0, 1.0: 100.0, 2.0: 98.0}, 99.0) == Crossing(1.5)
    assert first_crossing({0.25: 98.0, 0.5: 100.0, 1.0: 98.0, 2.0: 100.0}, 99.0) == Crossing(0.75)


def test_first_crossing_beyond_the_rates_tried_says_so():
    values = {1.0: 98.0, 2.0: 97.0}
    assert str(first_crossing(values, 99.0)) == "<1.00"
    assert str(first_crossing(values, 90.0)) == ">2.00"


@given(st.floats(0.3, 30.0))
def test_locate_of_a_known_crossing_finds_it_with_few_measurements(crossing):
    tried = []

    def measure(rate):
        tried.append(rate)
        return 99.0 + crossing - rate if rate < crossing else 90.0 - (rate - crossing)

    aims = [Aim(lambda value: value, mark, width) for mark, width in ((99.0, 1.08), (90.0, 1.25))]
    points = locate(measure, aims, begin=2.0, step=1.5, least=0.25, most=40.0)
    assert list(points) == sorted(tried) and len(tried) == len(set(tried)) <= 20
    found = first_crossing(points, 99.0)
    assert not found.beyond and crossing / 1.08 <= found.rate <= crossing * 1.08


@pytest.mark.parametrize(("level", "beyond"), [(0.0, "<"), (100.0, ">")])
def test_locate_of_what_is_never_crossed_ends_at_the_bounds(level, beyond):
    points = locate(lambda rate: level, [Aim(lambda value: value, 99.0, 1.1)], 2.0, 2.0, 0.5, 16.0)
    rate = {"<": min, ">": max}[beyond](points)
    assert first_crossing(points, 99.0) == Crossing(rate, beyond) and 0.5 <= rate <= 16.0


@given(st.integers(1, 40), st.integers(1, 40))
def test_fewest_of_a_known_number_finds_it_and_measures_none_twice(number, begin):
    tried = []

    def holds(gpus):
        tried.append(gpus)
        return gpus >= number

    assert fewest(holds, begin, 40) == number
    assert len(tried) == len(set(tried)) <= 15 and max(tried) <= 40


def test_fewest_where_one_more_does_not_suffice_goes_on():
    assert fewest(lambda gpus: gpus in (4, 6) or gpus > 7, 4, 16) == 8


def test_fewest_where_the_most_do_not_suffice_is_none():
    assert fewest(lambda gpus: False, 3, 16) is None
    assert fewest(lambda gpus: gpus == 15, 15, 16) is None
