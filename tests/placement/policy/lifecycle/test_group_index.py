"""The few groups that are tried against all of them, and what is kept against what is made anew."""

import random
from dataclasses import replace
from math import inf

import pytest

from placement.policy.kvpr import Device, Group, Model, Place
from placement.policy.lifecycle.activation_plan import attempt, chosen, lack
from placement.policy.lifecycle.decisions import Activate, LifecycleRules, PlacedModel, Wait
from placement.policy.lifecycle.group_index import TRIES, GroupIndex, index_groups
from placement.policy.lifecycle.refusal import could_hold

RULES = [
    LifecycleRules(),
    LifecycleRules(explain=1, tau=0.0),
    LifecycleRules(hibernate=False),
    LifecycleRules(exclusive=True),
]


def group(i, size, draw):
    devices = (Device(f"g{i}/{d}", draw.choice([80, 100, 120]), draw.choice([0.0, 0.04])) for d in range(size))
    return Group(f"g{i}", tuple(devices), draw.choice([inf, inf, 1, 2, 3]))


def on(group, name, draw):
    parts = draw.choice([1, len(group.devices)])
    model = Model(
        name,
        demand=draw.choice([1.0, draw.uniform(1.0, 500.0)]),
        weights=parts * draw.randint(5, 60),
        floor=draw.randint(0, 9),
        quota=draw.randint(0, 6),
        kept=2,
        pinned=draw.random() < 0.1,
        parts=parts,
    )
    names = tuple(device.name for device in group.devices)[: model.parts]
    facts = {"hibernating": draw.random() < 0.3, "idle_s": draw.choice([0.0, 50.0, draw.uniform(40.0, 900.0)])}
    return PlacedModel(model, Place(group.name, names), wake_s=draw.uniform(0.1, 2.0), **facts)


def cluster(draw, size):
    """Groups and what is on each; some models sleep on several, one of them "new"."""
    groups = [group(i, size, draw) for i in range(draw.randint(1, 14))]
    there = {}
    for each in groups:
        names = draw.sample(["new", *(f"m{i}" for i in range(40))], draw.randint(0, 4))
        found = [on(each, name, draw) for name in names]
        there[each.name] = [replace(r, hibernating=True) if r.model.name == "new" else r for r in found]
    return groups, there


def by_trying_all(model, groups, there, rules):
    able = [each for each in groups if could_hold(model, each)]
    found = [f for each in able if (f := attempt(model, each, there[each.name], rules)) is not None]
    if not found:
        return min((lack(model, each, there[each.name], rules)[0] for each in able), default=None)
    return chosen(model, found, len(found), rules)


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_group_index_decides_as_if_every_group_were_tried(rules, size):
    draw = random.Random(size)
    seen = set()
    for _ in range(150):
        groups, there = cluster(draw, size)
        parts = draw.choice([1, size])
        model = Model("new", draw.uniform(1.0, 300.0), parts * draw.randint(5, 90), 5, 3, parts=parts)
        best = by_trying_all(model, groups, there, rules)
        answer = index_groups(groups, [r for here in there.values() for r in here], rules).activate(model)
        seen.add((type(answer.outcome), bool(answer.evictions)))
        if isinstance(answer.outcome, Activate):
            if len(groups) > TRIES:  # a good one will do
                continue
            assert answer.outcome.pressure == best.outcome.pressure
            assert bool(answer.evictions) == bool(best.evictions)
            assert [o.pressure for o in answer.options] == [o.pressure for o in best.options]
        elif isinstance(answer.outcome, Wait):
            nearest = answer.outcome.reason.split("the nearest is ")[1].split(":")[0]
            at = next(each for each in groups if each.name == nearest)
            assert lack(model, at, there[nearest], rules)[0] == best
        else:
            assert best is None
    assert {(Activate, False), (Activate, True), (Wait, False)} <= seen


def test_group_index_updated_report_by_report_decides_as_one_made_afresh():
    draw = random.Random(7)
    kept = GroupIndex()
    groups, there = {}, {}
    for step in range(400):
        name = f"g{draw.randrange(12)}"
        if draw.random() < 0.1:
            groups.pop(name, None)
            there.pop(name, None)
            kept.lose(name)
        else:
            if name not in groups or draw.random() < 0.1:
                groups[name] = group(name[1:], 2, draw)
            there[name] = [on(groups[name], model, draw) for model in draw.sample(["new", "a", "b", "c", "d"], 3)]
            kept.hear(groups[name], there[name])
        model = Model("new" if step % 2 else "other", 50.0, draw.randint(5, 70), 5, 3)
        anew = index_groups(kept.groups, [r for each in kept.groups for r in there[each.name]])
        assert kept.activate(model) == anew.activate(model)
        assert kept.residents == anew.residents and len(kept) == len(groups)


def test_a_model_for_one_group_alone_comes_up_there_or_waits_for_it():
    groups = [Group(name, (Device(name, 100),)) for name in "AB"]
    hot = PlacedModel(Model("hot", 90.0, 60), Place("A", ("A",)))
    there = index_groups(groups, [hot])
    assert there.activate(Model("m", 1.0, 20), "A").outcome.place.group == "A"
    assert "the nearest is A" in there.activate(Model("m", 1.0, 50), "A").outcome.reason
    assert "100" in there.refused(Model("m", 1.0, 120), "B").reason and there.refused(Model("m", 1.0, 90), "B") is None


def test_activation_where_every_group_that_could_hold_the_model_is_closed_says_so_and_no_bytes():
    there = GroupIndex()
    there.hear(Group("A", (Device("a", 100),)), ())
    there.hear(Group("small", (Device("s", 10),)), ())
    outcome = there.activate(Model("m", 1.0, 50), closed=["A"]).outcome
    assert isinstance(outcome, Wait)
    assert outcome.reason.endswith("those that could hold it are reserved for other models, or have it")


def test_a_model_comes_up_where_an_engine_is_free_before_another_model_loses_its_own():
    groups = [Group("full", (Device("full", 100),), 1), Group("free", (Device("free", 95),), 1)]
    asleep = PlacedModel(Model("asleep", 1.0, 20, quota=1), Place("full", ("full",)), hibernating=True, idle_s=90.0)
    answer = index_groups(groups, [asleep]).activate(Model("new", 1.0, 20))
    assert (answer.outcome.place.group, answer.evictions) == ("free", ())
    answer = index_groups(groups[:1], [asleep]).activate(Model("new", 1.0, 20))
    assert [type(e).__name__ + " " + e.model for e in answer.evictions] == ["GoCold asleep"]
    assert "an engine for new" in answer.evictions[0].reason
    assert not index_groups(groups[:1], [asleep]).activate(Model("asleep", 1.0, 20, quota=1)).evictions


def test_a_model_waits_where_all_engines_are_of_busy_models_and_its_reason_says_so():
    groups = [Group("g", (Device("g", 100),), 2)]
    busy = [PlacedModel(Model(name, 1.0, 10), Place("g", ("g",)), idle_s=0.0) for name in "ab"]
    answer = index_groups(groups, busy).activate(Model("new", 1.0, 20))
    assert "all its 2 engines have a model that is pinned or busy (engines.limit)" in answer.outcome.reason
    kept = index_groups(groups, [replace(r, stay_s=60.0) for r in busy]).keep(Model("new", 1.0, 20), 9.0, "g")
    assert [type(e).__name__ for e in kept.evictions] == ["GoCold"]


def test_group_index_among_equal_groups_evicts_the_longest_idle_model():
    groups = [Group(f"g{i}", (Device(f"g{i}", 100),)) for i in range(50)]
    idle = [
        PlacedModel(Model(f"m{i}", 1.0, 80), Place(f"g{i}", (f"g{i}",)), idle_s=50.0 + i * 7 % 50) for i in range(50)
    ]
    (eviction,) = index_groups(groups, idle).activate(Model("new", 1.0, 80)).evictions
    assert eviction.model == max(idle, key=lambda r: r.idle_s).model.name
