"""MuxServe++: what it shares, in which order it prefills, and what it refuses. worlds.ROUND has the numbers."""

from dataclasses import replace

import pytest

from sim.inputs.request import SimulatedRequest
from sim.system import FleetError
from tests.sim.worlds import GB, ROUND, models, replay

TIGHT = replace(
    ROUND, capacity_bytes=8 * GB, quota_bytes=0, graph_bytes=0, prefill_graph_bytes=0, kv_extent_bytes=64 << 20
)
"""Two models of 1 GB, and about 6 GB of KV for both."""


def burst(name, count, at=0.0):
    return [SimulatedRequest(f"{name}{i}", name, at, 900, 100) for i in range(count)]


@pytest.mark.parametrize(("policy", "more"), [("static", False), ("muxserve", True)])
def test_muxserve_model_takes_memory_that_its_neighbour_does_not_use_and_a_static_one_not(policy, more):
    known = models("a", "b", kv=1 << 20, context_tokens=1024)
    requests = burst("a", 4) + burst("b", 4, at=100.0)
    outcome = replay(requests, known, policy, hardware=TIGHT, check_every_s=0.1)
    assert all(request.served for request in requests)
    (group,) = outcome.system.groups
    # Four requests of about 1 GB: the half of the memory holds not all of them at once, the whole does.
    together = max(request.first_at for request in requests[:4]) < min(request.ended_at for request in requests[:4])
    assert together is more
    assert (group.memory.reclaimed_bytes > 0) is more  # b takes back what a has left idle


def test_muxserve_models_prefill_in_turn_and_their_requests_in_order_of_arrival():
    requests = [SimulatedRequest(f"{i}", "a", 0.01 * i, 5000, 1) for i in range(4)]
    requests += [SimulatedRequest("b", "b", 0.03, 100, 1)]
    replay(requests, models("a", "b"), "muxserve")
    first, second, third, fourth, other = (request.first_at for request in requests)
    # The first prefills alone for 5.1 s; b's turn is next, before a's other three.
    assert first == pytest.approx(0.05 + 5.1) and other == pytest.approx(first + 0.2)
    assert other < second <= third <= fourth


def test_muxserve_prefills_one_model_while_another_decodes():
    long = SimulatedRequest("0", "a", 0.0, 100, 501)
    short = SimulatedRequest("1", "b", 1.0, 100, 1)
    replay([long, short], models("a", "b"), "muxserve")
    assert long.first_at < short.first_at < long.ended_at


def test_a_fleet_with_less_memory_than_weights_is_refused_with_the_sum():
    requests = burst("a", 1) + burst("b", 1) + burst("c", 1)
    with pytest.raises(FleetError, match=r"finds no place for .*: 3 models have 180,000,000,000 bytes of weights"):
        replay(requests, models("a", "b", "c", weights=60 * GB), "muxserve")
    assert replay(requests, models("a", "b", "c", weights=60 * GB), "static").system.figures["models without a place"]


def test_muxserve_neither_hibernates_nor_moves_models():
    requests = burst("a", 2) + burst("b", 2, at=500.0) + burst("a", 2, at=1000.0)
    for i, request in enumerate(requests):
        request.id = str(i)
    outcome = replay(requests, models("a", "b"), "muxserve", (1, 1))
    for group in outcome.system.groups:
        assert group.counts.wakes == group.counts.cold_starts == group.counts.hibernations == 0
