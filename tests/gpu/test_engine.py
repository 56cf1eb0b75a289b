"""A real SGLang engine on a real GPU, its memory moved and everything around it killed.

Kernels are compiled when a machine first sees them: `PRISM_TEST_START_S=300` for that time.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import select
from collections.abc import AsyncIterator

import pytest

from balloond.client import BalloondClient
from protos import common_pb2
from testing.engines import harness
from testing.engines.harness import EngineEnd
from testing.systems.local import FOLDER
from tests.balloond.conftest import Node
from tests.gpu.conftest import DEVICE, GIVEN_OUT, MIB

MODEL = "llama-debian"
EXTENT = 2 * MIB
"""Of KV: 1365 tokens of this model."""
FLOOR = 4 * EXTENT
WEIGHTS = 64 * MIB
NEW_TOKENS = 48
OPTIONS = {"deterministic": 1, "max_running_requests": 16, "reserve_low": 1, "reserve_high": 2}


def make_prompts(count: int, longest: int, seed: int, vocabulary: int = 2000) -> list[list[int]]:
    """Every third begins like the one before it."""
    chance = random.Random(seed)
    made: list[list[int]] = []
    for number in range(count):
        own = [chance.randrange(3, vocabulary) for _ in range(chance.randrange(5, longest))]
        made.append((made[-1][: len(made[-1]) // 2] + own)[:longest] if number % 3 == 2 else own)
    return made


@contextlib.asynccontextmanager
async def serving(node: Node) -> AsyncIterator[EngineEnd]:
    """An engine with the model and memory of the node."""
    await node.book(MODEL, weights=WEIGHTS, floor=FLOOR)
    async with harness.engine() as end:
        at = harness.Node(BalloondClient(node.address), node.handoff, DEVICE)
        load = harness.load(at, MODEL, FOLDER / MODEL, context_tokens=1024, **OPTIONS)
        load.kv_extent_bytes = EXTENT
        await end.hold(load)
        await at.client.close()
        yield end


async def limit(node: Node, nbytes: int) -> None:
    async with node.client() as client:
        await client.set_limit(DEVICE, MODEL, nbytes)


def ask_all(end: EngineEnd, tag: str, prompts: list[list[int]], new_tokens: int = NEW_TOKENS) -> list[str]:
    names = [f"{tag}-{number}" for number in range(len(prompts))]
    for name, prompt in zip(names, prompts, strict=True):
        end.ask(name, prompt, new_tokens, ignore_eos=True)
    return names


async def answers(end: EngineEnd, names: list[str]) -> list[list[int]]:
    said = []
    for name in names:
        answer = await end.answer(name)
        assert (answer.finish, answer.error, answer.parked) == (common_pb2.LENGTH, "", False), name
        said.append(answer.tokens)
    return said


async def one_by_one(end: EngineEnd, tag: str, prompts: list[list[int]]) -> list[list[int]]:
    """Batches of one: a GPU rounds otherwise in others."""
    said = []
    for number, prompt in enumerate(prompts):
        said += await answers(end, ask_all(end, f"{tag}-{number}", [prompt]))
    return said


def tokens(end: EngineEnd) -> int:
    return sum(len(answer.tokens) for answer in end.answers.values())


async def move_limit(node: Node) -> None:
    """For ever."""
    chance = random.Random(3)
    while True:
        await limit(node, chance.choice([4, 5, 8, 64]) * EXTENT)
        await asyncio.sleep(0.1)


async def test_answers_are_the_same_after_limits_moved_under_load(node):
    prompts = make_prompts(24, 900, seed=11)
    async with serving(node) as end:
        before = await one_by_one(end, "before", prompts)
        mover = asyncio.get_running_loop().create_task(move_limit(node))
        for turn in range(4):
            await answers(end, ask_all(end, f"moving-{turn}", make_prompts(24, 900, seed=turn)))
        mover.cancel()
        await limit(node, FLOOR)
        await end.until(lambda: 0 < end.stats.kv_held_bytes <= FLOOR)
        await limit(node, 64 * EXTENT)
        assert end.stats.evicted_tokens > 0
        assert await one_by_one(end, "after", prompts) == before


async def test_prompt_logprobs_of_generated_tokens_are_those_of_their_generation_within_the_quota(node):
    """Prefill steps run as graphs here, and there are fewer requests than tokens in them."""
    prompts = make_prompts(12, 900, seed=12)
    async with serving(node) as end:
        for number, prompt in enumerate(prompts):
            end.ask(f"drawn-{number}", prompt, NEW_TOKENS, ignore_eos=True, logprobs=True)
        said = await answers(end, [f"drawn-{number}" for number in range(len(prompts))])
        asked = {"logprobs": True, "top_logprobs": 20, "prompt_logprobs_from": 1, "prompt_only": True}
        for number, prompt in enumerate(prompts):
            end.ask(f"told-{number}", [*prompt, *said[number]], 1, **asked)
        for number, prompt in enumerate(prompts):
            answer = await end.answer(f"told-{number}")
            assert (answer.finish, answer.error, answer.tokens) == (common_pb2.LENGTH, "", [])
            told = [one.logprob for one in answer.prompt_logprobs]
            assert len(told) == len(prompt) + NEW_TOKENS - 1
            drawn = [one.logprob for one in end.answers[f"drawn-{number}"].logprobs]
            assert told[-NEW_TOKENS:] == pytest.approx(drawn, abs=0.25)  # of others beside it, in other kernels


async def test_extents_of_an_engine_killed_in_a_forward_pass_are_reused_only_when_it_is_gone(node, child):
    async with serving(node) as end:
        await node.book("other")
        other = child("other")
        ask_all(end, "long", make_prompts(300, 300, seed=1), 700)
        await end.until(lambda: tokens(end) > 16)
        free = (await node.device()).free_bytes
        assert int(await other.asked("acquire", free // other_extent(), 10)) > 0
        while await other.asked("acquire", 1, 0.5) != "0":
            pass  # reserves and prefixes, that the engine gives up while it lives
        held = (await node.device()).leased_bytes
        gone = os.pidfd_open(end.process.pid)
        so_far = tokens(end)
        await end.until(lambda: tokens(end) > so_far)
        end.process.kill()
        while await other.asked("acquire", 1, 0.2) == "0":
            pass
        assert select.select([gone], [], [], 0)[0], "extents came while their engine still lived"
        os.close(gone)
        device = await node.until(lambda device: [lease.model for lease in device.leases] == ["other"])
        assert device.stranded_bytes == 0 and device.leased_bytes < held
        assert int(await other.asked("acquire", device.free_bytes // other_extent(), 10)) > 0
        assert other.ask("bytes_held") == "0"


def other_extent() -> int:
    """Of the child's KV."""
    from tests.gpu.child import GpuChild

    return GpuChild.extent


async def test_an_engine_runs_on_without_balloond_and_grows_again_under_the_next(node):
    prompts = make_prompts(6, 300, seed=2)
    async with serving(node) as end:
        before = await one_by_one(end, "before", prompts)
        await limit(node, FLOOR)
        running = ask_all(end, "running", make_prompts(8, 100, seed=3), 400)
        await end.until(lambda: all(end.answers[name].tokens for name in running))
        node.kill(node.balloond)
        so_far = tokens(end)
        await end.until(lambda: tokens(end) > so_far + 100)
        await node.start_balloond()
        await node.until(lambda device: bool(device.leases) and not any(lease.suspended for lease in device.leases))
        await limit(node, 64 * EXTENT)
        more = ask_all(end, "more", make_prompts(24, 900, seed=4))
        await end.until(lambda: end.stats.kv_held_bytes > FLOOR)
        await answers(end, running + more)
        device = await node.until(lambda device: device.leases[0].kv_bytes > FLOOR)
        assert device.stranded_bytes == 0
        assert await one_by_one(end, "after", prompts) == before


async def test_engine_memory_with_keeper_and_balloond_killed_is_stranded_until_the_engine_exits(node):
    prompts = make_prompts(6, 300, seed=5)
    async with serving(node) as end:
        before = await one_by_one(end, "before", prompts)
        running = ask_all(end, "running", make_prompts(8, 100, seed=6), 400)
        await end.until(lambda: all(end.answers[name].tokens for name in running))
        node.kill(node.balloond)
        node.kill(node.keeper)
        await node.start()
        device = await node.until(lambda device: device.stranded_bytes > 0)
        assert device.capacity_bytes == GIVEN_OUT and device.stranded_bytes >= FLOOR
        await answers(end, running)
        assert await one_by_one(end, "after", prompts) == before
        await end.close()
        device = await node.until(lambda device: not device.leases)
        assert (device.stranded_bytes, device.leased_bytes) == (0, 0)


async def test_a_killed_keeper_is_given_an_engines_extents_again(node):
    async with serving(node) as end:
        running = ask_all(end, "running", make_prompts(8, 100, seed=7), 400)
        await end.until(lambda: all(end.answers[name].tokens for name in running))
        node.kill(node.keeper)
        await node.start_keeper()
        more = ask_all(end, "more", make_prompts(24, 900, seed=8))  # granted only when the keeper has what was before
        await answers(end, running + more)
        node.kill(node.balloond)
        await node.start_balloond()
        device = await node.until(lambda device: bool(device.leases) and not device.leases[0].suspended)
        assert device.stranded_bytes == 0 and device.leases[0].kv_bytes == end.stats.kv_held_bytes > 0
