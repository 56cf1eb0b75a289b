"""Costs of requests and prefill speeds."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_scheduler.policy.queue import slack
from gpu_scheduler.policy.queue.slack import PrefillSpeed, WaitingRequest, bucket_of


def test_slack_is_what_is_left_before_the_latest_start():
    request = WaitingRequest("r", "m", arrival=100.0, deadline=102.0, prompt_tokens=1000)
    e = slack.cost(request, PrefillSpeed(2000.0))
    assert e == pytest.approx(0.5)
    assert slack.latest_start(request, e) == pytest.approx(101.5)
    assert slack.slack(request, e, now=101.0) == pytest.approx(0.5)
    assert slack.slack(request, e, now=101.75) == pytest.approx(-0.25)


def test_the_rest_of_a_wake_up_is_part_of_the_cost():
    request = WaitingRequest("r", "m", arrival=0.0, deadline=5.0, prompt_tokens=1000)
    assert slack.cost(request, PrefillSpeed(1000.0), wake_rest=2.0) == pytest.approx(3.0)


def test_a_cached_prefix_costs_nothing_but_the_last_token_is_always_computed():
    speed = PrefillSpeed(1000.0)
    assert slack.cost(WaitingRequest("r", "m", 0.0, prompt_tokens=1000, cached_tokens=900), speed) == pytest.approx(0.1)
    assert slack.cost(WaitingRequest("r", "m", 0.0, prompt_tokens=1000, cached_tokens=1000), speed) == pytest.approx(
        0.001
    )


def test_slack_of_a_best_effort_request_is_infinite():
    request = WaitingRequest("r", "m", arrival=0.0)
    assert request.deadline == inf
    assert slack.slack(request, 1.0, now=1e9) == inf


@given(st.integers(min_value=2, max_value=1 << 20))
def test_a_bucket_holds_the_sizes_above_half_its_power_of_two(tokens):
    bucket = bucket_of(tokens)
    assert tokens > 1 << (bucket - 1)
    assert tokens <= 1 << bucket or bucket == slack.BUCKETS - 1


def test_the_assumed_speed_holds_until_a_chunk_was_observed():
    speed = PrefillSpeed(1000.0)
    assert speed.cost(1) == pytest.approx(0.001)
    assert speed.cost(5000) == pytest.approx(5.0)


def test_prefill_speed_moves_towards_what_is_observed():
    speed = PrefillSpeed(1000.0, weight=0.5)
    speed.observe(1024, 0.512)  # 0.5 ms a token against 1 ms assumed
    assert speed.cost(1024) == pytest.approx(1024 * 0.00075)
    for _ in range(40):
        speed.observe(1024, 0.512)
    assert speed.cost(1024) == pytest.approx(0.512)


def test_a_measured_speed_replaces_the_assumed_one_for_chunks_of_all_sizes():
    speed = PrefillSpeed(1000.0)
    speed.measured(2048, 0.1024)  # 0.05 ms a token against 1 ms assumed
    assert speed.cost(2048) == pytest.approx(0.1024)
    assert speed.cost(16) == pytest.approx(16 * 0.00005)


@given(st.lists(st.tuples(st.integers(1, 1 << 17), st.floats(1e-3, 10.0)), min_size=1), st.floats(1.0, 1e6))
def test_prefill_speed_does_not_depend_on_what_was_assumed_once_its_engine_has_measured_it(prompts, assumed):
    one, other = PrefillSpeed(2000.0), PrefillSpeed(assumed)
    for speed in (one, other):
        speed.measured(8192, 0.2)
        for tokens, seconds in prompts:
            speed.observe(tokens, seconds)
    assert one.seconds_per_token == other.seconds_per_token


def test_a_measurement_is_one_observation_of_a_size_that_prompts_were_observed_of():
    speed = PrefillSpeed(1000.0, weight=0.5)
    speed.observe(1024, 0.512)
    speed.measured(1024, 0.256)
    assert speed.cost(1024) == pytest.approx(1024 * 0.0005)


def test_prefill_speed_is_learned_by_chunk_size_and_unknown_sizes_use_the_nearest():
    speed = PrefillSpeed(1000.0, weight=1.0)
    speed.observe(16, 0.016 * 4)
    speed.observe(4096, 4.096 / 8)
    assert speed.cost(16) == pytest.approx(0.064)
    assert speed.cost(32) == pytest.approx(32 * 0.004)
    assert speed.cost(2048) == pytest.approx(2048 / 8000)
    # 256 = 2^8 is as far from 2^4 as from 2^12: the larger one is believed
    assert speed.cost(256) == pytest.approx(256 / 8000)


def test_a_long_prompt_costs_as_many_full_chunks():
    speed = PrefillSpeed(1000.0, chunk_tokens=512, weight=1.0)
    speed.observe(512, 0.1)
    assert speed.cost(5120) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("tokens", "seconds"), [(0, 1.0), (-1, 1.0), (10, 0.0), (10, -1.0), (10, inf), (10, float("nan"))]
)
def test_impossible_measurement_of_prefill_speed_is_ignored(tokens, seconds):
    speed = PrefillSpeed(1000.0)
    speed.observe(tokens, seconds)
    speed.measured(tokens, seconds)
    assert speed.cost(100) == pytest.approx(0.1)


@pytest.mark.parametrize(
    "bad", [{"tokens_per_s": 0.0}, {"tokens_per_s": 1.0, "weight": 0.0}, {"tokens_per_s": 1.0, "chunk_tokens": 0}]
)
def test_impossible_prefill_speed_is_refused(bad):
    with pytest.raises(ValueError, match="prefill speed"):
        PrefillSpeed(**bad)
