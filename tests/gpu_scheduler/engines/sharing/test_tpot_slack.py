from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_scheduler.engines.sharing.throttle import ThrottleRules
from gpu_scheduler.engines.sharing.tpot_slack import RECOVERY_RATIO, RECOVERY_TOKENS, DecodeWindow, Stream, slack_s

HALF = 0.5
"""Of the devices, that decodes need."""
RULES = ThrottleRules()
SECONDS = st.floats(1e-3, 1.0)


def test_slack_where_nothing_decodes_is_infinite():
    assert slack_s([], 100.0, 0.005, 0.010) == inf


def test_slack_behind_the_first_token_is_the_target_less_a_step_and_grows_with_quick_tokens():
    assert slack_s([Stream(100.0, 0)], 100.0, 0.004, 0.010) == pytest.approx(0.006)
    assert slack_s([Stream(100.0, 50)], 100.2, 0.004, 0.010) == pytest.approx(0.306)


def test_slack_is_that_of_the_request_with_the_least_and_falls_with_time():
    streams = [Stream(100.0, 50), Stream(100.195, 0), Stream(100.1, 20)]
    assert slack_s(streams, 100.2, 0.004, 0.010) == pytest.approx(0.001)
    assert slack_s(streams, 100.203, 0.004, 0.010) == pytest.approx(-0.002)


def test_slack_leaves_out_a_request_too_late_to_catch_up():
    """With 6 ms to gain for each token, 12 tokens and two for each that it has."""
    assert slack_s([Stream(100.0, 0)], 100.0 + 0.006 + 0.071, 0.004, 0.010) == pytest.approx(-0.071)
    assert slack_s([Stream(100.0, 0)], 100.0 + 0.006 + 0.073, 0.004, 0.010) == inf
    assert slack_s([Stream(100.0, 0), Stream(100.05, 3)], 100.079, 0.004, 0.010) == pytest.approx(0.007)
    assert slack_s([Stream(100.0, 10)], 100.106 + 0.180, 0.004, 0.010) == pytest.approx(-0.180)


def test_slack_for_a_target_that_no_step_keeps_counts_only_time_in_hand_already():
    assert slack_s([Stream(100.0, 0)], 100.0, 0.012, 0.010) == inf
    assert slack_s([Stream(100.0, 50)], 100.2, 0.012, 0.010) == pytest.approx(0.298)


@st.composite
def engines(draw):
    """(step, target, (how many steps later, how many tokens) of each request)"""
    step_s = draw(st.floats(1e-3, 0.03))
    target_s = step_s * draw(st.floats(1.01, 20.0))
    requests = st.lists(st.tuples(st.integers(0, 20), st.integers(1, 60)), min_size=1, max_size=8)
    return step_s, target_s, draw(requests)


@given(engines())
def test_steps_that_begin_within_the_slack_have_every_token_in_time(drawn):
    """However late they begin, and whoever comes or ends between them."""
    step_s, target_s, requests = drawn
    now, steps = 0.0, 0
    waiting = sorted(requests)
    running = []  # [first_at, tokens, how many it comes to]
    while waiting or running:
        while waiting and (waiting[0][0] <= steps or not running):
            running.append([now, 0, waiting.pop(0)[1]])
        lead = slack_s([Stream(first_at, tokens) for first_at, tokens, _ in running], now, step_s, target_s)
        assert lead >= -1e-9
        now += max(0.0, lead) + step_s
        steps += 1
        for each in running:
            each[1] += 1
            assert now - each[0] <= each[1] * target_s + 1e-9
        running = [each for each in running if each[1] < each[2]]


@given(
    st.floats(1e-3, 0.03),
    st.floats(1.0, 20.0),
    st.lists(st.tuples(st.floats(0, 9), st.integers(0, 500)), max_size=8),
    st.floats(9, 20),
)
def test_request_that_counts_for_slack_is_in_time_again_if_it_goes_on_for_long_enough(step_s, times, drawn, now):
    target_s = times * step_s
    for first_at, tokens in drawn:
        lead = slack_s([Stream(first_at, tokens)], now, step_s, target_s)
        more = RECOVERY_RATIO * tokens + RECOVERY_TOKENS
        caught_up = slack_s([Stream(first_at, tokens + more)], now + more * step_s, step_s, target_s)
        assert lead == inf or caught_up >= -1e-6


def test_decode_window_is_a_ninth_of_the_prefill_step_before():
    hold = DecodeWindow()
    assert hold.left_s(9.0, HALF) == 0
    hold.prefilled(10.0, 0.9)
    assert hold.left_s(10.0, HALF) == pytest.approx(0.1) and hold.left_s(10.06, HALF) == pytest.approx(0.04)
    assert hold.left_s(10.2, HALF) == 0
    hold.prefilled(11.0, 0.09)
    assert hold.left_s(11.0, HALF) == pytest.approx(0.01)


def test_decode_window_of_decodes_that_need_little_is_a_third_of_the_time():
    hold = DecodeWindow()
    hold.prefilled(10.0, 0.9)
    for need in (0.1, RULES.decode_first_max_share):
        assert hold.left_s(10.0, need) == pytest.approx(0.45) and hold.left_s(10.44, need) == pytest.approx(0.01)
    assert hold.left_s(10.0, RULES.decode_first_max_share + 0.01) == pytest.approx(0.1)


@given(SECONDS, st.lists(SECONDS, min_size=1, max_size=40), st.sampled_from([0.1, HALF]))
def test_prefills_have_their_least_share_but_for_the_step_under_way(step_s, took_s, need):
    hold, now, decoded_s = DecodeWindow(), 0.0, 0.0
    for seconds in took_s:
        while hold.left_s(now, need) > 0:
            now, decoded_s = now + step_s, decoded_s + step_s
        now += seconds
        hold.prefilled(now, seconds)
    least = RULES.own_least_share if need == HALF else 1 - RULES.decode_first_max_share
    assert decoded_s <= sum(took_s) * (1 / least - 1) + len(took_s) * step_s + 1e-9
