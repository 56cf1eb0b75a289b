from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from placement.policy.assignment.assign import Candidate, ModelKind, Reason, assign
from placement.policy.assignment.moves import Move
from placement.policy.assignment.rebalance import NONE, RebalanceRules, Round, WantedMove, rebalance
from placement.policy.kvpr import Device, Group, Model, Place
from placement.policy.lifecycle.decisions import PlacedModel
from placement.policy.outcomes import LATELY_S, Outcomes

GROUPS = [Group(name, (Device(name, 1000),)) for name in "AB"]
RULES = RebalanceRules()


def begin(*given):
    """What of the round that is wanted can begin now."""
    return list(rebalance(*given).begin)


def resident(name, group, demand, hibernating=False):
    return PlacedModel(Model(name, demand, weights=200), Place(group, (group,)), hibernating=hibernating)


def test_rebalance_moves_one_of_two_busy_models_to_an_empty_group():
    (wanted,) = begin(GROUPS, [resident("a", "A", 90.0), resident("b", "A", 60.0)], {}, 100.0, RULES)
    assert wanted.move.source.group == "A" and wanted.move.target.group == "B"


def test_rebalance_makes_no_assignment_where_a_move_would_take_the_pressure_along(monkeypatch):
    looked = []
    monkeypatch.setattr(
        "placement.policy.assignment.rebalance.assign", lambda *given: looked.append(given) or assign(*given)
    )
    small = PlacedModel(Model("b", 1.0, weights=20), Place("A", ("A",)))
    rebalance(GROUPS, [resident("a", "A", 90.0), small], {}, 100.0, RULES)
    assert not looked
    rebalance(GROUPS, [resident("a", "A", 90.0), resident("b", "A", 60.0)], {}, 100.0, RULES)
    assert looked


def test_rebalance_relieves_an_overbooked_device_whatever_causes_its_pressure():
    floor = PlacedModel(Model("b", 1.0, weights=200, floor=700), Place("A", ("A",)))
    (wanted,) = begin(GROUPS, [resident("a", "A", 90.0), floor], {}, 100.0, RULES)
    assert wanted.move.model in "ab"


def test_rebalance_of_sleeping_models_or_of_one_group_moves_no_model():
    asleep = [resident("a", "A", 90.0, hibernating=True), resident("b", "A", 60.0, hibernating=True)]
    assert begin(GROUPS, asleep, {}, 100.0, RULES) == []
    assert begin(GROUPS[:1], [resident("a", "A", 90.0)], {}, 100.0, RULES) == []


def test_rebalance_leaves_a_model_that_moved_lately():
    busy = [resident("a", "A", 90.0), resident("b", "A", 60.0)]
    assert begin(GROUPS, busy, {"a": 99.0, "b": 99.0}, 100.0, RULES) == []


def test_rebalance_leaves_a_model_with_a_small_share_of_the_demand():
    busy = [resident("a", "A", 90.0), resident("b", "A", 60.0), resident("c", "A", 9.0)]
    moved = {w.move.model for w in begin(GROUPS, busy, {"a": 99.0, "b": 99.0}, 100.0, RULES)}
    assert moved == set()
    (wanted,) = begin(GROUPS, busy, {"a": 99.0, "b": 99.0}, 100.0, RebalanceRules(least_share=0.05))
    assert wanted.move.model == "c"


def test_rebalance_ignores_an_idle_model_on_the_target():
    busy = [resident("a", "A", 90.0), resident("b", "A", 60.0)]
    quiet = PlacedModel(Model("quiet", 1.0, weights=900), Place("B", ("B",)), idle_s=30.0)
    (wanted,) = begin(GROUPS, [*busy, quiet], {}, 100.0, RULES)
    assert wanted.move.target.group == "B"
    awake = PlacedModel(quiet.model, quiet.place)
    assert begin(GROUPS, [*busy, awake], {}, 100.0, RULES) == []


# --- rounds: a and b are to change places; between the two moves B has 130 / 200 = 0.65, where A had 150 / 300 = 0.5

FACTS = {"a": (60.0, 200), "b": (10.0, 200), "c": (60.0, 400), "d": (90.0, 500)}
BEFORE = {"a": "A", "b": "B", "c": "B", "d": "A"}
HALFWAY = BEFORE | {"a": "B"}


def where(places, demands=None, asleep=()):
    facts = {name: ((demands or {}).get(name, demand), weights) for name, (demand, weights) in FACTS.items()}
    return [
        PlacedModel(Model(name, *facts[name]), Place(group, (group,)), hibernating=name in asleep)
        for name, group in places.items()
    ]


def models(wanted):
    return [each.move.model for each in wanted]


def test_round_of_two_moves_begins_them_one_after_the_other():
    found = rebalance(GROUPS, where(BEFORE), {}, 100.0, RULES)
    assert models(found.moves) == ["a", "b"] and models(found.begin) == ["a"]
    then = rebalance(GROUPS, where(HALFWAY), {"a": 100.0}, 110.0, RULES, found)
    assert models(then.begin) == ["b"] and then.moves == found.moves
    after = HALFWAY | {"b": "A"}
    assert rebalance(GROUPS, where(after), {"a": 100.0, "b": 110.0}, 300.0, RULES, then) == NONE


def test_round_that_is_not_remembered_is_moved_back_after_the_cool_down():
    assert rebalance(GROUPS, where(HALFWAY), {"a": 100.0}, 110.0, RULES) == NONE
    assert models(rebalance(GROUPS, where(HALFWAY), {"a": 100.0}, 200.0, RULES).begin) == ["a"]


@pytest.mark.parametrize(
    ("why", "residents", "moved_at"),
    [
        ("nothing of it was done", where(BEFORE, {"a": 10.0}), {}),
        ("nobody is better off by the rest", where(HALFWAY, {"d": 300.0}), {"a": 100.0}),
        ("who was to move is asleep", where(HALFWAY, asleep="b"), {"a": 100.0}),
        ("it has not gone on for long", where(HALFWAY), {"a": 60.0}),
    ],
)
def test_round_ends_early_when_its_reason_is_gone(why, residents, moved_at):
    found = rebalance(GROUPS, where(BEFORE), {}, 50.0, RULES)
    assert models(rebalance(GROUPS, residents, moved_at, 110.0, RULES, found).begin) != ["b"]


def test_round_waits_for_a_cooling_model_and_for_room():
    """The target of b could not start it, and it is tried again in 5 s; the source of a has not said that it let go."""
    found = rebalance(GROUPS, where(BEFORE), {}, 100.0, RULES)
    failed = {"a": 100.0, "b": 110.0 + 5.0 - RULES.moves.cool_down_s}
    then = rebalance(GROUPS, where(HALFWAY), failed, 110.0, RULES, found)
    assert then == Round(found.moves)
    assert models(rebalance(GROUPS, where(HALFWAY), failed, 116.0, RULES, then).begin) == ["b"]
    tight = [Group("A", (Device("A", 890),)), Group("B", (Device("B", 1000),))]
    both = [*where(BEFORE), *where({"a": "B"})]
    then = rebalance(tight, both, {"a": 100.0}, 102.0, RULES, found)
    assert then == Round(found.moves)
    assert models(rebalance(tight, where(HALFWAY), {"a": 100.0}, 103.0, RULES, then).begin) == ["b"]


def test_a_round_whose_target_is_gone_ends():
    three = [*GROUPS, Group("C", (Device("C", 1000),))]
    found = Round(
        tuple(
            WantedMove(
                Move(name, Place(source, (source,)), Place(target, (target,))), Reason(ModelKind.MOVES, name, None, 1.0)
            )
            for name, source, target in (("a", "A", "B"), ("b", "B", "C"))
        )
    )
    assert models(rebalance(three, where(HALFWAY), {"a": 100.0}, 110.0, RULES, found).begin) == ["b"]
    assert rebalance(GROUPS, where(HALFWAY), {"a": 100.0}, 110.0, RULES, found) == NONE


def test_round_that_cannot_be_finished_is_not_begun():
    """a and b of which neither finds room beside the other."""
    full = {"a": (60.0, 300), "b": (10.0, 300), "c": (60.0, 500), "d": (90.0, 600)}
    residents = [PlacedModel(Model(name, *full[name]), Place(BEFORE[name], (BEFORE[name],))) for name in full]
    target = assign(GROUPS, [Candidate(r.model, r.place) for r in residents], 100.0).places
    assert {name for name, place in target.items() if place.group != BEFORE[name]} == {"a", "b"}
    assert rebalance(GROUPS, residents, {}, 100.0, RULES) == NONE


def test_rebalance_makes_a_single_helpful_move_where_no_round_can_be_finished():
    """Many pairs whose exchange brings nothing come first by demand, and two models that share a device last."""
    pairs, groups, residents = 40, [], []
    for i in range(pairs):
        for side, capacity, demand in (("A", 1000, 100.0), ("B", 1300, 99.0)):
            name = f"{side}{i}"
            groups.append(Group(name, (Device(name, capacity),)))
            residents.append(PlacedModel(Model(name.lower(), demand, 600), Place(name, (name,))))
    groups += [Group(name, (Device(name, 100),)) for name in "CD"]
    residents += [PlacedModel(Model(name, 10.0, 45), Place("C", ("C",))) for name in ("x", "y")]
    rules = RebalanceRules(least_share=0.0)
    wanted = rebalance(groups, residents, {}, 100.0, rules)
    assert models(wanted.begin) in (["x"], ["y"])
    assert rebalance(groups, residents, {"x": 99.0, "y": 99.0}, 100.0, rules) == NONE


# --- nothing moves while nobody is late

PRESSED = [resident("a", "A", 90.0), resident("b", "A", 60.0)]


def late(*names, at=100.0):
    outcomes = Outcomes()
    for name in names:
        outcomes.observe(name, at, late=True, missed=1)
    return outcomes


def test_rebalance_moves_only_where_a_request_was_late_lately():
    assert begin(GROUPS, PRESSED, {}, 100.0, RULES, NONE, Outcomes()) == []
    assert len(begin(GROUPS, PRESSED, {}, 100.0, RULES, NONE, late("a"))) == 1
    assert begin(GROUPS, PRESSED, {}, 100.0 + LATELY_S, RULES, NONE, late("a")) == []
    as_in_the_paper = replace(RULES, first_do_no_harm=False)
    assert len(begin(GROUPS, PRESSED, {}, 100.0, as_in_the_paper, NONE, Outcomes())) == 1


def test_rebalance_moves_no_settled_model_for_lateness_but_does_for_memory():
    assert begin(GROUPS, PRESSED, {}, 100.0, RULES, NONE, late("a"), {"a", "b"}) == []
    (wanted,) = begin(GROUPS, PRESSED, {}, 100.0, RULES, NONE, late("a"), {"a"})
    assert wanted.move.model == "b"
    floor = PlacedModel(Model("b", 1.0, weights=200, floor=700), Place("A", ("A",)))
    overbooked = [resident("a", "A", 90.0), floor]
    assert len(begin(GROUPS, overbooked, {}, 100.0, RULES, NONE, late("a"), {"a", "b"})) == 1


def test_rebalance_leaves_a_group_alone_that_is_pressed_while_another_is_late():
    groups = [Group(name, (Device(name, 1000),)) for name in "ABC"]
    assert begin(groups, [*PRESSED, resident("c", "C", 1.0)], {}, 100.0, RULES, NONE, late("c")) == []


def test_rebalance_relieves_an_overbooked_device_though_nobody_is_late():
    floor = PlacedModel(Model("b", 1.0, weights=200, floor=700), Place("A", ("A",)))
    assert len(begin(GROUPS, [resident("a", "A", 90.0), floor], {}, 100.0, RULES, NONE, Outcomes())) == 1


@given(
    demands=st.lists(
        st.tuples(st.floats(0, 1e3), st.sampled_from("AB"), st.integers(1, 250), st.booleans()), max_size=7
    )
)
def test_rebalance_of_a_quiet_cluster_moves_no_model(demands):
    """Whatever the pressures are, and however often models return, as long as everything has its room."""
    residents = [
        PlacedModel(Model(str(i), demand, weights), Place(group, (group,)), hibernating=asleep, idle_s=float(asleep))
        for i, (demand, group, weights, asleep) in enumerate(demands)
    ]
    booked = {group: sum(r.booked.needed for r in residents if r.place.group == group) for group in "AB"}
    assume(max(booked.values()) <= 1000)
    outcomes = Outcomes()
    for r in residents:
        outcomes.observe(r.model.name, 99.0, returns=5)
    assert rebalance(GROUPS, residents, {}, 100.0, RULES, NONE, outcomes) == NONE


# --- models that return

RETURNING = PlacedModel(Model("s", 1.0, weights=650), Place("A", ("A",)), hibernating=True)


def test_models_move_so_that_one_that_returns_often_can_be_awake():
    """Beside a and b there is no room for s on A; B has room for either. It is no gain in pressure above tau."""
    residents = [resident("a", "A", 10.0), resident("b", "A", 10.0), RETURNING, resident("c", "B", 8.0)]
    rules = replace(RULES, least_share=0.0)
    outcomes = late("a")
    assert begin(GROUPS, residents, {}, 100.0, rules, NONE, outcomes) == []
    outcomes.observe("s", 100.0, returns=4)
    (wanted,) = begin(GROUPS, residents, {}, 100.0, rules, NONE, outcomes)
    assert wanted.move.source.group == "A" and wanted.move.model in "ab"


def test_models_do_not_move_for_one_that_returns_if_a_late_device_is_pressed_more():
    residents = [resident("a", "A", 50.0), resident("b", "A", 50.0), RETURNING, resident("c", "B", 90.0)]
    outcomes = late("a", "c")
    outcomes.observe("s", 100.0, returns=4)
    assert begin(GROUPS, residents, {}, 100.0, replace(RULES, least_share=0.0), NONE, outcomes) == []
