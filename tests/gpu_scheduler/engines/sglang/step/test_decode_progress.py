from __future__ import annotations

from math import inf

import pytest

from gpu_scheduler.engines.sglang.step.decode_progress import DecodeProgress
from gpu_scheduler.engines.sharing.solo_step_time import DecodeStep
from gpu_scheduler.engines.sharing.tpot_slack import Stream

STEP = DecodeStep(0.005, True)


def slack_ms(progress: DecodeProgress, now: float) -> float:
    return 1e3 * (progress.decodes(1).begin_by - now)


def observed(target_s: float, now: float, *streams: tuple[float, int], under_way: int = 0) -> DecodeProgress:
    progress = DecodeProgress()
    for _ in range(under_way):
        progress.began(now, True)
    progress.observe([Stream(*each) for each in streams], now, STEP, target_s)
    return progress


def test_slack_is_that_of_the_stream_with_the_least() -> None:
    assert slack_ms(observed(0.009, 100.0), 100.0) == inf, "nothing has a first token"
    assert slack_ms(observed(0.009, 100.0, (100.0, 0)), 100.0) == pytest.approx(4)
    assert slack_ms(observed(0.009, 100.010, (100.0, 2)), 100.010) == pytest.approx(12)
    assert slack_ms(observed(0.009, 100.010, (100.0, 2), (100.010, 0)), 100.010) == pytest.approx(4)
    assert slack_ms(observed(0.0, 100.0, (0.0, 0)), 100.0) == inf, "no target"


def test_slack_counts_tokens_under_way_and_the_time_until_they_are_there() -> None:
    progress = observed(0.014, 100.0, (100.0, 0), under_way=1)
    assert slack_ms(progress, 100.0) == pytest.approx(23 - 5)
    progress.ended()
    assert slack_ms(progress, 100.0) == pytest.approx(23)
    progress.observe([Stream(100.0, 0)], 100.0, STEP, 0.014)
    assert slack_ms(progress, 100.0) == pytest.approx(9)


def test_slack_grows_by_the_target_with_each_step_until_the_streams_are_observed_again() -> None:
    progress = observed(0.009, 100.0, (100.0, 0))
    progress.began(100.0, True)
    progress.ended()
    assert slack_ms(progress, 100.0) == pytest.approx(13)
    assert not progress.is_stale(100.049) and progress.is_stale(100.051)


def test_slack_that_is_outdated_is_unknown() -> None:
    assert DecodeProgress().is_stale(100.0)
    progress = observed(0.009, 100.0, (99.0, 0))
    progress.mark_stale()
    assert progress.is_stale(100.0) and progress.decodes(3) == (3, inf, STEP)


def test_solo_step_of_a_while_ago_does_not_count() -> None:
    """Otherwise an engine that was too slow for its target once would make no bid, and so never learn better."""
    progress = DecodeProgress()
    for number in range(20):
        progress.began(100.0 + 0.02 * number, True)
    assert progress.solo_step(0.005, 100.4) == (pytest.approx(0.020), True)
    assert progress.solo_step(0.005, 103.0) == (0.005, False)


def test_solo_step_is_the_quickest_of_the_last_and_at_least_that_of_one_request() -> None:
    progress = DecodeProgress()
    progress.began(101.0, True)
    assert progress.solo_step(0.005, 101.0).seconds == 0.005, "the first one is known when the second begins"
    for now in (101.012, 101.018, 101.040):
        progress.began(now, True)
    assert progress.solo_step(0.005, 101.04).seconds == pytest.approx(0.006)
    for number in range(1, 17):
        progress.began(101.040 + 0.004 * number, True)
    assert progress.solo_step(0.005, 101.1).seconds == 0.005


def test_solo_step_behind_a_wait_or_a_prefill_or_beside_neighbours_does_not_count() -> None:
    progress = DecodeProgress()
    for number in range(20):
        progress.began(101.0 + 0.05 * number, True)
        progress.disturbed()
    assert progress.solo_step(0.005, 102.0).seconds == 0.005
    for number in range(20):
        progress.began(105.0 + 0.02 * number, False)
    assert progress.solo_step(0.005, 105.4).seconds == 0.005
    progress.began(110.0, True)
    progress.disturbed()
    for now in (110.001, 110.008, 110.015):
        progress.began(now, True)
    assert progress.solo_step(0.005, 110.015).seconds == pytest.approx(0.007)


def test_step_time_bound_is_the_mean_of_the_last_steps_whatever_came_between_them() -> None:
    """However long steps seemed to take when the model was measured, beside others that were busy."""
    progress, now = DecodeProgress(), 100.0
    assert progress.at_most_s == inf
    for number in range(17):
        now += 0.005 if number < 9 else 0.010
        progress.began(now, False)
        if number == 4:
            progress.disturbed()
    assert progress.at_most_s == pytest.approx((8 * 0.005 + 8 * 0.010) / 15)
    progress.began(now + 1.0, True)
    assert progress.at_most_s == pytest.approx((7 * 0.005 + 8 * 0.010 + 1.0) / 15)


def test_step_time_bound_with_a_step_under_way_at_the_first_is_no_less_than_a_step() -> None:
    """SGLang gives the device the next step while one runs: the first of a row may have begun with it, the last not."""
    progress, ends = DecodeProgress(), [100.0 + 0.006 * number for number in range(20)]
    for number in range(17):
        progress.began(ends[max(0, number - 1)], True)
    assert progress.at_most_s >= 0.006


def test_decode_steps_of_another_model_are_forgotten() -> None:
    progress = DecodeProgress()
    for number in range(17):
        progress.began(100.0 + 0.001 * number, True)
    progress.forget_steps()
    assert progress.at_most_s == inf and progress.solo_step(0.005, 100.016) == (0.005, False)
