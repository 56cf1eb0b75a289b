from gpu_scheduler.policy.forecast import FIRST, OutputForecast


def test_before_anything_ended_it_is_a_guess_and_then_follows_what_requests_generate():
    forecast = OutputForecast()
    assert forecast.tokens == FIRST
    forecast.observe(FIRST + 100)
    assert forecast.tokens == FIRST + 10
    for _ in range(100):
        forecast.observe(7)
    assert forecast.tokens == 7
