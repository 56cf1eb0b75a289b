"""Whether a move brings more than it costs."""

import pytest

from placement.policy.assignment.moves import Move
from placement.policy.assignment.worth import is_worth, late_by_waking
from placement.policy.kvpr import Model, Place
from placement.policy.lifecycle.decisions import PlacedModel
from placement.policy.outcomes import Outcomes

A, B = Place("A", ("A",)), Place("B", ("B",))
MOVE = Move("a", A, B)
SLEEPER = PlacedModel(Model("s"), B, idle_s=30.0, wake_s=0.3, cold_s=4.0, ttft_s=0.2)
RESIDENTS = [PlacedModel(Model("a"), A), SLEEPER]


@pytest.mark.parametrize(
    ("missed", "returns", "leaving", "worth"), [(9, 1, "s", True), (1, 4, "s", False), (1, 4, "", True)]
)
def test_move_is_worth_it_if_more_targets_are_missed_than_sleepers_return(missed, returns, leaving, worth):
    outcomes = Outcomes()
    outcomes.observe("a", 100.0, missed=missed)
    outcomes.observe("s", 100.0, returns=returns)
    assert is_worth(MOVE, leaving, RESIDENTS, outcomes, 100.0) is worth


def test_move_for_memory_is_worth_it_though_nobody_misses_a_target():
    outcomes = Outcomes()
    outcomes.observe("s", 100.0, returns=4)
    assert is_worth(MOVE, "s", RESIDENTS, outcomes, 100.0)


@pytest.mark.parametrize(
    ("ttft_s", "has_image", "late"), [(0.2, True, 1.0), (3.0, True, 0.1), (8.0, False, 0.5), (0.0, True, 0.0)]
)
def test_waking_makes_a_request_late_by_its_part_of_the_target(ttft_s, has_image, late):
    sleeper = PlacedModel(Model("s"), B, wake_s=0.3, cold_s=4.0, ttft_s=ttft_s, has_image=has_image)
    assert late_by_waking(sleeper) == pytest.approx(late)
