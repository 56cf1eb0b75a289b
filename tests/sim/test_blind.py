"""Fixed places without rates: the largest models first, equal memory, and what is refused."""

from dataclasses import replace

import pytest

from placement.policy.kvpr import Device, Group, Model
from sim.inputs.request import SimulatedRequest
from sim.policies.blind import by_size
from sim.system import FleetError
from tests.sim.worlds import GB, ROUND, models, replay

GROUPS = [Group(name, (Device(f"{name}/0", 100),)) for name in ("g0", "g1")]


def test_blind_places_balance_bytes_and_divide_memory_equally_above_floors():
    wanted = [
        Model(name, demand, weights, floor)
        for name, demand, weights, floor in (
            ("large", 1.0, 60, 5),
            ("middle", 1e9, 40, 5),
            ("small", 1e9, 20, 5),
            ("hungry", 1.0, 10, 25),
        )
    ]
    parts = by_size(GROUPS, wanted, seed=0)
    groups = {name: part.place.group for name, part in parts.items()}
    assert groups["large"] != groups["middle"] == groups["small"] and groups["hungry"] == groups["large"]
    # 100 - 60 - 10 leaves 30, and 15 are below the floor of one.
    assert parts["middle"].kv_bytes == parts["small"].kv_bytes == 20
    assert (parts["hungry"].kv_bytes, parts["large"].kv_bytes) == (25, 5)


def test_blind_places_of_equal_models_are_drawn():
    wanted = [Model(f"m{i}", weights=20, floor=1) for i in range(8)]
    drawn = [by_size(GROUPS, wanted, seed) for seed in range(4)]
    places = [{name: part.place.group for name, part in parts.items()} for parts in drawn]
    assert places[0] == {name: part.place.group for name, part in by_size(GROUPS, wanted[::-1], 0).items()}
    assert any(each != places[0] for each in places)


def test_model_without_room_is_left_out():
    assert set(by_size(GROUPS, [Model("a", weights=90), Model("b", weights=90), Model("c", weights=90)], 1)) < set(
        "abc"
    )


@pytest.mark.parametrize("policy", ["static", "muxserve"])
def test_blind_fleet_serves_and_a_seed_that_is_none_is_refused(policy):
    hardware = replace(ROUND, capacity_bytes=8 * GB, quota_bytes=0, graph_bytes=0, prefill_graph_bytes=0)
    requests = [SimulatedRequest(str(i), "ab"[i % 2], float(i), 100, 10) for i in range(4)]
    assert all(
        r.served
        for r in replay(requests, models("a", "b"), policy, settings={"blind": "3"}, hardware=hardware).trace.requests
    )
    with pytest.raises(FleetError, match=r"blind has to be a whole number, .* not 'x'"):
        replay(requests, models("a", "b"), policy, settings={"blind": "x"}, hardware=hardware)
