"""The steps of one engine."""

from dataclasses import replace
from math import inf

import pytest

from sim.clock import Clock
from sim.engines.cost import Shape
from sim.inputs.catalogue import Spec
from sim.inputs.request import SimulatedRequest
from sim.policies.static import Static
from sim.system import World
from tests.sim.worlds import GB, ROUND

HOST = replace(
    ROUND,
    prefill_host_s=0.5,
    prefill_after_s=0.2,
    prefill_layer_s=0.0,
    prefill_graph_layer_s=0.0,
    prefill_chunk=1000,
    prefill_graph_tokens=100,
)
"""Whole steps: 1.1 s on the device, 0.5 s of the host's and 0.2 s more of it before another one."""
SMALL = replace(HOST, prefill_s_per_token_byte=0.0001 / GB)
"""0.2 s on the device."""


def run(hardware, *requests, kv=1000):
    """Of (prompt, when it comes, output), alone on a device, to their end."""
    clock = Clock()
    spec = Spec("m", Shape(GB, kv), context_tokens=4000)
    asked = [SimulatedRequest(str(i), "m", came, prompt, output) for i, (prompt, came, output) in enumerate(requests)]
    static = Static(World(clock, replace(hardware, path_s=0.0), [1], [spec], {}), lambda request: None)
    for request in asked:
        clock.at(request.arrival, static.submit, request)
    clock.run()
    return asked


def first_tokens(hardware, *requests):
    return [request.first_at for request in run(hardware, *requests)]


def test_partly_prefilled_prompt_goes_on_when_the_last_decode_was_stopped_for_memory():
    short = replace(
        ROUND,
        prefill_chunk=1000,
        capacity_bytes=(960 + 4224) << 20,
        quota_bytes=0,
        kept_bytes=0,
        graph_bytes=0,
        prefill_graph_bytes=0,
    )
    first, second = run(short, (1000, 0.0, 2900), (2500, 14.1, 10), kv=1 << 20)
    assert first.parked == 1
    assert second.ended_at < first.ended_at < inf, "both ended"


def at_once(hardware, *prompts):
    return first_tokens(hardware, *((prompt, 0.0, 1) for prompt in prompts))


def test_prefill_step_takes_the_time_of_its_device_or_of_its_host_whichever_is_longer():
    assert at_once(HOST, 1000) == pytest.approx([1.1])
    assert at_once(SMALL, 1000) == pytest.approx([0.5])


def test_engine_host_begins_the_next_step_while_the_device_is_at_the_present_one():
    assert at_once(HOST, 1000, 1000, 1000) == pytest.approx([1.1, 2.2, 3.3])


def test_steps_of_a_small_model_are_as_far_apart_as_its_host_needs():
    assert at_once(SMALL, 1000, 1000, 1000) == pytest.approx([0.5, 1.2, 1.9])
    assert at_once(SMALL, 1000, 1000, 50) == pytest.approx([0.5, 1.2, 1.9]), (
        "one with graphs has the same host before it"
    )


def test_engine_host_after_an_idle_time_begins_when_the_prompt_comes():
    assert first_tokens(SMALL, (1000, 0.0, 1), (1000, 0.6, 1)) == pytest.approx([0.5, 1.1])


def second_token_after(step_s, came):
    """When a prompt that came at `came` had its first token, beside another that decodes in steps of `step_s`."""
    _, second = first_tokens(replace(SMALL, step_layer_s=step_s / 32), (1000, 0.0, 1000), (1000, came, 1))
    return second


def test_engine_host_begins_with_a_prompt_while_a_decode_step_is_under_way():
    # A step ends at 1.3; the host began when the prompt came.
    assert second_token_after(0.4, came=1.0) == pytest.approx(1.5)
    assert second_token_after(0.4, came=1.25) == pytest.approx(1.75), "not before it came"
    assert second_token_after(0.01, came=0.9) == pytest.approx(1.4, abs=0.02)


def test_engine_host_work_after_a_prefill_is_not_shortened_by_a_decode_step():
    assert second_token_after(0.01, came=0.505) == pytest.approx(1.2, abs=0.02)
