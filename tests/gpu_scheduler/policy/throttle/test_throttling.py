import pytest

from gpu_scheduler.engines.sharing.throttle import FREE, PrefillThrottle
from gpu_scheduler.policy.throttle.interference import WINDOW
from gpu_scheduler.policy.throttle.throttling import ThrottleController


@pytest.fixture
def group():
    group = ThrottleController()
    for model in "abc":
        group.measured(model, 35_000.0, 0.008)
    return group


def test_throttles_of_all_models_are_free_while_none_decodes(group):
    assert group.throttles() == dict.fromkeys("abc", FREE)


def test_throttle_of_a_model_is_for_its_neighbours_decodes_and_not_for_its_own(group):
    group.decodes("a", "r1", 0.016)
    found = group.throttles()
    assert found["a"] == FREE and found["b"] == found["c"] != FREE


def test_the_tightest_target_of_a_model_counts_until_its_request_ends(group):
    group.decodes("a", "loose", 0.016)
    loose = group.throttles()["b"]
    group.decodes("a", "tight", 0.015)
    assert group.throttles()["b"].pause_ratio > loose.pause_ratio
    group.ended("a", "tight")
    group.ended("a", "never began")
    assert group.throttles()["b"] == loose
    group.ended("a", "loose")
    assert group.throttles()["b"] == FREE


def test_engine_has_the_tightest_target_of_its_requests_before_any_decodes(group):
    group.started("a", "r1", 0.050)
    group.started("a", "r2", 0.020)
    near = pytest.approx(0.018)
    assert group.throttles() == {"a": PrefillThrottle(step_s=near), "b": FREE, "c": FREE}
    group.decodes("a", "r2", 0.020)
    assert group.throttles()["a"].step_s == pytest.approx(0.018)
    group.ended("a", "r2")
    assert group.throttles()["a"].step_s == pytest.approx(0.045)
    group.ended("a", "r1")
    assert group.throttles()["a"] == FREE


def test_target_that_no_step_keeps_does_not_count_where_there_is_another(group):
    group.started("a", "r1", 0.050)
    group.started("a", "impossible", 1e-6)
    assert group.throttles()["a"].step_s == pytest.approx(0.045)
    group.ended("a", "r1")
    assert group.throttles()["a"].step_s == pytest.approx(0.9e-6), "where there is no other"


def test_step_seen_to_be_quicker_than_measured_brings_its_target_within_reach(group):
    """Others had the devices when the model was measured."""
    group.measured("a", 35_000.0, 0.040)
    group.started("a", "tight", 0.020)
    group.started("a", "loose", 0.050)
    assert group.throttles()["a"].step_s == pytest.approx(0.045), "20 ms seem out of reach"
    group.decodes("a", "tight", 0.020)
    for step in range(9):
        group.step("a", 0.010 * step)
    assert group.throttles()["a"].step_s == pytest.approx(0.018)


def test_engine_with_a_target_is_urgent_while_late_requests_of_its_model_wait(group):
    group.started("a", "r1", 0.050)
    group.started("b", "r2", 0.050)
    assert [group.throttles(late=["a", "c"])[name].urgent for name in "abc"] == [True, False, False]


def test_throttle_of_an_engine_is_for_its_neighbours_and_its_own_decodes_at_once(group):
    group.decodes("a", "r1", 0.016)
    neighbours = group.throttles()["b"]
    group.started("b", "r2", 0.020)
    both = group.throttles()["b"]
    assert (both.chunk_tokens, both.pause_ratio) == (neighbours.chunk_tokens, neighbours.pause_ratio)
    assert both.step_s == pytest.approx(0.018)


def test_prefills_of_two_models_at_once_get_half_of_the_time_each(group):
    group.decodes("a", "r1", 0.014)
    group.prefills({"b"}, 0.0)
    alone = group.throttles()["b"]
    group.prefills({"b", "c"}, 1.0)
    assert group.throttles()["b"].share == pytest.approx(alone.share / 2)


def slow_steps(group, begin_s, count=WINDOW + 1):
    for step in range(count):
        group.step("a", begin_s + 0.030 * step)


def test_steps_that_are_slower_beside_a_prefill_than_was_thought_lengthen_the_pauses(group):
    group.decodes("a", "r1", 0.018)
    before = group.throttles()["b"]
    group.prefills({"b"}, 0.0)
    slow_steps(group, 0.0)
    assert group.throttles()["b"].pause_ratio > before.pause_ratio
    group.step("b", 9.0)  # of a model that decodes nothing: its first token, or none of ours


def test_slow_steps_without_a_neighbours_prefill_count_as_steps_alone(group):
    group.decodes("a", "r1", 0.064)
    group.prefills({"b"}, 0.0)
    group.prefills((), 1.0)
    slow_steps(group, 2.0)
    assert group.throttles()["b"] != FREE, "a step takes 30 ms"


class Decodes:
    """Steps of model a, one after the other, each of 8 ms of work."""

    def __init__(self, group):
        self.group, self.now, self.left_s = group, 0.0, 0.008
        group.decodes("a", "r1", 0.016)
        group.step("a", 0.0)

    def go_on(self, seconds, slowdown=1.0):
        end = self.now + seconds
        while self.now + self.left_s * slowdown <= end:
            self.now += self.left_s * slowdown
            self.group.step("a", self.now)
            self.left_s = 0.008
        self.left_s -= (end - self.now) / slowdown
        self.now = end


@pytest.mark.parametrize("steps_of_a_prompt", [1, 10])
def test_loss_of_a_step_is_seen_alike_beside_short_prompts_and_long_ones(group, steps_of_a_prompt):
    decodes = Decodes(group)
    throttle = group.throttles()["b"]
    work_s = 2 * throttle.chunk_tokens / 35_000
    for _ in range(40):
        group.prefills({"b"}, decodes.now)
        for step in range(steps_of_a_prompt):
            if step > 0:
                decodes.go_on(throttle.pause_ratio * work_s)
            decodes.go_on(work_s, slowdown=2.4)
        group.prefills((), decodes.now)
        decodes.go_on(0.1)
    assert group.throttles()["b"].pause_ratio == pytest.approx(throttle.pause_ratio, rel=0.02)


def test_step_time_measured_anew_holds_from_then_on(group):
    group.decodes("a", "r1", 0.016)
    group.measured("a", 35_000.0, 0.004)
    assert group.throttles()["b"] == FREE


def test_pauses_for_neighbours_end_while_first_tokens_are_late_and_own_decodes_keep_theirs(group):
    group.started("a", "r1", 0.016)
    group.decodes("a", "r1", 0.016)
    own = group.throttles()["a"]
    assert group.throttles()["b"].pause_ratio > 0
    assert group.throttles(pressed=True) == {"a": own, "b": FREE, "c": FREE}
    assert group.throttles()["b"].pause_ratio > 0


def test_engine_whose_requests_its_pauses_would_make_late_makes_none(group):
    group.decodes("a", "r1", 0.016)
    paced, asked = group.throttles()["b"], []

    def late_by(model, slowdown):
        asked.append((model, slowdown))
        return model == "b"

    found = group.throttles(late_by=late_by)
    assert found == {"a": FREE, "b": PrefillThrottle(paced.chunk_tokens), "c": paced}
    assert asked == [("b", paced.slowdown), ("c", paced.slowdown)], "of the others there are none"
    assert group.throttles()["b"] == paced
