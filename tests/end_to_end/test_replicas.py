"""A model on two groups at once, in the whole system."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from gpu_scheduler.client import GpuSchedulerClient
from protos import common_pb2, gpu_scheduler_pb2
from services.runtime import tasks
from testing.systems.local import MODELS, World, world

pytestmark = pytest.mark.asyncio
PROMPT = list(range(20, 60))
DEVICES = {"cpu:0": 32 << 20, "cpu:1": 32 << 20}
CLIENTS = 24


async def places(it: World, model: str) -> list[str]:
    """Groups where the model is active."""
    cluster = await it.placement.cluster()
    return [
        group.group
        for group in cluster.groups
        if any(each.model == model and each.residency == common_pb2.ACTIVE for each in group.models)
    ]


def told(it: World, event: str) -> list[dict[str, Any]]:
    """What gpu_schedulers logged of it."""
    lines = [line for log in it.local.state.glob("logs/gpu_scheduler*.log") for line in log.read_text().splitlines()]
    events = [json.loads(line) for line in lines if line.startswith("{") and event in line]
    return [each for each in events if each.get("event") == event]


async def test_model_with_more_load_than_a_group_is_served_by_two_and_outlives_the_death_of_one() -> None:
    async with world("echo", options={"step_ms": "5", "prefill_tokens_per_s": "2000"}, devices=DEVICES) as it:
        model, answered = MODELS[0], 0
        expected = (await it.complete(model, PROMPT, 4))["choices"][0]["text"]

        async def ask() -> None:
            nonlocal answered
            body = {"model": model, "prompt": PROMPT, "max_tokens": 4, "temperature": 0}
            while True:
                status, answer = await it.post("/v1/completions", body, headers={"x-slo-ttft-ms": "10"})
                assert (status, answer["choices"][0]["text"]) == (200, expected)
                answered += 1

        async def on_both() -> bool:
            return len(await places(it, model)) == 2

        clients: list[asyncio.Task[Any]] = [tasks.spawn(ask(), f"client {i}") for i in range(CLIENTS)]
        await it.until(on_both, "the model is on both groups")
        before = answered

        async def goes_on() -> bool:
            return answered > before + 2 * CLIENTS

        async with it.without(it.local.scheduler("cpu:1")):
            await it.until(goes_on, "requests are answered by the other group")
        assert not any(client.done() for client in clients)
        await tasks.cancel(*clients)


@pytest.mark.sglang
async def test_streams_of_a_group_that_a_model_leaves_go_on_with_their_kv_and_no_token_changes() -> None:
    model, new = MODELS[1], 100
    prompts = [list(range(100 + 40 * i, 140 + 40 * i)) for i in range(4)]
    async with world("sglang", {model: {}}, devices=DEVICES) as it:

        async def answer(i: int, started: asyncio.Event | None = None) -> tuple[str, dict[str, Any], str]:
            return await it.stream(model, prompts[i], new, started, ignore_eos=True)

        undisturbed = [(text, finish) for text, _, finish in await asyncio.gather(*map(answer, range(len(prompts))))]
        (here,) = await places(it, model)
        await it.replicate(model)
        assert sorted(await places(it, model)) == sorted(DEVICES)

        async def leave(group: str) -> None:
            left, started = asyncio.Event(), [asyncio.Event() for _ in prompts]

            async def keep_asking(i: int) -> None:
                while not left.is_set():
                    text, _, finish = await answer(i, started[i])
                    assert (text, finish) == undisturbed[i]

            async with asyncio.TaskGroup() as streams:
                for i in range(len(prompts)):
                    streams.create_task(keep_asking(i))
                for event in started:
                    await event.wait()
                reached = await it.placement.eviction(model, common_pb2.HIBERNATING, group)
                left.set()
            assert reached.residency == common_pb2.HIBERNATING
            assert group not in await places(it, model)

        # All streams there may be between two requests when it leaves: then there was nothing to hand over.
        for _ in range(3):
            await leave(here)
            handed = told(it, "KV handed over")
            if any(each["requests"] and each["bytes"] for each in handed):
                break
            await it.replicate(model, here)
        assert any(each["requests"] and each["bytes"] for each in handed), "no stream was handed over"
        resumed = told(it, "stream resumed")
        assert any(each["cached"] for each in resumed), "its KV was computed again"


@pytest.mark.sglang
async def test_streams_of_a_replica_that_makes_way_go_on_with_their_kv_and_no_token_changes() -> None:
    other, model, new = MODELS[0], MODELS[1], 200
    prompts = [list(range(100 + 40 * i, 140 + 40 * i)) for i in range(3)]
    async with world("sglang", {other: {}, model: {}}, devices=DEVICES) as it:

        async def answer(i: int, started: asyncio.Event | None = None) -> tuple[str, dict[str, Any], str]:
            return await it.stream(model, prompts[i], new, started, ignore_eos=True)

        undisturbed = [(text, finish) for text, _, finish in await asyncio.gather(*map(answer, range(len(prompts))))]
        (here,) = await places(it, model)
        await it.replicate(model)
        (beside,) = (group for group in DEVICES if group != here)
        scheduler = GpuSchedulerClient(it.local.unix(it.local.scheduler(here)))
        spec = next(route.model for route in (await it.placement.routes()).routes if route.model.name == other)
        left = asyncio.Event()

        async def keep_asking(i: int, started: asyncio.Event) -> None:
            while not left.is_set():
                text, _, finish = await answer(i, started)
                assert (text, finish) == undisturbed[i]

        started = [asyncio.Event() for _ in prompts]
        async with asyncio.TaskGroup() as streams:
            for i, event in enumerate(started):
                streams.create_task(keep_asking(i, event))
            for event in started:
                await event.wait()
            successor = it.local.unix(it.local.scheduler(beside))
            leaves = gpu_scheduler_pb2.Yield(model=model, target=common_pb2.HIBERNATING, successor=successor)
            reached = await scheduler.set_residency(spec, common_pb2.ACTIVE, "test", yields=[leaves])
            left.set()
        assert reached.residency == common_pb2.ACTIVE
        assert [each["to"] for each in told(it, "KV handed over")] == [successor]
        await scheduler.close()
