import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_scheduler.policy.beat import AFTER_MISS, CALM, LEAST_EASE, MOST_PATIENCE, WINDOW, Beat
from gpu_scheduler.policy.pace import Decoding, PaceRules

STEP_S = 0.008


class Clock:
    """Feeds steps of given lengths."""

    def __init__(self, measured_s: float = STEP_S, target_s: float = 2 * STEP_S):
        self.beat = Beat(measured_s)
        self.now, self.target_s = 100.0, target_s
        self.beat.step(self.now, target_s)

    def steps(self, seconds: float, count: int = 1) -> None:
        for _ in range(count):
            self.now += seconds
            self.beat.step(self.now, self.target_s)


def test_a_step_alone_is_the_measured_one_until_some_were_seen():
    clock = Clock()
    clock.steps(0.012, 7)
    assert clock.beat.step_s == STEP_S
    clock.steps(0.012)
    assert clock.beat.step_s == pytest.approx(0.012)


def test_steps_beside_a_prefill_and_across_an_own_one_are_no_steps_alone():
    clock = Clock()
    clock.beat.prefills(own=False, others=True)
    clock.steps(0.016, 20)
    clock.beat.prefills(own=False, others=False)
    clock.steps(0.016)  # began beside it
    clock.beat.prefills(own=True, others=False)
    clock.steps(0.500, 20)
    assert clock.beat.step_s == STEP_S and clock.beat.ease == 1.0


def test_the_time_in_which_nothing_decoded_is_no_step():
    clock = Clock()
    clock.beat.stopped()
    clock.steps(9.0)
    clock.steps(0.010, 8)
    assert clock.beat.step_s == pytest.approx(0.010)


def test_a_window_over_its_target_lowers_the_ease_by_what_was_too_much_and_one_slow_step_alone_does_not():
    clock = Clock()
    clock.beat.prefills(own=False, others=True)
    clock.steps(0.100)
    clock.steps(0.012, WINDOW - 1)
    assert clock.beat.ease == 1.0
    clock.steps(0.018, WINDOW)
    ease = (AFTER_MISS * 16 - 8) / (18 - 8)
    assert clock.beat.ease == pytest.approx(ease)
    clock.steps(0.100, WINDOW)
    assert clock.beat.ease == pytest.approx(ease / 2), "at most by half at a time"


def test_the_ease_grows_back_when_steps_are_well_within_their_target():
    clock = Clock()
    clock.beat.prefills(own=False, others=True)
    clock.steps(0.100, WINDOW)
    clock.steps(CALM * 0.016 * 0.99, WINDOW)
    assert clock.beat.ease == 0.5, "not after the first calm window"
    clock.steps(CALM * 0.016 * 0.99, 20 * WINDOW)
    assert clock.beat.ease == 1.0


@given(st.floats(0.2, 20.0), st.floats(1.2, 2.2))
def test_the_loop_comes_to_rest_whatever_a_prefill_costs(cost, targets):
    """A step takes s + cost * g, for any cost: the ease falls until the target is kept, and then stays."""
    clock = Clock(target_s=targets * STEP_S)
    clock.beat.prefills(own=False, others=True)

    def window() -> float:
        g = Decoding(STEP_S, clock.target_s, clock.beat.ease).bears(PaceRules().margin)
        clock.steps(STEP_S + cost * min(g, STEP_S), WINDOW)
        return clock.beat.ease

    settling = [window() for _ in range(400)]
    ease = settling[-1]
    assert LEAST_EASE <= ease <= 1.0
    assert [window() for _ in range(200)] == [ease] * 200
    g = Decoding(STEP_S, clock.target_s, ease).bears(PaceRules().margin)
    assert ease == LEAST_EASE or STEP_S + cost * min(g, STEP_S) <= clock.target_s * (1 + 1e-9)


@given(st.floats(1.05, 5.0))
def test_where_lifting_the_bound_breaks_the_target_that_happens_ever_more_rarely(worse):
    """Under a bound all is calm, without one the target is missed: the loop cannot rest, so it has to wait."""
    target_s = 4 * STEP_S
    clock = Clock(target_s=target_s)
    clock.beat.prefills(own=False, others=True)
    missed = 0
    for _ in range(20 * MOST_PATIENCE):
        free = Decoding(STEP_S, target_s, clock.beat.ease).bears(PaceRules().margin) > STEP_S
        clock.steps(worse * target_s if free else 1.5 * STEP_S, WINDOW)
        missed += free
    assert missed <= 4 * 20, "a few windows of MOST_PATIENCE"
