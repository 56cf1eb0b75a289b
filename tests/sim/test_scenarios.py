"""Scenarios that can be worked out by hand; worlds.ROUND has the numbers."""

from dataclasses import replace
from itertools import pairwise

import pytest

from sim.group.memory import SimulatedMemory
from sim.inputs.request import SimulatedRequest
from tests.sim.worlds import GB, ROUND, models, replay


def test_a_request_alone_takes_the_time_of_its_path_its_prefill_and_its_steps():
    (request,) = requests = [SimulatedRequest("0", "a", 1.0, 100, 11)]
    replay(requests, models("a"), "static")
    assert request.ttft == pytest.approx(0.05 + 0.1 + 0.1)
    assert request.tpot == pytest.approx(0.01) and request.generated == 11


def test_decodes_wait_for_the_prefill_of_the_next_request_from_the_end_of_their_step_on():
    first, second = requests = [SimulatedRequest("0", "a", 1.0, 100, 101), SimulatedRequest("1", "a", 1.304, 50, 2)]
    replay(requests, models("a"), "static")
    # Steps end at 1.26, 1.27, ...; the second is there at 1.354, in the eleventh, and prefills from 1.36 to 1.51.
    assert second.first_at == pytest.approx(1.51) and second.ended_at == pytest.approx(1.52)
    assert first.first_at == pytest.approx(1.25) and first.ended_at == pytest.approx(1.51 + 89 * 0.01)


def test_a_model_starts_cold_with_its_first_request_and_is_active_for_the_second():
    first, second = requests = [
        SimulatedRequest("0", "a", 1.0, 100, 1, 9.0),
        SimulatedRequest("1", "a", 5.0, 100, 1, 9.0),
    ]
    outcome = replay(requests, models("a"))
    assert first.ttft == pytest.approx(0.05 + 2.0 + 0.2) and second.ttft == pytest.approx(0.25)
    (group,) = outcome.system.groups
    assert (group.counts.cold_starts, group.counts.wakes, group.counts.weights_bytes) == (1, 0, GB)


def test_an_idle_model_sleeps_when_its_memory_is_needed_and_wakes_with_its_next_request():
    requests = [
        SimulatedRequest("0", "a", 0.0, 100, 1, 9.0),
        SimulatedRequest("1", "b", 60.0, 100, 1, 9.0),
        SimulatedRequest("2", "a", 120.0, 100, 1, 9.0),
    ]
    outcome = replay(requests, models("a", "b", weights=80 * GB))
    (group,) = outcome.system.groups
    assert (group.counts.hibernations, group.counts.wakes, group.counts.cold_starts) == (2, 1, 2)
    # 80 ms for a token of a model of 80 GB; a yields within 10 ms, then b starts; last a wakes.
    assert requests[1].ttft == pytest.approx(0.05 + 0.01 + 2.0 + 0.1 + 8.0)
    assert requests[2].ttft == pytest.approx(0.05 + 0.01 + 0.3 + 0.1 + 8.0)


@pytest.mark.parametrize("first", ["g0", "g1"])
def test_a_model_starts_on_its_configured_first_group_and_later_wherever_there_is_room(first):
    requests = [
        SimulatedRequest("0", "a", 0.0, 100, 1, 9.0),
        SimulatedRequest("1", "b", 60.0, 100, 9000, 9.0),
        SimulatedRequest("2", "a", 120.0, 100, 1, 9.0),
    ]
    outcome = replay(requests, models("a", "b", weights=80 * GB, begins_on=first), sizes=(1, 1))
    cold = {group.name: group.counts.cold_starts for group in outcome.system.groups}
    assert cold.pop(first) == 2, "a left for b"
    assert cold.popitem()[1] == 1 and requests[2].ttft < 20.0, "b is still busy there"


def test_request_with_less_time_left_goes_first_under_prism_and_the_earlier_under_static():
    def run(policy):
        requests = [
            SimulatedRequest("0", "a", 0.0, 1, 1, 9.0),
            SimulatedRequest("1", "b", 0.0, 1, 1, 9.0),
            SimulatedRequest("2", "a", 9.0, 500, 1, 9.0),
        ]
        requests += [SimulatedRequest("3", "b", 9.01, 3000, 1, 30.0), SimulatedRequest("4", "a", 9.02, 500, 1, 4.0)]
        replay(requests, models("a", "b"), policy)
        return requests[3].first_at, requests[4].first_at

    long, urgent = run("prism")
    assert urgent < long
    long, urgent = run("static")
    assert long == pytest.approx(9.06 + 0.6 / 2 + 3.1, abs=1.0)  # side by side, at half the speed


def test_decodes_beside_a_queue_of_their_model_meet_their_target_only_under_protection():
    def run(protect):
        first, *others = requests = [SimulatedRequest("0", "a", 0.0, 100, 201, 9.0, 0.2)] + [
            SimulatedRequest(str(i), "a", 2.2, 1500, 1, 300.0, 0.2) for i in range(1, 61)
        ]
        replay(requests, models("a"), settings={"protect_decodes": protect})
        assert all(request.ttft <= 300.0 for request in others)
        return first.tpot, max(request.first_at for request in others)

    kept, protected = run("true")
    missed, free = run("false")
    assert kept <= 0.2 < missed
    assert protected <= 1.05 * free, "200 steps are made sooner, and some prompts prefilled one by one"


def test_a_prompt_that_comes_during_another_prefill_beside_protected_decodes_is_on_time():
    """A pause of three times that step would be too long for it."""
    warm = [SimulatedRequest(f"{name}{i}", name, 5.0 * i, 1, 2) for i, name in enumerate("ab" * 8)]
    decodes = SimulatedRequest("decodes", "a", 100.0, 1, 400, 9.0, 0.0112)
    short = [SimulatedRequest(f"short{i}", "b", 101.0 + 0.05 * i, 1, 1, 0.5) for i in range(2)]
    replay([*warm, decodes, *short], models("a", "b"))
    assert all(request.ttft <= 0.5 for request in short)


def test_a_model_on_two_devices_is_served_by_the_group_of_two():
    (request,) = requests = [SimulatedRequest("0", "wide", 0.0, 100, 11, 9.0)]
    outcome = replay(requests, models("wide", devices=2, weights=2 * GB), sizes=(1, 2))
    assert request.served and [len(group.active) for group in outcome.system.groups] == [0, 1]
    assert request.tpot == pytest.approx(0.01)


def test_a_model_that_finds_no_room_tries_again_after_a_pause(monkeypatch):
    tried, really = [], SimulatedMemory.make_room

    def make_room(self, model, nbytes, answer, **options):
        if self._clock.now >= 1.5:
            return really(self, model, nbytes, answer, **options)
        tried.append(self._clock.now)
        assert len(tried) < 50
        return self._clock.after(0.0, answer, 1)

    monkeypatch.setattr(SimulatedMemory, "make_room", make_room)
    (request,) = requests = [SimulatedRequest("0", "a", 1.0, 100, 1, 9.0)]
    replay(requests, models("a"))
    assert request.generated == 1 and request.first_at == pytest.approx(1.55 + 2.0 + 0.2)
    assert [later - sooner for sooner, later in pairwise(tried)] == pytest.approx([0.1] * 4)


def test_requests_of_one_moment_reach_their_engines_one_after_the_other():
    requests = [SimulatedRequest(name, name, 0.0, 100, 1) for name in "ab"] + [SimulatedRequest("c", "a", 50.0, 100, 1)]
    replay(requests, models("a", "b"), "static", sizes=(1, 1), hardware=replace(ROUND, handover_s=0.3))
    first, second, later = requests
    assert second.ttft == pytest.approx(first.ttft + 0.3)
    assert later.ttft == pytest.approx(first.ttft)  # nobody is before it


def test_engine_that_captures_its_graphs_takes_half_of_the_devices_from_one_that_decodes():
    ends = []
    for share in (0.0, 1.0):
        hardware = replace(ROUND, cold_layer_s=1 / 32, capture_share=share)  # 32 layers: it captures for a second
        known = models("a", "b")
        requests = [SimulatedRequest("a", "a", 0.0, 100, 1001), SimulatedRequest("b", "b", 5.0, 100, 1)]
        replay(requests, known, hardware=hardware)
        ends.append(requests[0].ended_at)
    assert ends[1] - ends[0] == pytest.approx(0.5, abs=0.05)
