"""Decodes that stand still for a neighbour's prefill steps. worlds.ROUND: such a step takes 0.1 s and 1 ms for each
token."""

import pytest

from gpu_scheduler.engines.sharing.throttle import PrefillThrottle
from sim.clock import Clock
from sim.engines.cost import Cost, Shape
from sim.engines.engine import SimulatedEngine
from sim.engines.processor import Processor
from sim.inputs.request import SimulatedRequest
from tests.sim.test_decode_turn import Plenty
from tests.sim.worlds import GB, ROUND


class Told:
    """First tokens, by request."""

    def __init__(self, clock):
        self._clock = clock
        self.first = {}

    def first_token(self, engine, request):
        self.first[request.id] = self._clock.now

    def stepped(self, engine, steps, tokens):
        """Of no interest, as what follows."""

    def prefilled(self, engine, request):
        pass

    finished = prefilled


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def told(clock):
    return Told(clock)


def engines(clock, told, prefill_priority_s):
    processor = Processor(clock, sharing=1.0)
    cost = Cost(Shape(GB, 1), ROUND)
    return [
        SimulatedEngine(clock, name, cost, processor, Plenty(), told, prefill_priority_s)
        for name in ("decodes", "prefills")
    ]


def test_prompt_is_prefilled_while_the_decodes_of_its_engine_stand_still(clock, told):
    decodes, prefills = engines(clock, told, prefill_priority_s=5.0)
    decodes.generate(SimulatedRequest("decodes", "decodes", 0.0, 10, 10**6))
    clock.at(1.0, prefills.generate, SimulatedRequest("long", "prefills", 1.0, 3000, 0))
    clock.at(2.0, decodes.generate, SimulatedRequest("short", "decodes", 2.0, 100, 0))
    clock.run(8.0)
    # 0.2 s beside the other, after the step that was under way: twice as long.
    assert told.first["short"] == pytest.approx(2.4, abs=0.03)
    assert told.first["long"] == pytest.approx(1.0 + 3.1 + 0.2, abs=0.03)


def test_prompt_that_comes_in_the_last_decode_step_of_a_run_is_prefilled_without_waiting(clock, told):
    decodes, prefills = engines(clock, told, prefill_priority_s=5.0)
    decodes.generate(SimulatedRequest("decodes", "decodes", 0.0, 10, 20))
    clock.at(0.305, prefills.generate, SimulatedRequest("long", "prefills", 0.305, 3000, 0))
    clock.at(0.4, decodes.generate, SimulatedRequest("short", "decodes", 0.4, 100, 1))
    clock.run(8.0)
    assert told.first["short"] == pytest.approx(0.8, abs=0.03)


def test_decodes_share_the_devices_again_after_the_longest_prefill_priority(clock, told):
    decodes, prefills = engines(clock, told, prefill_priority_s=0.5)
    decodes.generate(SimulatedRequest("decodes", "decodes", 0.0, 10, 10**6))
    clock.at(1.0, prefills.generate, SimulatedRequest("long", "prefills", 1.0, 8000, 0))
    clock.run(1.45)
    before = decodes.decode_tokens()
    clock.run(5.5)
    # Equal slices from 1.5 on.
    assert decodes.decode_tokens() - before == pytest.approx(4.0 / 2 / 0.01, abs=3)


def test_decode_step_decided_before_a_prefill_with_priority_is_still_made(clock, told):
    """Real engines give the devices a step while these are at the one before."""
    decodes, prefills = engines(clock, told, prefill_priority_s=5.0)
    decodes.generate(SimulatedRequest("decodes", "decodes", 0.0, 10, 10**6))
    clock.at(1.0, prefills.generate, SimulatedRequest("long", "prefills", 1.0, 3000, 0))
    clock.run(0.9999)
    before = decodes.decode_tokens()
    clock.run(4.0)
    assert decodes.decode_tokens() - before == 2
    clock.run(5.0)
    # 0.1 s and 1 ms for each token, and beside it the two steps.
    assert told.first["long"] == pytest.approx(1.0 + 3.1 + 0.02, abs=0.01)


def test_prefill_step_is_never_larger_than_the_chunk_of_its_engine(clock, told):
    engine, _ = engines(clock, told, prefill_priority_s=5.0)
    engine.set_throttle(PrefillThrottle(chunk_tokens=10**6))
    engine.generate(SimulatedRequest("long", "decodes", 0.0, ROUND.prefill_chunk + 1000, 0))
    clock.run()
    # Two steps: 0.1 s each, and 1 ms for each token.
    assert told.first["long"] == pytest.approx(0.2 + 0.001 * (ROUND.prefill_chunk + 1000), abs=0.01)
