"""What comes of moves."""

import pytest

from placement.policy.assignment.moves import Move
from placement.policy.assignment.rounds import Outlook
from placement.policy.kvpr import Device, Group, Model, Place


def at(name):
    return Place(name, (name,))


def move(model, source, target):
    return Move(model, at(source), at(target))


def outlook(*booked, capacity=100):
    """`booked`: name, device, demand, weights, floor."""
    groups = [Group(name, (Device(name, capacity),)) for name in "ABCDE"]
    return Outlook(groups, [(Model(name, float(w), weights, floor), at(on)) for name, on, w, weights, floor in booked])


def test_outlook_is_better_after_a_move_that_relieves_the_most_pressed_device_involved():
    """A: 90 / 50 = 1.8, then 60 / 75 = 0.8; B: nothing, then 30 / 75 = 0.4."""
    found = outlook(("a", "A", 60, 25, 0), ("b", "A", 30, 25, 0))
    found.make([move("b", "A", "B")])
    assert found.better(0.2)
    assert found.better(0.5) and not found.better(0.6)
    found.make([move("b", "B", "A")])
    assert not found.better(0.0), "all is as it was"


def test_outlook_of_two_linked_moves_is_better_only_after_the_last():
    """B would have 0.65 in between, where A had 0.5: at the end the two have 0.33 and 0.3."""
    found = outlook(
        ("a", "A", 60, 200, 0), ("d", "A", 90, 500, 0), ("b", "B", 10, 200, 0), ("c", "B", 60, 400, 0), capacity=1000
    )
    found.make([move("a", "A", "B")])
    assert not found.better(0.2)
    found.make([move("b", "B", "A")])
    assert found.better(0.2)


def test_outlook_judges_moves_that_share_no_device_separately():
    """What C and D gain is no reason for what A loses to B."""
    worse, better, onward = move("a", "A", "B"), move("c", "C", "D"), move("b", "B", "E")
    found = outlook(*(("a", "A", 60, 25, 0), ("b", "B", 60, 25, 0)), *(("c", "C", 60, 25, 0), ("d", "C", 60, 25, 0)))
    found.make([worse])
    found.make([better])
    assert not found.better(0.2, worse) and found.better(0.2, better)
    assert found.with_it(better) == [better]
    found.make([onward])
    assert found.with_it(worse) == found.with_it(onward) == [worse, onward]
    assert found.with_it(better) == [better]


def test_outlook_joins_two_moves_by_a_third_between_their_devices():
    first, second, third = move("a", "A", "B"), move("c", "C", "D"), move("b", "B", "C")
    found = outlook(("a", "A", 10, 10, 0), ("b", "B", 10, 10, 0), ("c", "C", 10, 10, 0))
    found.make([first, second, third])
    assert set(found.with_it(first)) == {first, second, third}
    assert found.with_it(first)[-1] == third


@pytest.mark.parametrize(("floor", "better"), [(80, True), (0, False)])
def test_outlook_counts_missing_bytes_of_floors_before_any_pressure(floor, better):
    """b brings B more pressure than A had; but with its floor A has less than it promised."""
    found = outlook(("a", "A", 10, 30, 0), ("b", "A", 10, 10, floor), ("c", "B", 60, 9, 0))
    found.make([move("b", "A", "B")])
    assert found.better(0.2) is better


def test_outlook_moves_the_active_place_of_a_model_that_also_sleeps_elsewhere():
    groups = [Group(name, (Device(name, 100),)) for name in "AB"]
    model = Model("a", 60.0, 50, quota=10)
    found = Outlook(groups, [(model.asleep(), at("B")), (model, at("A")), (Model("b", 30.0, 20), at("A"))])
    found.make([move("a", "A", "B")])
    assert found.better(0.0)
