import pytest

from gpu_scheduler.policy.memory.forecast import ForecastRules, OutputForecast


def test_before_anything_ended_it_is_a_guess_and_then_follows_what_requests_generate():
    first = ForecastRules().first
    forecast = OutputForecast()
    assert forecast.tokens == first
    forecast.observe(first + 100)
    assert forecast.tokens == first + 10
    for _ in range(100):
        forecast.observe(7)
    assert forecast.tokens == 7


@pytest.mark.parametrize(("weight", "then"), [(0.0, 40), (0.5, 70), (1.0, 100)])
def test_how_fast_it_follows_is_a_rule(weight, then):
    forecast = OutputForecast(ForecastRules(first=40, weight=weight))
    assert forecast.tokens == 40
    forecast.observe(100)
    assert forecast.tokens == then
