"""A model that everybody asks for beside others that nobody does: these make way, their floors too."""

import random

from sim.engines.cost import H200
from sim.inputs.catalogue import SHAPES, ModelSet, Spec
from sim.inputs.request import SimulatedRequest
from tests.sim.worlds import replay


def test_a_busy_model_gets_memory_that_floors_of_idle_models_hold():
    """Seven models of 8B fit into a GPU, with 22 GB for KV, of which each keeps 2."""
    draw = random.Random(1)
    names = [f"m{number}" for number in range(7)]
    known = ModelSet([Spec(name, SHAPES["8b"]) for name in names])
    often = [name for name in names for _ in range(10)]
    once = [SimulatedRequest(f"{i}", name, draw.uniform(0, 40), 2000, 500, 1.0, 0.05) for i, name in enumerate(often)]
    at, busy = 100.0, []
    while at < 160.0:
        at += draw.expovariate(4.0)
        busy.append(SimulatedRequest(f"busy {at}", "m0", at, 1674, 1411, 1.0, 0.05))
    replay(sorted([*once, *busy], key=lambda request: request.arrival), known, hardware=H200)
    assert sum(request.ttft <= 1.0 for request in busy) >= 0.9 * len(busy)
