"""Dividing a few models between two places."""

from itertools import product
from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.policy.assignment.repartition import Side, divide, gather
from placement.policy.kvpr import Model


def side(*devices):
    """`devices`: demand, left, room, load of each."""
    return Side(*np.array(devices, dtype=float).T)


def empty(capacity, load=0.0):
    return side((0, capacity, capacity, load))


A_MODEL = st.tuples(st.integers(0, 40), st.integers(1, 40), st.integers(0, 10))
A_DEVICE = st.tuples(st.integers(0, 20), st.integers(20, 100), st.integers(0, 5), st.sampled_from([0.0, 0.1]))


def pressure(devices, models):
    worst = 0.0
    for demand, left, floors, load in devices:
        room = left - floors - sum(m.needed for m in models)
        left -= sum(m.fixed for m in models)
        total = demand + sum(m.part_demand for m in models)
        worst = max(worst, inf if room < 0 or left <= 0 else total / left + total * load)
    return worst


@given(
    models=st.lists(A_MODEL, min_size=1, max_size=5),
    ones=st.lists(A_DEVICE, min_size=1, max_size=2),
    others=st.lists(A_DEVICE, min_size=1, max_size=2),
)
def test_divided_models_have_the_least_pressure_of_all_divisions(models, ones, others):
    made = [Model(f"m{i}", float(w), weights, floor) for i, (w, weights, floor) in enumerate(models)]
    one, other = (
        side(*((w, left, left - floors, load) for w, left, floors, load in given)) for given in (ones, others)
    )
    reached = {
        way: max(
            pressure(ones, [m for m, on in zip(made, way, strict=True) if on]),
            pressure(others, [m for m, on in zip(made, way, strict=True) if not on]),
        )
        for way in product((False, True), repeat=len(made))
    }
    found = divide(made, [False] * len(made), [False] * len(made), one, other, inf, inf)
    best = min(reached.values())
    if best == inf:
        assert found is None
    else:
        assert found is not None
        assert found.pressure == pytest.approx(best) == pytest.approx(reached[found.there])


def test_divided_active_model_moves_only_for_a_pressure_below_the_stricter_limit():
    """Apart they have 10 / 90 each, together 20 / 80 = 0.25."""
    models = [Model("a", 10.0, 10), Model("b", 10.0, 10)]
    together = [True, True]
    assert divide(models, together, [True, True], empty(100), empty(100), 0.25, 0.1) is None
    found = divide(models, together, [True, False], empty(100), empty(100), 0.25, 0.1)
    assert found is not None and found.there == (True, False)
    found = divide(models, together, [True, True], empty(100), empty(100), 0.25, 0.2)
    assert found is not None and sum(found.there) == 1


def test_division_among_equals_is_the_one_that_moves_the_fewest_models():
    models = [Model("a", 10.0, 10), Model("b", 10.0, 10), Model("c", 1.0, 10)]
    found = divide(models, [True, True, False], [True] * 3, empty(100), empty(100), 1.0, 1.0)
    assert found is not None and sum(a != b for a, b in zip(found.there, (True, True, False), strict=True)) == 1


@given(st.lists(A_MODEL, min_size=1, max_size=6), st.integers(20, 120), st.integers(20, 120))
def test_gathered_models_leave_the_one_side_the_most_room_of_all_divisions(models, one, other):
    made = [Model(f"m{i}", float(w), weights, floor) for i, (w, weights, floor) in enumerate(models)]

    def room(way):
        on, off = ([m for m, is_on in zip(made, way, strict=True) if is_on is wanted] for wanted in (True, False))
        fit = pressure([(0, one, 0, 0)], on) < inf and pressure([(0, other, 0, 0)], off) < inf
        return one - sum(m.needed for m in on) if fit else -1

    best = max(map(room, product((False, True), repeat=len(made))))
    found = gather(made, empty(one), empty(other))
    assert found is None if best < 0 else room(found) == best
