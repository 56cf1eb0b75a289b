from math import inf

import pytest

from gpu_scheduler.engines.sglang.step.pacer import Pacer
from gpu_scheduler.engines.sharing.solo_step_time import DecodeStep
from gpu_scheduler.engines.sharing.throttle import FREE, PrefillThrottle
from gpu_scheduler.engines.sharing.tpot_slack import Stream


@pytest.fixture
def pacer():
    pacer = Pacer()
    pacer.look(100.0)
    return pacer


def test_the_first_step_waits_for_nothing(pacer):
    assert pacer.rest(10.0, 100.0) == 0


def test_the_pause_counts_from_the_end_of_the_last_step_and_is_as_many_times_as_long(pacer):
    pacer.began()
    assert pacer.rest(5.0, 101.0) == inf
    pacer.ended()
    assert pacer.rest(5.0, 101.0) == inf, "nobody has said yet what time it is"
    pacer.look(102.0)
    pacer.look(103.0)
    assert (pacer.rest(5.0, 104.0), pacer.rest(5.0, 112.0), pacer.rest(0.5, 102.5)) == (8.0, 0.0, 0.5)


def test_with_several_steps_on_the_device_it_counts_from_the_last_one_which_began_when_the_other_ended(pacer):
    for _ in range(2):
        pacer.began()
    pacer.ended()
    pacer.look(110.0)
    assert pacer.rest(5.0, 200.0) == inf
    pacer.ended()
    pacer.look(113.0)
    assert pacer.rest(2.0, 114.0) == 5.0


def test_without_a_pause_the_next_step_may_be_formed_while_one_runs(pacer):
    pacer.began()
    assert pacer.rest(0.0, 100.0) == 0


STEP = DecodeStep(0.005, True)


def decoding(pacer, now, *streams, step=STEP):
    """Whether they want to be first; a step takes 5 ms."""
    pacer.decoding([Stream(*each) for each in streams], now, step)
    return pacer.wants(now)


def test_decodes_want_to_be_first_until_they_have_a_step_in_hand_and_again_when_it_is_gone(pacer):
    pacer.look(100.0, PrefillThrottle(step_s=0.009))
    assert not decoding(pacer, 100.0), "nothing has a first token"
    assert decoding(pacer, 100.0, (100.0, 0))
    assert not decoding(pacer, 100.010, (100.0, 2)), "12 ms"
    assert not pacer.wants(100.016) and pacer.wants(100.018), "as the time passes"
    assert decoding(pacer, 100.010, (100.0, 2), (100.010, 0))


def test_tokens_that_are_on_their_way_count_and_so_does_the_time_until_they_are_there(pacer):
    pacer.look(100.0, PrefillThrottle(step_s=0.014))
    pacer.decodes(True)
    assert not decoding(pacer, 100.0, (100.0, 0)), "23 ms, and a step under way of 5"
    assert not pacer.wants(100.012) and pacer.wants(100.014)
    pacer.decoded()
    assert not decoding(pacer, 100.0, (100.0, 0)), "9 ms"
    assert pacer.wants(100.005)


def test_an_engine_of_whose_model_late_requests_wait_wants_more_whatever_it_has_in_hand(pacer):
    pacer.look(100.0, PrefillThrottle(step_s=0.014, urgent=True))
    assert decoding(pacer, 100.0, (100.0, 50)) and not pacer.holds


def test_steps_of_a_while_ago_say_nothing_of_those_that_come(pacer):
    """Or an engine that was too slow for its target once would ask for nothing, and so never learn better."""
    for number in range(20):
        pacer.look(100.0 + 0.02 * number)
        pacer.decodes(True)
    assert pacer.step_alone(0.005, 100.4) == (pytest.approx(0.020), True)
    assert pacer.step_alone(0.005, 103.0) == (0.005, False)


def test_decode_steps_bound_what_one_takes_alone_whatever_came_between_them(pacer):
    """And however long they seemed to take when the model was measured, beside others that were busy."""
    assert pacer.at_most_s == inf
    now = 100.0
    for number in range(17):
        now += 0.005 if number < 9 else 0.010
        pacer.look(now)
        pacer.decodes(False)
        if number == 4:
            pacer.stood_still()
    assert pacer.at_most_s == pytest.approx((8 * 0.005 + 8 * 0.010) / 15)
    pacer.look(now + 1.0)
    pacer.decodes(True)
    assert pacer.at_most_s == pytest.approx((7 * 0.005 + 8 * 0.010 + 1.0) / 15)


def test_with_a_step_under_way_as_they_begin_none_seems_quicker_than_it_is(pacer):
    """SGLang gives the device the next step while one runs: the first of a row may have begun with it, the last not."""
    ends = [100.0 + 0.006 * number for number in range(20)]
    for number in range(17):
        pacer.look(ends[max(0, number - 1)])
        pacer.decodes(True)
    assert pacer.at_most_s >= 0.006


def test_steps_of_another_model_say_nothing(pacer):
    for number in range(17):
        pacer.look(100.0 + 0.001 * number)
        pacer.decodes(True)
    pacer.forget_steps()
    assert pacer.at_most_s == inf and pacer.step_alone(0.005, 100.016) == (0.005, False)


def test_what_was_seen_of_each_request_is_good_for_a_while_with_a_token_more_for_each_step(pacer):
    pacer.look(100.0, PrefillThrottle(step_s=0.009))
    assert pacer.is_blind(100.0)
    assert decoding(pacer, 100.0, (100.0, 0)) and not pacer.is_blind(100.049) and pacer.is_blind(100.051)
    pacer.decodes(True)
    pacer.decoded()
    assert not pacer.wants(100.0) and not pacer.wants(100.007) and pacer.wants(100.009)


def test_it_is_seen_anew_when_a_prefill_step_has_ended_or_the_target_changed(pacer):
    pacer.look(100.0, PrefillThrottle(step_s=0.009))
    decoding(pacer, 100.0, (100.0, 0))
    pacer.began()
    pacer.ended()
    pacer.look(100.001)
    assert pacer.is_blind(100.001)
    decoding(pacer, 100.001, (100.0, 0))
    pacer.look(100.002, PrefillThrottle(step_s=0.009))
    assert not pacer.is_blind(100.002)
    pacer.look(100.003, PrefillThrottle(step_s=0.010))
    assert pacer.is_blind(100.003)


def test_without_a_target_nothing_is_wanted(pacer):
    assert not decoding(pacer, 100.0, (0.0, 0)) and pacer.need is None


def need(pacer, now):
    pacer.decoding([], now, pacer.step_alone(0.005, now))
    return pacer.need


def test_a_need_is_of_the_quickest_of_the_last_steps_and_at_least_what_one_request_takes(pacer):
    assert need(pacer, 101.0) is None, "no target"
    pace = PrefillThrottle(step_s=0.010)

    def step(now):
        pacer.look(now, pace)
        pacer.decodes(True)

    step(101.0)
    assert need(pacer, 101.0) == 0.5, "the first one is known when the second begins"
    for now in (101.012, 101.018, 101.040):
        step(now)
    assert need(pacer, 101.04) == pytest.approx(0.6)
    for number in range(1, 17):
        step(101.040 + 0.004 * number)
    assert need(pacer, 101.1) == 0.5


def test_what_it_stood_still_or_prefilled_before_a_step_says_nothing_of_its_need(pacer):
    pace = PrefillThrottle(step_s=0.010)
    for number in range(20):
        pacer.look(101.0 + 0.05 * number, pace)
        pacer.decodes(True)
        pacer.stood_still()
    assert need(pacer, 102.0) == 0.5
    for number in range(20):
        pacer.look(105.0 + 0.02 * number, pace)
        pacer.decodes(False)
    assert need(pacer, 105.4) == 0.5, "other engines were at their steps, too"
    pacer.look(110.0, pace)
    pacer.decodes(True)
    pacer.began()
    pacer.look(110.001, pace)
    pacer.decodes(True)
    for now in (110.008, 110.015):
        pacer.look(now, pace)
        pacer.decodes(True)
    assert need(pacer, 110.015) == pytest.approx(0.7)


@pytest.fixture
def behind(pacer):
    """Something decodes, with 10 ms for each step, and stood still for a prefill step of 60 ms."""
    pacer.look(100.0, PrefillThrottle(step_s=0.010))
    pacer.began()
    pacer.ended()
    pacer.look(100.060)
    assert decoding(pacer, 100.060, (100.0, 0))
    return pacer


def test_what_stood_still_for_too_long_decodes_first_and_what_has_just_its_first_token_need_not(behind):
    assert behind.holds
    assert decoding(behind, 100.060, (100.0, 6)) and not behind.holds, "5 ms before its time"
    decoding(behind, 100.060, (100.060, 0))
    assert not behind.holds


@pytest.mark.parametrize(
    ("step", "longest_s"),
    [
        (DecodeStep(0.003, True), 0.030),
        (DecodeStep(0.005, True), 0.060 / 9),
        (DecodeStep(0.003, False), 0.060 / 9),  # of one request; of these it may be more
        (DecodeStep(), 0.060 / 9),
    ],
)
def test_decodes_that_are_known_to_need_a_third_or_less_come_first_for_half_of_the_step_before(pacer, step, longest_s):
    pacer.look(100.0, PrefillThrottle(step_s=0.010))
    pacer.began()
    pacer.ended()
    pacer.look(100.060)
    decoding(pacer, 100.060, (100.0, 0), step=step)
    assert pacer.holds_at(100.060 + 0.9 * longest_s) and not pacer.holds_at(100.060 + 1.1 * longest_s)


def test_decodes_come_first_for_a_ninth_of_the_step_before_and_no_longer(behind):
    behind.look(100.0666)
    assert behind.holds
    behind.look(100.0667)
    assert not behind.holds


def test_what_is_behind_decodes_after_the_step_that_runs_although_nobody_knows_how_long_that_takes(behind):
    behind.look(100.0667)
    behind.began()
    assert behind.holds


def test_another_engines_turn_takes_nothing_from_what_decodes_may_take(behind):
    behind.look(100.064, None)
    assert behind.holds


def test_without_a_bound_nothing_is_held(behind):
    behind.look(100.064, FREE)
    decoding(behind, 100.064, (100.0, 0))
    assert not behind.holds
