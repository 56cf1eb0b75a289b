from placement.policy.assign import assign
from placement.policy.decisions import Resident
from placement.policy.kvpr import Device, Group, Model, Place
from placement.policy.rebalance import RebalanceRules, rebalance

GROUPS = [Group(name, (Device(name, 1000),)) for name in "AB"]
RULES = RebalanceRules(least_pressure=0.05)


def resident(name, group, demand, hibernating=False):
    return Resident(Model(name, demand, weights=200), Place(group, (group,)), hibernating=hibernating)


def test_of_two_busy_models_on_one_group_one_moves_to_the_empty_one():
    (wanted,) = rebalance(GROUPS, [resident("a", "A", 90.0), resident("b", "A", 60.0)], {}, 100.0, RULES)
    assert wanted.move.source.group == "A" and wanted.move.target.group == "B"
    assert wanted.reason.stay_pressure > RULES.least_pressure


def test_below_the_least_pressure_nothing_moves():
    assert rebalance(GROUPS, [resident("a", "A", 9.0), resident("b", "A", 6.0)], {}, 100.0, RULES) == []


def test_a_model_that_would_bring_its_pressure_along_is_no_reason_to_look(monkeypatch):
    looked = []
    monkeypatch.setattr("placement.policy.rebalance.assign", lambda *given: looked.append(given) or assign(*given))
    small = Resident(Model("b", 1.0, weights=20), Place("A", ("A",)))
    rebalance(GROUPS, [resident("a", "A", 90.0), small], {}, 100.0, RULES)
    assert not looked
    rebalance(GROUPS, [resident("a", "A", 90.0), resident("b", "A", 60.0)], {}, 100.0, RULES)
    assert looked


def test_a_device_that_holds_more_than_it_has_is_looked_at_whatever_the_pressure_comes_from():
    floor = Resident(Model("b", 1.0, weights=200, floor=700), Place("A", ("A",)))
    (wanted,) = rebalance(GROUPS, [resident("a", "A", 90.0), floor], {}, 100.0, RULES)
    assert wanted.move.model in "ab"


def test_what_sleeps_does_not_move_and_one_group_has_nowhere_to_move_to():
    asleep = [resident("a", "A", 90.0, hibernating=True), resident("b", "A", 60.0, hibernating=True)]
    assert rebalance(GROUPS, asleep, {}, 100.0, RULES) == []
    assert rebalance(GROUPS[:1], [resident("a", "A", 90.0)], {}, 100.0, RULES) == []


def test_a_model_that_moved_lately_stays():
    busy = [resident("a", "A", 90.0), resident("b", "A", 60.0)]
    assert rebalance(GROUPS, busy, {"a": 99.0, "b": 99.0}, 100.0, RULES) == []


def test_a_model_without_its_share_of_the_demand_is_not_worth_a_move():
    busy = [resident("a", "A", 90.0), resident("b", "A", 60.0), resident("c", "A", 9.0)]
    moved = {w.move.model for w in rebalance(GROUPS, busy, {"a": 99.0, "b": 99.0}, 100.0, RULES)}
    assert moved == set()
    (wanted,) = rebalance(GROUPS, busy, {"a": 99.0, "b": 99.0}, 100.0, RebalanceRules(least_share=0.05))
    assert wanted.move.model == "c"


def test_a_model_that_nobody_asks_for_neither_moves_nor_is_in_the_way():
    busy = [resident("a", "A", 90.0), resident("b", "A", 60.0)]
    quiet = Resident(Model("quiet", 1.0, weights=900), Place("B", ("B",)), idle_s=30.0)
    (wanted,) = rebalance(GROUPS, [*busy, quiet], {}, 100.0, RULES)
    assert wanted.move.target.group == "B"
    awake = Resident(quiet.model, quiet.place)
    assert rebalance(GROUPS, [*busy, awake], {}, 100.0, RULES) == []
