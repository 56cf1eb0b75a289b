import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_scheduler.engines.sharing.throttle import LOSS, Decoding, Prefilling, ThrottleRules, throttle_beside
from gpu_scheduler.policy.throttle.interference import FOLLOW, MOST_LOSS, WINDOW, DecodeInterference

STEP_S = 0.008


class Clock:
    """Feeds steps of given lengths, and how much others prefill meanwhile."""

    def __init__(self, measured_s: float = STEP_S):
        self.beat = DecodeInterference(measured_s)
        self.now, self.others_s = 100.0, 0.0
        self.beat.step(self.now, self.others_s)

    def steps(self, seconds: float, count: int = 1, share: float = 0.0) -> None:
        for _ in range(count):
            self.now += seconds
            self.others_s += share * seconds
            self.beat.step(self.now, self.others_s)


def test_step_time_alone_is_the_measured_one_until_enough_steps_were_seen():
    clock = Clock()
    clock.steps(0.012, 7)
    assert clock.beat.step_s == STEP_S
    clock.steps(0.012)
    assert clock.beat.step_s == pytest.approx(0.012)


def test_steps_beside_or_across_a_prefill_do_not_count_as_steps_alone():
    clock = Clock()
    clock.steps(0.016, 20, share=1.0)
    clock.steps(0.016, 20, share=0.01)
    clock.beat.prefills(own=True)
    clock.steps(0.500, 2 * WINDOW)
    clock.steps(0.500, 2 * WINDOW, share=1.0)
    clock.beat.prefills(own=False)
    clock.steps(0.500)  # began in it
    assert clock.beat.step_s == STEP_S and clock.beat.loss == LOSS


def test_time_without_decodes_counts_as_no_step():
    clock = Clock()
    clock.beat.stopped()
    clock.steps(9.0)
    clock.steps(0.010, 8)
    assert clock.beat.step_s == pytest.approx(0.010)


def test_loss_moves_a_part_of_the_way_to_what_a_window_shows():
    clock = Clock()
    clock.steps(4 * STEP_S, WINDOW - 1, share=1.0)
    assert clock.beat.loss == LOSS
    clock.steps(4 * STEP_S, share=1.0)
    assert clock.beat.loss == pytest.approx(LOSS + FOLLOW * (3 / 4 - LOSS))


def test_step_of_a_whole_second_counts_as_one_slow_step():
    clock = Clock()
    clock.steps(2.4 * STEP_S, WINDOW - 1, share=1.0)
    clock.steps(1.0)
    assert clock.beat.loss == pytest.approx(LOSS, abs=0.03)


def test_loss_is_not_learned_where_no_step_alone_is_known():
    clock = Clock(measured_s=0.0)
    clock.steps(0.016, 2 * WINDOW, share=1.0)
    assert clock.beat.loss == LOSS


@given(st.lists(st.tuples(st.floats(1e-5, 10.0), st.floats(0.0, 3.0)), max_size=300))
def test_loss_stays_within_its_bounds_whatever_steps_come(steps):
    clock = Clock()
    for seconds, share in steps:
        clock.steps(seconds, share=share)
        assert 0.0 <= clock.beat.loss <= MOST_LOSS


@given(st.floats(0.0, 0.85), st.lists(st.floats(0.25, 1.0), min_size=60, max_size=60))
def test_loss_approaches_its_true_value_without_overshoot_whatever_the_throttle(loss, shares):
    clock = Clock()
    away = abs(LOSS - loss)
    for share in shares:
        clock.steps(STEP_S / (1 - share * loss), WINDOW, share)
        assert abs(clock.beat.loss - loss) <= away + 1e-9, "never over it and back"
        away = abs(clock.beat.loss - loss)
    assert clock.beat.loss == pytest.approx(loss, abs=1e-6)


@given(st.floats(0.1, 0.85), st.floats(1.2, 4.0), st.floats(1.0, 1.3))
def test_throttle_and_loss_settle_at_the_target_also_with_steps_that_have_grown(loss, times, grown):
    """The step alone is out of date: nothing of it was seen since contexts grew."""
    clock, rules = Clock(), ThrottleRules()
    target_s = times * STEP_S

    def mean_s(share: float) -> float:
        return grown * STEP_S / (1 - share * loss)

    def window() -> float:
        one = Decoding(STEP_S, target_s, clock.beat.loss)
        bound = one.tolerates(ThrottleRules()), one.step_s
        share = throttle_beside(Prefilling(35_000.0), [bound], 1, ThrottleRules()).share
        clock.steps(mean_s(share), WINDOW, share)
        return mean_s(share)

    settling = [window() for _ in range(400)]
    least_s = mean_s(rules.least_share)
    assert settling[-1] <= 1.01 * max(rules.margin * target_s, least_s)
    assert [window() for _ in range(50)] == pytest.approx([settling[-1]] * 50, rel=0.01)
    steps = [after - before for before, after in zip(settling, settling[1:], strict=False)]
    assert max(steps) < 1e-12 or min(steps) > -1e-12, "from one side, never over it and back"


def test_steps_reported_together_count_like_as_many_reported_one_by_one():
    together, apart = Clock(), Clock()
    for share in (0.0, 0.5):
        apart.steps(0.012, 40, share=share)
        together.now += 40 * 0.012
        together.others_s += share * 40 * 0.012
        together.beat.step(together.now, together.others_s, steps=40)
    apart.steps(0.012, 30, share=0.5)
    together.now += 30 * 0.012
    together.others_s += 0.5 * 30 * 0.012
    together.beat.step(together.now, together.others_s, steps=30)
    assert together.beat.step_s == pytest.approx(apart.beat.step_s)
    assert together.beat.loss == pytest.approx(apart.beat.loss) and apart.beat.loss != LOSS
