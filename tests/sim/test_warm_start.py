"""A simulated fleet that begins with the traffic of the hour before."""

from itertools import permutations

import pytest

from placement.policy.traffic import ExpectedTraffic
from sim.inputs.request import SimulatedRequest
from tests.sim.worlds import models, replay

RATES = {"a": 50.0, "b": 40.0, "c": 30.0, "d": 20.0}


def places(order, expected=None):
    """Group of each model after one request for each, a minute apart."""
    requests = [SimulatedRequest(name, name, 60.0 * i, 10, 2) for i, name in enumerate(order)]
    outcome = replay(requests, models(*RATES), sizes=(1, 1), expected=expected or {})
    return {name: group.name for group in outcome.system.groups for name in group.active}


@pytest.fixture
def expected():
    return {name: ExpectedTraffic(rate, 0.01) for name, rate in RATES.items()}


def test_places_with_the_traffic_of_the_hour_before_are_the_same_in_whatever_order_models_come_up(expected):
    found = [places(order, expected) for order in permutations(RATES)]
    assert found[0]["a"] == found[0]["d"] != found[0]["b"] == found[0]["c"]
    assert all(each == found[0] for each in found)


def test_places_without_it_depend_on_the_order():
    assert len({tuple(sorted(places(order).items())) for order in permutations(RATES)}) > 1
