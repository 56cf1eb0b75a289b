"""Token rates against a list of all observations."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.policy.window import RateWindow


def test_window_rates_of_steady_tokens_are_the_true_rate():
    window = RateWindow()
    for second in range(600):
        window.observe(100, second + 0.5)
    assert window.rate(600.0) == pytest.approx(100.0)


def test_window_rate_of_a_burst_rises_at_once_and_ends_within_a_minute():
    window = RateWindow(window_s=60.0, short_s=5.0)
    window.observe(3000, 100.0)
    assert window.rate(100.0) == pytest.approx(600.0)  # the short window
    assert window.rate(105.9) == pytest.approx(3000 / 5.9)
    assert window.rate(106.0) == pytest.approx(3000 / 60)  # left to the long one
    assert window.rate(160.9) == pytest.approx(3000 / 60.9)
    assert window.rate(161.0) == 0.0


def test_window_rate_without_observations_is_zero():
    assert RateWindow().rate(12345.6) == 0.0


def test_window_observation_with_an_earlier_time_counts_in_the_last_bucket():
    window = RateWindow(window_s=60.0, short_s=60.0)
    window.observe(10, 100.0)
    window.observe(10, 50.0)
    assert window.rate(100.0) == pytest.approx(20 / 60)


def test_an_impossible_window_is_refused():
    with pytest.raises(ValueError, match="bad window"):
        RateWindow(window_s=5.0, short_s=60.0)
    with pytest.raises(ValueError, match="bad window"):
        RateWindow(short_s=0.0)


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 1000)), max_size=60),
    st.integers(0, 40),
    st.sampled_from([(8.0, 2.0), (8.0, 8.0), (3.0, 1.0)]),
)
def test_window_rates_equal_those_of_a_plain_list(steps, rest, sizes):
    """Steps are quarters of a second; the bucket is one second."""
    window = RateWindow(window_s=sizes[0], short_s=sizes[1])
    now, seen = 0.0, []
    for quarters, tokens in steps:
        now += quarters / 4
        window.observe(tokens, now)
        seen.append((now, tokens))
    now += rest / 4
    begins = [now // 1 - size for size in sizes]
    rates = [sum(tokens for at, tokens in seen if at >= begin) / (now - begin) for begin in begins]
    assert window.rate(now) == pytest.approx(max(rates))


@pytest.mark.parametrize(("before", "total", "tokens"), [(0, 60, 60), (40, 100, 60), (500, 60, 60)])
def test_window_counter_counts_its_rise_and_from_zero_after_a_fall(before, total, tokens):
    window = RateWindow(window_s=60.0, short_s=60.0)
    window.counted(total, before, 100.0)
    assert window.rate(100.0) == tokens / 60
