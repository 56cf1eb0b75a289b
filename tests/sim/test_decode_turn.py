"""Whose decode steps go first where two models decode at once. worlds.ROUND: 10 ms a step."""

from collections import Counter
from dataclasses import replace

import pytest

from gpu_scheduler.engines.sharing.throttle import PrefillThrottle
from sim.clock import Clock
from sim.engines.cost import Cost, Shape
from sim.engines.engine import SimulatedEngine
from sim.engines.processor import Processor
from sim.inputs.request import SimulatedRequest
from tests.sim.worlds import GB, ROUND, models, replay

SHARED = replace(ROUND, sharing=0.9, decode_sharing=0.9)
"""What processes lose by taking turns: two that decode make a step in 22 ms each."""

WARM = 32
"""Requests of each before: by their outputs it is known how far decodes may be ahead."""


def both(tpot_a, tpot_b, settings=None, output=300):
    """Seconds a token of a request of either, which come at the same moment."""
    targets = {"a": tpot_a, "b": tpot_b}
    warm = [
        SimulatedRequest(f"{name}{i}", name, 10.0 * i, 1, output, 9.0, targets[name])
        for i, name in enumerate("ab" * WARM)
    ]
    asked = [SimulatedRequest(name, name, 20.0 * WARM, 1, output, 9.0, tpot) for name, tpot in targets.items()]
    known = models("a", "b")
    replay([*warm, *asked], known, hardware=SHARED, settings=settings or {})
    return [request.tpot for request in asked]


def test_decodes_of_two_models_that_cannot_both_be_on_time_let_one_be():
    assert both(0.020, 0.020, {"decode_arbitration_ms": "0"}) == pytest.approx([0.0222, 0.0222], abs=0.0006)
    first, second = sorted(both(0.020, 0.020))
    assert first <= 0.020 and second < 0.030


def test_decodes_of_the_model_with_the_looser_target_are_on_time_if_only_one_can_be():
    a, b = both(0.016, 0.020)
    assert b <= 0.020 < a
    a, b = both(0.020, 0.016)
    assert a <= 0.020 < b


def test_decodes_of_two_models_with_unequal_targets_are_both_on_time_if_possible():
    a, b = both(0.017, 0.045)
    assert a <= 0.017 and b <= 0.045
    a, b = both(0.017, 0.045, {"decode_arbitration_ms": "0"})
    assert a > 0.017 and b <= 0.045


def test_short_answers_of_one_model_do_not_delay_decodes_of_another():
    """How far short ones are ahead says nothing: five of them, one after the other, beside a long one."""
    targets = {"a": 0.026, "b": 0.026}
    warm = [
        SimulatedRequest(f"{name}{i}", name, 10.0 * i, 1, 8, 9.0, targets[name]) for i, name in enumerate("ab" * WARM)
    ]
    at = 20.0 * WARM
    long = SimulatedRequest("long", "a", at, 1, 1500, 9.0, targets["a"])
    short = [SimulatedRequest(f"short{i}", "b", at + 2.0 + 2 * i, 1, 30, 9.0, targets["b"]) for i in range(5)]
    replay([*warm, long, *short], models("a", "b"), hardware=SHARED)
    assert all(request.tpot <= 0.026 for request in (long, *short))


def test_decodes_with_an_unreachable_target_go_on_beside_others():
    hopeless, other = both(0.005, 0.021, {"decode_arbitration_ms": "40"}, output=60)
    assert hopeless < 0.045 and other <= 0.021


class Plenty:
    """Memory for everything."""

    def held(self, name):
        return GB

    def over_limit(self, name):
        return 0

    def give_back(self, name, nbytes):
        """Nothing is over."""


class Steps(Counter):
    """Decode steps by engine."""

    def stepped(self, engine, steps, tokens):
        self[engine.name] += steps

    def first_token(self, engine, request):
        """Of no interest, as what follows."""

    prefilled = finished = first_token


def test_decodes_of_a_large_batch_go_on_while_a_small_one_stands_still_for_a_prefill():
    """Of too many for one prompt they do not stand still for that."""
    clock, steps = Clock(), Steps()
    processor = Processor(clock, sharing=1.0, prefill_priority_batch=2)
    engines = {
        name: SimulatedEngine(clock, name, Cost(Shape(GB, 1), ROUND), processor, Plenty(), steps, 9.0, 9.0)
        for name in ("few", "many", "prefills")
    }
    for name, step_s, requests in (("few", 0.05, 1), ("many", 0.012, 3)):
        engines[name].set_throttle(PrefillThrottle(step_s=step_s))
        for i in range(requests):
            engines[name].generate(SimulatedRequest(f"{name} {i}", name, 0.0, 1, 10**6))

    def steps_between(begin, end):
        clock.run(begin)
        before = dict(steps)
        clock.run(end)
        return {name: steps[name] - before.get(name, 0) for name in ("few", "many")}

    apart = steps_between(1.0, 2.0)
    assert apart["few"] == pytest.approx(20, abs=2), "as its target asks for"
    assert apart["many"] == pytest.approx(80, abs=2), "all that is left, which is nearly enough"
    clock.at(2.5, engines["prefills"].generate, SimulatedRequest("prefills", "prefills", 2.5, 2000, 0))
    beside = steps_between(2.6, 3.6)
    assert beside["few"] == 0 and beside["many"] == pytest.approx(50, abs=2)
