import pytest

from gpu_scheduler.policy.memory.demand import TokenRate, changed, weight


def test_token_rate_of_a_steady_stream_is_its_rate():
    rate = TokenRate(half_life_s=2)
    for i in range(1000):
        rate.observe(5, i / 10)
    assert rate.rate(100) == pytest.approx(50, rel=0.02)


def test_token_rate_halves_after_the_half_life():
    rate = TokenRate(half_life_s=2)
    rate.observe(100, 0)
    assert rate.rate(2) == pytest.approx(rate.rate(0) / 2)


def test_demand_with_a_tighter_target_weighs_more():
    assert weight(10, 1000, 50) == 2 * weight(10, 1000, 0)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ({"a": 1.0}, {"a": 9.0}, False),
        ({"a": 1.0, "b": 1.0}, {"a": 2.0, "b": 1.0}, True),
        ({"a": 1.0, "b": 1.0}, {"a": 1.1, "b": 1.0}, False),
        ({}, {"a": 0.0}, True),
    ],
)
def test_demand_shares_are_reported_only_where_they_changed(old, new, expected):
    assert changed(old, new) is expected
