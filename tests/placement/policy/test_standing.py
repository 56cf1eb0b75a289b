"""One model at a time, against Algorithm 1 over the whole cluster with everybody else booked."""

import random
from dataclasses import replace

import pytest

from benchmarks._optimum import FAMILIES, draw_instance
from placement.policy.assign import AssignRules, Candidate, Kind, assign
from placement.policy.kvpr import Device, Group, Model, Place
from placement.policy.standing import Standing

RULES = AssignRules(improve_steps=0)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_it_decides_as_an_assignment_with_all_others_booked(family):
    draw = random.Random(3)
    moved = 0
    for _ in range(5):
        instance = draw_instance(family, draw)
        models = {model.name: model for model in instance.models}
        places = dict(assign(instance.groups, [Candidate(m) for m in models.values()], 0.0).places)
        standing = Standing(instance.groups, [(models[name], place) for name, place in places.items()])
        for _ in range(20):
            name = draw.choice(sorted(models))
            models[name] = replace(models[name], demand=models[name].parts * draw.uniform(1.0, 900.0))
            if draw.random() < 0.2:
                standing.remove(name)
                places.pop(name, None)
            assert standing.place(name) == places.get(name)
            candidate = Candidate(models[name], places.get(name))
            others = [(models[other], place) for other, place in places.items() if other != name]
            expected = assign(instance.groups, [candidate], 0.0, RULES, others).reasons[name]
            reason = standing.decide(candidate, 0.0, RULES)
            assert reason.kind is expected.kind
            assert reason.pressure == pytest.approx(expected.pressure)  # places of equal pressure are equally good
            places.pop(name, None)
            if reason.place is not None:
                places[name] = reason.place
            moved += reason.kind is Kind.MOVES
    assert moved


def test_it_keeps_to_cool_down_and_pins_and_forgets_what_left():
    groups = [Group(name, (Device(name, 100),)) for name in "AB"]
    a, b = Place("A", ("A",)), Place("B", ("B",))
    standing = Standing(groups, [(Model("m", 50.0, 10), a), (Model("n", 50.0, 10), a)])
    cooling = Candidate(Model("m", 90.0, 10), a, moved_at=70.0)
    assert standing.decide(cooling, 100.0).kind is Kind.COOLING
    assert standing.decide(Candidate(Model("m", 90.0, 10, pinned=True), a), 200.0).kind is Kind.PINNED
    assert standing.decide(cooling, 200.0).place == b
    standing.remove("m")
    standing.remove("never here")
    assert standing.place("m") is None
    assert standing.decide(Candidate(Model("large", 1.0, 95)), 200.0).place == b
    assert standing.decide(Candidate(Model("larger", 1.0, 95)), 200.0).kind is Kind.UNPLACED
