"""When a model may move again."""

import pytest

from placement.policy.assignment.cool_down import CoolDowns

COOL_DOWN_S = 30.0


def rests_s(cool_downs, model, now):
    """From now on, as the rule of a move has it: the cool-down after it moved."""
    return cool_downs.moved_at()[model] + COOL_DOWN_S - now


def test_cool_down_of_a_model_that_moved_is_the_configured_one():
    cool_downs = CoolDowns(COOL_DOWN_S)
    cool_downs.moved("m", now=100.0)
    assert rests_s(cool_downs, "m", 100.0) == 30


def test_cool_down_after_failed_moves_doubles_up_to_that_of_a_move():
    cool_downs, now, rests = CoolDowns(COOL_DOWN_S), 0.0, []
    for _ in range(5):
        cool_downs.not_moved("m", now)
        rests.append(rests_s(cool_downs, "m", now))
        now += rests[-1]
    assert rests == [5, 10, 20, 30, 30]


@pytest.mark.parametrize("what", ["it moved", "long ago"])
def test_cool_down_starts_anew_after_a_move_or_a_long_time_without_failures(what):
    cool_downs = CoolDowns(COOL_DOWN_S)
    cool_downs.not_moved("m", 0.0)
    cool_downs.not_moved("m", 5.0)
    if what == "it moved":
        cool_downs.moved("m", 15.0)
    cool_downs.not_moved("m", 4000.0)
    assert rests_s(cool_downs, "m", 4000.0) == 5


def test_cool_down_doubles_after_attempts_that_take_longer_than_itself():
    cool_downs, now, rests = CoolDowns(COOL_DOWN_S), 0.0, []
    for _ in range(4):
        now += 200.0
        cool_downs.not_moved("m", now)
        rests.append(rests_s(cool_downs, "m", now))
        now += rests[-1]
    assert rests == [5, 10, 20, 30]


def test_cool_down_after_thousands_of_failures_does_not_overflow():
    cool_downs = CoolDowns(COOL_DOWN_S)
    for number in range(5000):
        cool_downs.not_moved("m", 30.0 * number)
    assert rests_s(cool_downs, "m", 30.0 * 4999) == 30


def test_cool_downs_keep_no_state_of_models_that_rested_long_ago():
    cool_downs = CoolDowns(COOL_DOWN_S)
    for number in range(1000):
        cool_downs.not_moved(f"failed {number}", 2000.0 * number)
        cool_downs.moved(f"moved {number}", 2000.0 * number)
    assert len(cool_downs.moved_at()) <= 5
