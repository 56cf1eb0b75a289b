"""What an engine has of a GPU for itself: gone while its model sleeps, as far as it can be, and bounded while it does
not.

Kernels are compiled when a machine first sees them: `PRISM_TEST_START_S=300` for that time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from balloond.client import BalloondClient
from gpu_scheduler.engines.sglang.base.options import graph_sizes
from protos import common_pb2, engine_pb2
from testing.engines import harness
from testing.engines.harness import EngineEnd
from testing.systems.local import FOLDER, World, world
from tests.balloond.conftest import Node
from tests.gpu.conftest import DEVICE, MIB
from tests.gpu.test_engine import FLOOR, MODEL, OPTIONS, WEIGHTS, answers, ask_all, make_prompts, one_by_one

PROMPTS = make_prompts(6, 300, seed=7)
AIM_BYTES = 700 * MIB


@contextlib.asynccontextmanager
async def serving_system(**options: int) -> AsyncIterator[World]:
    """Two models on the device, through every process."""
    listed = {name: {"path": str(FOLDER / name), "context_tokens": 1024} for name in ("llama-debian", "qwen3-perl")}
    text = {name: str(value) for name, value in options.items()}
    local: dict[str, Any] = {"devices": {DEVICE: None}, "engine_log_level": "info", "host_capacity_bytes": 1 << 30}
    async with world("sglang", listed, options=text, **local) as at:
        yield at


def told(at: World, event: str, **fields: Any) -> list[dict[str, Any]]:
    """What engines logged of it so far."""
    lines = [line for log in at.local.state.glob("logs/*.log") for line in log.read_text().splitlines()]
    events = [json.loads(line) for line in lines if line.startswith("{") and event in line]
    return [each for each in events if each.get("event") == event and fields.items() <= each.items()]


async def say(at: World, model: str) -> list[str]:
    said = []
    for prompt in PROMPTS:
        body = await at.complete(model, prompt, 24, ignore_eos=True, logprobs=1)
        said.append(str(body["choices"][0]["logprobs"]["tokens"]))
    return said


async def sleep(at: World, model: str) -> None:
    await at.evict(model, common_pb2.HIBERNATING)
    await at.wait_residency(model, common_pb2.HIBERNATING)


async def kept(at: World, model: str, times: int) -> dict[str, int]:
    """By kind, once the engine has told it so often."""

    async def heard() -> list[dict[str, Any]]:
        events = told(at, "hibernating", model=model)
        return events if len(events) >= times else []

    return dict((await at.until(heard, f"{model} never told what it keeps"))[-1]["kept"])


async def test_graphs_and_stacks_leave_with_the_weights_and_answers_are_the_same_after_wake_up():
    async with serving_system() as at:
        before = await say(at, MODEL)
        assert told(at, "CUDA graphs captured")[0]["mapped"] > 0
        for cycle in range(1, 4):
            await sleep(at, MODEL)
            kinds = await kept(at, MODEL, cycle)
            assert kinds["graphs"] == 0
            assert sum(kinds.values()) < AIM_BYTES, kinds
            assert await say(at, MODEL) == before
        assert (await at.measured(MODEL)).graph_bytes > 0
        assert not told(at, "CUDA graphs take memory that stays while the model sleeps")
        stacks = [each["bytes"] for each in told(at, "stack of the device")]
        assert stacks[0] == 128 and stacks[1] > 128


async def test_sleeping_model_keeps_the_same_memory_however_many_requests_it_had():
    async with serving_system() as at:
        in_use = []
        for cycle in range(1, 7):
            await asyncio.gather(*(at.complete(MODEL, each, 8) for each in make_prompts(40, 900, seed=cycle)))
            await say(at, MODEL)
            await sleep(at, MODEL)
            in_use.append((await kept(at, MODEL, cycle))["in_use"])
        assert max(in_use) - min(in_use) < 256 << 10, in_use  # the slots of 40 prompts are 18,000 numbers of 8 bytes


async def test_models_taking_turns_in_a_process_have_graphs_of_their_own_and_answer_the_same():
    async with serving_system() as at:
        names = [MODEL, "qwen3-perl"]
        before = {name: await say(at, name) for name in names}
        for _ in range(2):
            for name in names:
                await at.evict(name, common_pb2.COLD)
            for name in reversed(names):
                assert await say(at, name) == before[name]
        assert not told(at, "memory of CUDA graphs is still referred to")


async def test_model_without_leaving_graphs_small_stack_and_quota_sleeps_and_wakes():
    async with serving_system(graphs_leave=0, small_stack=0, enforce_quota=0) as at:
        before = await say(at, MODEL)
        await sleep(at, MODEL)
        assert (await kept(at, MODEL, 1))["graphs"] == 0
        assert await say(at, MODEL) == before
        assert not told(at, "CUDA graphs captured") and not told(at, "stack of the device")


@contextlib.asynccontextmanager
async def warm(node: Node) -> AsyncIterator[tuple[EngineEnd, harness.Node]]:
    await node.book(MODEL, weights=WEIGHTS, floor=FLOOR)
    async with harness.engine() as end:
        at = harness.Node(BalloondClient(node.address), node.handoff, DEVICE)
        yield end, at
        await at.client.close()


def load_of(at: harness.Node, quota_bytes: int, path: Path = FOLDER / MODEL, **options: int) -> Any:
    load = harness.load(at, MODEL, path, context_tokens=1024, **{**OPTIONS, **options})
    load.kv_extent_bytes = 2 * MIB
    load.model.quota_bytes = quota_bytes
    return load


async def test_a_quota_that_is_too_small_is_refused_with_both_numbers_and_the_engine_takes_the_next(node):
    async with warm(node) as (end, at):
        end.send(load=load_of(at, 100 * MIB))
        await end.mapped()
        failed = (await end.hear("failed")).failed
        assert "GiB of its device beside weights and KV, its quota is 0.10 GiB: raise quota_bytes" in failed.reason
        assert not failed.model_at_fault
        _, measured = await end.hold(load_of(at, 8 << 30))
        assert measured.quota_bytes == 8 << 30
        assert 0 < measured.private_bytes < 8 << 30


async def test_quota_not_stated_is_measured_and_a_full_batch_stays_within_it(node):
    async with warm(node) as (end, at):
        _, measured = await end.hold(load_of(at, 0))
        assert measured.private_bytes < measured.quota_bytes < measured.private_bytes + 256 * MIB
        before = await one_by_one(end, "before", PROMPTS)
        names = ask_all(end, "many", make_prompts(32, 200, seed=5))
        for number, prompt in enumerate(make_prompts(16, 200, seed=6)):
            names.append(f"drawn-{number}")
            end.ask(names[-1], prompt, 48, ignore_eos=True, temperature=0.9, top_p=0.9, logprobs=True)
        await answers(end, names)
        assert await one_by_one(end, "after", PROMPTS) == before


async def test_graphs_are_told_one_by_one_counted_with_the_weights_and_gone_when_the_model_leaves(node):
    async with warm(node) as (end, at):
        mapped, measured = await end.hold(load_of(at, 0))
        told = [each for each in end.progress if each.step == "capturing CUDA graphs"]
        assert [(each.done, each.unit) for each in told] == [(number, "graphs") for number in range(len(told))]
        assert len(told) >= len(graph_sizes(OPTIONS["max_running_requests"]))
        assert measured.graph_bytes > 0
        (lease,) = (await node.device()).leases
        assert lease.weights_bytes == mapped.weights_bytes + measured.graph_bytes
        await end.do(unload=engine_pb2.Unload())
        await node.until(lambda device: device.leased_bytes == 0)


async def test_private_memory_of_models_that_come_and_go_does_not_grow(node):
    async with warm(node) as (end, at):
        taken = []
        for _ in range(4):
            _, measured = await end.hold(load_of(at, 0))
            taken.append(measured.private_bytes)
            await one_by_one(end, f"round {len(taken)}", PROMPTS)
            await end.do(unload=engine_pb2.Unload())
        assert taken[-1] < taken[1] + 32 * MIB, taken


TAKE_ONE_AFTER_THE_OTHER = """
import os, sys
from gpu_scheduler.engines.sglang.base import environment
environment.prepare()
import torch
for mib in (62.6, 63.9, 64.0):
    torch.cuda.empty_cache()
    for _ in range(8):
        del [torch.empty(int(mib * 2**20), dtype=torch.uint8, device="cuda")][:]
    print(torch.cuda.memory_reserved() >> 20)
"""


def test_torch_tensors_of_one_size_allocated_again_and_again_reserve_the_memory_of_one() -> None:
    done = subprocess.run(
        [sys.executable, "-c", TAKE_ONE_AFTER_THE_OTHER], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.split() == ["64", "64", "64"]
