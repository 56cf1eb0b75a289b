from math import inf

import pytest

from placement.view import cluster_view, prospect_view
from prismctl.system.coming_up import far
from protos import common_pb2
from services.runtime.progress import Far
from tests.placement.fakes import MIB, FakeCluster


def test_a_group_shows_its_pressure_and_the_load_of_each_model():
    world = FakeCluster(groups=1, short_window_s=5.0)
    world.model("busy", floor=0)
    world.groups[0].put("busy", weights_bytes=60 * MIB, running=2)
    world.tell()
    world.planner.observe()
    world.groups[0].put("busy", weights_bytes=60 * MIB, running=2, decode_tokens=600)
    world.tell()
    world.planner.observe()
    world.time += 5.0
    (group,) = cluster_view(world.cluster, {"busy": 80.0}, world.planner.rates()).groups
    assert (group.group, group.reachable, group.free_bytes) == ("g0", True, 100 * MIB)
    assert group.pressure == 80.0 / (40 * MIB)
    (loaded,) = cluster_view(world.cluster, {"busy": 80.0}, load_weight=4.0).groups
    assert loaded.pressure == pytest.approx(80.0 / (40 * MIB) + 4 * 80.0 / (100 * MIB))
    assert [(device.device, device.free_bytes) for device in group.memory] == [("g0-device", 100 * MIB)]
    (model,) = group.models
    assert (model.model, model.running, model.demand, model.tokens_per_s) == ("busy", 2, 80.0, 120.0)


def test_a_model_that_comes_up_shows_the_step_that_its_group_reports():
    world = FakeCluster(groups=1)
    world.model("m", floor=0)
    at = common_pb2.Progress(step="copying weights", done=1, total=4, unit="bytes")
    world.groups[0].put("m", residency=common_pb2.WAKING, progress=at, waking_s=2.5, kernels_compiled=3)
    world.tell()
    (model,) = cluster_view(world.cluster, {}).groups[0].models
    assert (model.progress, model.waking_s, model.kernels_compiled) == (at, 2.5, 3)
    assert far(model) == Far("m: copying weights (3 kernels compiled)", 1, 4)


async def test_a_prospect_shows_the_group_and_the_models_that_would_leave():
    world = FakeCluster(groups=1)
    world.model("asleep", quota=40 * MIB)
    world.model("new", weights=70 * MIB, floor=MIB)
    world.groups[0].put("asleep", common_pb2.HIBERNATING)
    world.tell()
    told = prospect_view(*world.reconciler.prospect("new"))
    assert (told.group, told.waiting_s, [c.group for c in told.candidates]) == ("g0", 0.0, ["g0"])
    assert [(each.model, each.target) for each in told.leaving] == [("asleep", common_pb2.COLD)]


def test_a_group_pressure_leaves_out_the_weights_of_hibernating_models():
    world = FakeCluster(groups=1)
    world.model("asleep")
    world.model("busy")
    world.groups[0].put("asleep", common_pb2.HIBERNATING, weights_bytes=100 * MIB)
    world.groups[0].put("busy", weights_bytes=60 * MIB)
    world.tell()
    (group,) = cluster_view(world.cluster, {"busy": 80.0, "asleep": 1.0}).groups
    assert group.pressure == 80.0 / (40 * MIB)


def test_a_group_filled_by_weights_has_infinite_pressure_while_there_is_demand():
    world = FakeCluster(groups=1)
    world.model("full")
    world.groups[0].put("full", common_pb2.ACTIVE, weights_bytes=100 * MIB)
    world.tell()
    assert cluster_view(world.cluster, {"full": 1.0}).groups[0].pressure == inf
    assert cluster_view(world.cluster, {}).groups[0].pressure == 0.0
