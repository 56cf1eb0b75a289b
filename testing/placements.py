"""Placement's policy on instances of `optimum.py`: what Algorithm 1 and its rounds of moves come to, and the paper's
bound."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from math import inf

from placement.policy.assignment.assign import AssignRules, Candidate, assign
from placement.policy.assignment.moves import MoveRules
from placement.policy.assignment.rebalance import NONE, RebalanceRules, rebalance
from placement.policy.lifecycle.decisions import PlacedModel
from testing.optimum import Family


def placed(instance, rules=None, current=None):
    candidates = [Candidate(model, (current or {}).get(model.name)) for model in instance.models]
    return assign(instance.groups, candidates, 0.0, rules)


LOOSE = Family("bound", (2, 4), 1, (2, 3), (0.2, 0.8), 1.5)


def bound(instance, rule):
    """Algorithm 1 with tau = 0 on equal devices that hold one part each, by the paper's appendix: (what the devices
    come to, 1 + C / S) of the device with the most pressure, where S is what its last model left. None if some model
    did not fit onto some device when it chose: the proof needs that it did. `rule`: what a model compares."""
    capacity = instance.groups[0].devices[0].capacity
    demand, left, room = ([x] * len(instance.groups) for x in (0, capacity, capacity))
    least_left = [0] * len(instance.groups)
    for model in sorted(instance.models, key=lambda m: (-m.demand, m.name)):
        if any(free < model.needed for free in room):
            return None
        before = [Fraction(w, s) for w, s in zip(demand, left, strict=True)]
        after = [Fraction(w + int(model.demand), s - model.fixed) for w, s in zip(demand, left, strict=True)]
        d = min(range(len(left)), key=(before if rule == "before" else after).__getitem__)
        quiet = min(range(len(left)), key=before.__getitem__)
        demand[d] += int(model.demand)
        least_left[d] = left[quiet] - model.fixed
        left[d] -= model.fixed
        room[d] -= model.needed
    worst = max(range(len(left)), key=lambda d: Fraction(demand[d], left[d]))
    s = left[worst] if rule == "before" else least_left[worst]
    return Fraction(demand[worst], left[worst]), 1 + Fraction(capacity, s)


def elsewhere(instance, draw):
    """Places that suited other demands."""
    demands = [model.demand / model.parts for model in instance.models]
    draw.shuffle(demands)
    models = tuple(
        replace(model, demand=demand * model.parts) for model, demand in zip(instance.models, demands, strict=True)
    )
    return placed(replace(instance, models=models)).places


def still_moves(instance, places, tau, *, finish=True, cool_down=60.0, period=10.0, ticks=150):
    """As placement runs: every period it decides anew from where things are, and begins one move. Returns the moves,
    whether there are any in the second half of the time, and where things are at the end. `finish`: what was begun."""
    moved_at: dict[str, float] = {}
    moves, last, wanted = 0, 0.0, NONE
    rules = RebalanceRules(AssignRules(tau=tau, cool_down_s=cool_down), MoveRules(1, cool_down), least_share=0.0)
    for tick in range(ticks):
        now = tick * period
        if now - last > cool_down + period:
            break  # nothing cools down, and nothing moved: the next round has the same to decide
        residents = [PlacedModel(model, places[model.name]) for model in instance.models]
        wanted = rebalance(instance.groups, residents, moved_at, now, rules, wanted if finish else NONE)
        for move in [each.move for each in wanted.begin]:
            assert now - moved_at.get(move.model, -inf) >= cool_down
            places = {**places, move.model: move.target}
            moved_at[move.model] = last = now
            moves += 1
    return moves, last > ticks * period / 2, places
