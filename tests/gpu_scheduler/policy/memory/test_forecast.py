import pytest

from gpu_scheduler.policy.memory.forecast import ForecastRules, OutputForecast


def test_output_forecast_is_a_guess_first_and_then_follows_what_requests_generate():
    first = ForecastRules().first
    forecast = OutputForecast()
    assert forecast.tokens == first
    forecast.observe(first + 100)
    assert forecast.tokens == first + 10
    for _ in range(100):
        forecast.observe(7)
    assert forecast.tokens == 7


@pytest.mark.parametrize(("weight", "then"), [(0.0, 40), (0.5, 70), (1.0, 100)])
def test_output_forecast_follows_as_fast_as_its_weight_says(weight, then):
    forecast = OutputForecast(ForecastRules(first=40, weight=weight))
    assert forecast.tokens == 40
    forecast.observe(100)
    assert forecast.tokens == then
