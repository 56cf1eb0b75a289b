"""The least of the last while, beside one that keeps all values."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpu_scheduler.engines.sglang.kv.rolling_least import RollingLeast

PERIOD_S = 1.0


@given(st.lists(st.tuples(st.integers(0, 100), st.floats(0.0, 3.0)), min_size=1, max_size=60))
def test_least_is_that_of_one_to_two_periods_or_of_longer(seen: list[tuple[int, float]]) -> None:
    rolling, now = RollingLeast(PERIOD_S, 0.0), 0.0
    past: list[tuple[float, int]] = []
    for value, later_s in seen:
        now += later_s
        rolling.see(value, now)
        past.append((now, value))
        within = [each for at, each in past if now - at < PERIOD_S]
        assert rolling.least <= min(within), "no value of the last period is overlooked"
        assert rolling.least in (0, *(each for _, each in past))


def test_a_value_is_forgotten_after_two_periods_and_nothing_is_known_in_the_first() -> None:
    rolling = RollingLeast(PERIOD_S, 0.0)
    rolling.see(50, 0.5)
    assert rolling.least == 0
    for tenth in range(10, 40):
        rolling.see(7 if tenth == 15 else 50, tenth / 10)
        assert rolling.least == (7 if 15 <= tenth < 30 else 50), tenth


def test_nothing_older_than_a_pause_counts() -> None:
    rolling = RollingLeast(PERIOD_S, 0.0)
    rolling.see(0, 1.2)
    rolling.see(50, 61.0)
    assert rolling.least == 50
    rolling.see(40, 61.5)
    assert rolling.least == 40


def test_what_is_lost_for_good_is_lost_by_all_that_was_seen() -> None:
    rolling = RollingLeast(PERIOD_S, 0.0)
    rolling.see(50, 0.9)
    rolling.see(40, 1.0)
    assert rolling.least == 40
    rolling.lower(30)
    assert rolling.least == 10
    rolling.lower(30)
    assert rolling.least == 0
