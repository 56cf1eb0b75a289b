"""The step gate: events and questions in, answers out."""

from __future__ import annotations

from functools import partial
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_scheduler.engines.sharing import decode_arbitration
from gpu_scheduler.engines.sharing.decode_arbitration import DecodeBid
from gpu_scheduler.engines.sharing.solo_step_time import DecodeStep
from gpu_scheduler.engines.sharing.step_gate import Decodes, Neighbours, StepGate, StepWait, WaitReason
from gpu_scheduler.engines.sharing.throttle import FREE, PrefillThrottle

MOST_S = 0.05
PREFILLS = Neighbours(prefill_priority_s=MOST_S, decode_arbitration_s=MOST_S, prompts=1)
NONE = Neighbours(prefill_priority_s=MOST_S, decode_arbitration_s=MOST_S)
STEP = DecodeStep(0.005, True)
ONE = Decodes(1, step=STEP)


def gate_at(now: float = 100.0, throttle: PrefillThrottle = FREE) -> StepGate:
    gate = StepGate(partial(decode_arbitration.bid, place=1))
    gate.look(now, throttle)
    return gate


def with_target(step_s: float = 0.010, **more: bool) -> StepGate:
    return gate_at(throttle=PrefillThrottle(step_s=step_s, **more))


def bidding(*needs: float, place: int = 2) -> Neighbours:
    return NONE._replace(bids=[DecodeBid(need, place, need) for need in needs])


# --- the pause after a prefill step


def test_pause_before_the_first_step_is_over() -> None:
    assert gate_at().pause(100.0, 10.0) is None


def test_pause_after_a_step_is_a_multiple_of_it_from_its_end() -> None:
    gate = gate_at()
    gate.prefill_began()
    assert gate.pause(101.0, 5.0) == StepWait(inf, WaitReason.PAUSE)
    gate.prefill_ended()
    assert gate.pause(101.0, 5.0) == StepWait(inf, WaitReason.PAUSE), "its end counts from the next look"
    gate.look(102.0, FREE)
    gate.look(103.0, FREE)
    assert gate.pause(104.0, 5.0) == StepWait(112.0, WaitReason.PAUSE)
    assert gate.pause(112.0, 5.0) is None
    assert gate.pause(102.5, 0.5) == StepWait(103.0, WaitReason.PAUSE)


def test_pause_after_overlapping_steps_counts_the_last_one_from_the_end_of_the_one_before() -> None:
    gate = gate_at()
    for _ in range(2):
        gate.prefill_began()
    gate.prefill_ended()
    gate.look(110.0, FREE)
    assert gate.pause(200.0, 5.0) == StepWait(inf, WaitReason.PAUSE)
    gate.prefill_ended()
    gate.look(113.0, FREE)
    assert gate.pause(114.0, 2.0) == StepWait(119.0, WaitReason.PAUSE)


def test_pause_without_a_throttle_lets_steps_overlap() -> None:
    gate = gate_at()
    gate.prefill_began()
    assert gate.pause(100.0, 0.0) is None


# --- decode steps before the engine's own prefill steps


def after_a_prefill_step_of_60_ms(step_s: float = 0.010) -> StepGate:
    gate = with_target(step_s)
    gate.prefill_began()
    gate.prefill_ended()
    assert gate.look(100.060, gate.throttle), "slacks from before are out of date"
    return gate


def behind(by_s: float, step: DecodeStep = STEP) -> Decodes:
    return Decodes(1, 100.060 - by_s, step)


def test_own_decodes_behind_their_target_come_first_for_a_ninth_of_the_step_before() -> None:
    gate = after_a_prefill_step_of_60_ms()
    first = gate.decodes_first(100.060, behind(0.001))
    assert first == (pytest.approx(100.060 + 0.060 / 9), WaitReason.OWN_DECODES)
    assert gate.decodes_first(100.0666, behind(0.001)) is not None
    assert gate.decodes_first(100.0667, behind(0.001)) is None


def test_own_decodes_with_slack_or_without_a_target_hold_no_prefill() -> None:
    gate = after_a_prefill_step_of_60_ms()
    assert gate.decodes_first(100.060, behind(-0.005)) is None
    assert gate.decodes_first(100.060, Decodes(0, 0.0)) is None
    gate.look(100.061, FREE)
    assert gate.decodes_first(100.061, behind(0.001)) is None


@pytest.mark.parametrize(
    ("step", "longest_s"),
    [
        (DecodeStep(0.003, True), 0.030),
        (DecodeStep(0.005, True), 0.060 / 9),
        (DecodeStep(0.003, False), 0.060 / 9),  # of one request; of these it may be more
        (DecodeStep(), 0.060 / 9),
    ],
)
def test_own_decodes_known_to_need_a_third_or_less_come_first_for_half_of_the_step_before(
    step: DecodeStep, longest_s: float
) -> None:
    gate = after_a_prefill_step_of_60_ms()
    assert gate.decodes_first(100.060 + 0.9 * longest_s, behind(0.001, step)) is not None
    assert gate.decodes_first(100.060 + 1.1 * longest_s, behind(0.001, step)) is None


def test_own_decodes_behind_a_running_prefill_come_after_it_for_a_time_that_is_not_known_yet() -> None:
    gate = after_a_prefill_step_of_60_ms()
    gate.look(100.0667, gate.throttle)
    gate.prefill_began()
    assert gate.decodes_first(100.0667, behind(0.001)) == StepWait(inf, WaitReason.OWN_DECODES)


def test_slacks_are_out_of_date_after_a_prefill_step_and_with_another_target() -> None:
    gate = with_target(0.009)
    assert not gate.look(100.001, PrefillThrottle(step_s=0.009))
    assert gate.look(100.002, PrefillThrottle(step_s=0.010))
    gate.prefill_began()
    assert not gate.look(100.003, gate.throttle)
    gate.prefill_ended()
    assert gate.look(100.004, gate.throttle)


# --- decode steps that wait for prefill steps of neighbours


def test_decode_waits_while_a_neighbour_prefills_and_no_longer() -> None:
    gate = gate_at()
    assert gate.decode(0.0, NONE, ONE) is None
    assert gate.decode(0.01, PREFILLS, ONE) == (pytest.approx(0.06), WaitReason.NEIGHBOUR_PREFILL)
    assert gate.decode(0.05, PREFILLS, ONE) == (pytest.approx(0.06), WaitReason.NEIGHBOUR_PREFILL)
    assert gate.decode(0.051, NONE, ONE) is None


def test_decode_wait_interrupted_without_a_step_does_not_begin_anew() -> None:
    gate = gate_at()
    looks = [(PREFILLS, 0.00), (NONE, 0.03), (PREFILLS, 0.032), (NONE, 0.048)]
    assert [gate.decode(now, look, ONE) is not None for look, now in looks] == [True, False, True, False]
    assert gate.decode(0.06, PREFILLS, ONE) is None
    gate.decode_began()
    assert gate.decode(0.07, PREFILLS, ONE) is not None


def test_decode_that_has_waited_enough_need_not_wait_again_before_its_step() -> None:
    gate = gate_at()
    assert gate.decode(0.0, PREFILLS, ONE) is not None
    assert [gate.decode(at, PREFILLS, ONE) for at in (0.05, 0.06, 0.2)] == [None] * 3


def test_decode_behind_endless_prefills_makes_a_step_each_time_it_has_waited_for_its_most() -> None:
    gate, waited = gate_at(), []
    for look in range(13):
        waited.append(gate.decode(0.01 * look, PREFILLS, ONE) is not None)
        if not waited[-1]:
            gate.decode_began()
    assert waited == [True] * 5 + [False] + [True] * 5 + [False, True]


def test_decode_without_a_time_to_wait_never_waits() -> None:
    assert gate_at().decode(1.0, PREFILLS._replace(prefill_priority_s=0.0), ONE) is None


def test_decode_of_too_many_requests_for_each_prompt_does_not_wait_and_is_not_undisturbed() -> None:
    gate, many = with_target(), Decodes(17, step=STEP)
    bounded = PREFILLS._replace(prefill_priority_batch=16)
    assert gate.decode(100.0, bounded, many) is None and not gate.undisturbed
    assert gate.decode(100.0, bounded._replace(prompts=2), many) is not None
    assert gate.decode(100.0, PREFILLS, Decodes(1000, step=STEP)) is not None, "without a bound, however many"


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.floats(0.0, 0.2)), max_size=50))
def test_decode_waits_no_longer_than_the_most_after_the_first_claim_since_the_last_step(
    looks: list[tuple[bool, bool, float]],
) -> None:
    gate, now, first = gate_at(), 0.0, None
    for claimed, made, later_s in looks:
        now += later_s
        first = now if first is None and claimed else first
        wait = gate.decode(now, PREFILLS if claimed else NONE, ONE)
        if wait is not None:
            assert claimed and first is not None and now < wait.until == first + MOST_S
        elif made:
            gate.decode_began()
            first = None


# --- decode steps that wait for decode steps of neighbours


def test_decode_of_the_engine_that_needs_more_for_each_request_waits_while_all_need_too_much() -> None:
    gate = with_target()
    assert gate.decode(100.0, bidding(0.45), Decodes(1, 100.0, STEP)) == StepWait(100.05, WaitReason.NEIGHBOUR_DECODES)
    assert gate.decode(100.0, bidding(0.55), Decodes(1, 100.0, STEP)) is None and gate.undisturbed
    assert gate.decode(100.0, bidding(0.35), Decodes(1, 100.0, STEP)) is None and not gate.undisturbed, "enough for all"


def test_decode_ahead_of_its_target_waits_for_any_bid_and_alone_has_the_devices() -> None:
    gate, ahead = with_target(), Decodes(1, 100.1, STEP)
    assert gate.decode(100.0, bidding(0.9), ahead) is not None
    assert gate.decode(100.0, NONE, ahead) is None and not gate.undisturbed, "it makes no bid, so others may decode"
    assert gate.decode(100.0, NONE, Decodes(1, 100.0, STEP)) is None and gate.undisturbed


def test_decode_without_a_target_waits_for_no_bid() -> None:
    gate = gate_at()
    assert gate.decode(100.0, bidding(0.1), Decodes(1, 100.0, STEP)) is None and not gate.undisturbed


# --- bids


def test_bid_is_made_until_there_is_a_step_of_slack() -> None:
    gate = with_target()
    assert gate.bid(100.0, Decodes(1, 100.0049, STEP)) == 0.5
    assert gate.bid(100.0, Decodes(1, 100.0051, STEP)) is None
    assert gate.bid(100.0, Decodes(0, 100.0, STEP)) is None
    assert gate_at().bid(100.0, Decodes(1, 100.0, STEP)) is None, "no target"
    assert with_target(urgent=True).bid(100.0, Decodes(1, 200.0, STEP)) == 0.5, "late requests of its model wait"


def test_bid_is_withdrawn_behind_a_neighbours_prefill_and_during_an_own_one() -> None:
    gate, due = with_target(), Decodes(16, 100.0, STEP)
    bounded = PREFILLS._replace(prefill_priority_batch=16)
    assert gate.decode(100.0, bounded, due) is not None and gate.bid(100.0, due) is None
    many = due._replace(requests=17)
    assert gate.decode(100.0, bounded, many) is None and gate.bid(100.0, many) == 0.5, "they are too many to wait"
    gate.decode(100.0, NONE, due)
    gate.prefill_began()
    assert gate.bid(100.0, due) is None, "its own prompts come first"
    gate.prefill_ended()
    gate.look(100.001, gate.throttle)
    assert gate.bid(100.001, due) is None, "another step may follow at once"
    gate.no_prefill_next()
    assert gate.bid(100.001, due) == 0.5
