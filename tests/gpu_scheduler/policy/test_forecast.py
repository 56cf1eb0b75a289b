from gpu_scheduler.policy.forecast import FIRST, OutputForecast


def test_before_anything_ended_it_is_a_guess_and_then_follows_what_requests_generate():
    forecast = OutputForecast()
    assert forecast.tokens == FIRST
    forecast.observe(FIRST + 100)
    assert forecast.tokens == FIRST + 10
    for _ in range(100):
        forecast.observe(7)
    assert forecast.tokens == 7


def test_what_nearly_all_come_to_is_known_when_enough_have_ended():
    forecast = OutputForecast()
    for _ in range(31):
        forecast.observe(200)
    assert forecast.least == 1
    for tokens in (200, 3, 5):
        forecast.observe(tokens)
    assert forecast.least == 200, "two of 32 are few"
    forecast.observe(7)
    assert forecast.least == 7
    for _ in range(32):
        forecast.observe(0)
    assert forecast.least == 1
