"""A model on two groups at once, in the whole system with echo engines."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from protos import common_pb2
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
