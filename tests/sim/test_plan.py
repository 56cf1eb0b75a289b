"""Does it fit, and on how few GPUs."""

import pytest

from sim.inputs.request import SimulatedRequest
from sim.inputs.trace import Workload
from sim.plan import FleetPlanner, PlannedLoad
from sim.policies import SYSTEMS
from tests.sim import worlds


def load(count=60, every_s=0.2, models=("a", "b"), ttft_s=1.0):
    """A prefill step takes 0.11 s and a decode step 10 ms: of one model five requests a second are too many."""
    requests = [
        SimulatedRequest(str(i), models[i % len(models)], i * every_s, prompt_tokens=10, output_tokens=2, ttft_s=ttft_s)
        for i in range(count)
    ]
    return PlannedLoad(Workload(requests, count * every_s))


def planner(load, known, **options):
    return FleetPlanner(load, known, SYSTEMS["prism"], hardware=worlds.ROUND, **options)


def test_planner_leaves_warming_requests_out_of_the_report_and_tries_a_load_twice_alike():
    of = planner(load(ttft_s=0.5), worlds.models("a", "b"))
    first, second = of.tried(2), of.tried(2)
    assert first.report["all"]["requests"] == 60 and first.attainment == second.attainment == 1.0
    assert "warm-a" not in first.report["models"]


def test_planner_finds_the_fewest_gpus_that_meet_the_target():
    known = worlds.models(*"abcd")
    of = planner(load(count=200, every_s=0.025, models="abcd"), known)
    alone = {gpus: of.tried(gpus).attainment for gpus in range(1, 9)}
    needed = min(gpus for gpus, share in alone.items() if share >= 0.9)
    tried = of.fewest(8, 0.9)
    assert tried[-1].gpus == needed > 1
    assert len(tried) <= 4


def test_planner_answers_with_the_most_gpus_when_they_miss_the_target():
    tried = planner(load(count=100, every_s=0.01, ttft_s=0.01), worlds.models("a", "b")).fewest(2, 0.99)
    assert [each.gpus for each in tried] == [2] and tried[-1].attainment < 0.99


def test_planned_fleet_that_cannot_hold_a_model_is_refused_with_the_reason():
    known = worlds.models("a", "b", weights=worlds.GB * 1000)
    tried = planner(load(), known).tried(2)
    assert tried.report is None and tried.refused.startswith("no group can hold a: weights ")


def test_planned_fleet_without_the_group_of_a_place_is_refused_by_its_name():
    settings = {"places": '{"a": "g1"}', "rebalance": "false"}
    found = planner(load(), worlds.models("a", "b"), settings=settings)
    assert found.tried(1).refused == "places: a is to be on g1; there are g0"
    assert found.tried(2).report is not None


def test_planner_without_gpus_refuses_the_load():
    assert planner(load(), worlds.models("a", "b")).tried(0).refused == "no GPUs"


def test_planner_keeps_fixed_groups_while_it_varies_single_gpus():
    known = worlds.models("a", devices=2)
    tried = planner(load(count=10, every_s=1.0, models="a"), known, groups=[2]).fewest(2, 0.5)
    assert tried[-1].sizes == [2]


@pytest.mark.parametrize("policy", sorted(SYSTEMS))
def test_planner_tries_every_system(policy):
    of = FleetPlanner(load(count=10, every_s=1.0), worlds.models("a", "b"), SYSTEMS[policy], hardware=worlds.ROUND)
    assert of.tried(2).report["all"]["served"] == 10
