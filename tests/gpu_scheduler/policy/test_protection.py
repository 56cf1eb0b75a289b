import pytest

from gpu_scheduler.policy.beat import WINDOW
from gpu_scheduler.policy.pace import FREE
from gpu_scheduler.policy.protection import Protection


@pytest.fixture
def group():
    group = Protection()
    for model in "abc":
        group.measured(model, 35_000.0, 0.008)
    return group


def paces(group):
    return {model: pace for model, (pace, _) in group.paces().items()}


def test_nobody_is_held_while_nobody_decodes(group):
    assert group.paces() == {model: (FREE, 1.0) for model in "abc"}


def test_a_model_is_held_for_its_neighbours_decodes_and_not_for_its_own(group):
    group.decodes("a", "r1", 0.016)
    found = paces(group)
    assert found["a"] == FREE and found["b"] == found["c"] != FREE


def test_the_tightest_target_of_a_model_counts_until_its_request_ends(group):
    group.decodes("a", "loose", 0.016)
    loose = paces(group)["b"]
    group.decodes("a", "tight", 0.015)
    assert paces(group)["b"].chunk_tokens < loose.chunk_tokens
    group.ended("a", "tight")
    group.ended("a", "never began")
    assert paces(group)["b"] == loose
    group.ended("a", "loose")
    assert paces(group)["b"] == FREE


def test_where_two_may_prefill_at_once_each_gets_half(group):
    group.decodes("a", "r1", 0.021)
    group.prefills({"b"})
    alone = paces(group)["b"]
    group.prefills({"b", "c"})
    assert 128 < paces(group)["b"].chunk_tokens == alone.chunk_tokens // 2


def test_steps_are_judged_by_the_target_they_were_made_under(group):
    group.decodes("a", "r1", 0.018)
    before = paces(group)["b"]
    group.prefills({"b"})
    for step in range(WINDOW + 1):
        group.step("a", 0.020 * step)
    assert paces(group)["b"].chunk_tokens < before.chunk_tokens
    group.step("b", 1.0)  # of a model that decodes nothing: its first token, or none of ours


def test_what_was_measured_anew_holds_from_then_on(group):
    group.decodes("a", "r1", 0.016)
    group.measured("a", 35_000.0, 0.004)
    assert paces(group)["b"] == FREE
