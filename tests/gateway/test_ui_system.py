"""The page of a whole system with echo engines: of one system, from its first request to the end of its gateway."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from protos import common_pb2
from testing.systems.local import MODELS, World, world
from tests.gateway.browser import browser, empty_tab

pytestmark = pytest.mark.asyncio(loop_scope="module")
DEVICES = {"cpu:0": 32 << 20, "cpu:1": 32 << 20}
PROMPT = list(range(20, 60))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def system() -> AsyncIterator[World]:
    async with world("echo", options={"step_ms": "20"}, idle_s=0.2, devices=DEVICES) as it:
        yield it


async def states(answer: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    async for line in answer.content:
        if line.startswith(b"data: "):
            yield json.loads(line[6:])


async def test_ui_state_has_memory_moves_and_targets_of_the_system(system: World) -> None:
    body = {"model": MODELS[0], "prompt": PROMPT, "max_tokens": 4}
    status, _ = await system.post("/v1/completions", body, headers={"x-slo-ttft-ms": "600000"})
    assert status == 200

    async def told() -> dict[str, Any] | None:
        """The page's state once placement has heard how the activation ended: it serves before that."""
        status, state = await system.get("/ui/state.json")
        assert status == 200
        models = [model["state"] for group in state["groups"] for model in group["models"]]
        told = models == ["active"] and state["decisions"][0]["took_s"] and state["placement"]["away"] is None
        return dict(state) if told else None

    state = await system.until(told, "the model is never shown as active")
    devices = {device["device"]: device for group in state["groups"] for device in group["devices"]}
    assert {name: device["capacity_bytes"] for name, device in devices.items()} == DEVICES
    for device in devices.values():
        fields = ("weights_bytes", "kv_used_bytes", "kv_cached_bytes", "kv_reserve_bytes")
        owned = sum(owner[field] for owner in device["owners"] for field in fields)
        rest = device["private_bytes"] + device["stranded_bytes"] + device["free_bytes"]
        assert owned + rest == device["capacity_bytes"]
    assert [owner["model"] for device in devices.values() for owner in device["owners"]] == [MODELS[0]]
    (decision,) = state["decisions"]
    assert (decision["model"], decision["action"]) == (MODELS[0], "activate")
    assert state["attainment"][MODELS[0]]["ttft"] == {"met": 1, "missed": 0}


async def test_ui_page_bars_come_and_go_with_the_models(system: World, tmp_path: Path) -> None:
    with browser(tmp_path / "profile") as address:
        async with empty_tab(address) as tab:
            await system.complete(MODELS[0], PROMPT, 4)
            await tab.open(f"{system.base}/ui")
            await tab.until("document.querySelectorAll('.owner').length === 1")
            await system.complete(MODELS[1], PROMPT, 4)
            await tab.until("document.querySelectorAll('.owner').length === 2")
            await system.evict(MODELS[0], common_pb2.HIBERNATING)
            await tab.until("document.querySelectorAll('.owner').length === 1")
            await tab.until("document.querySelectorAll('.line .mark').length === 3")
            assert tab.complaints == []


async def test_ui_waiting_requests_are_shown_with_their_least_slack(system: World) -> None:
    """More than may run at once, with a target that is far away."""
    headers = {"x-slo-ttft-ms": "600000"}
    body = {"model": MODELS[0], "prompt": list(range(20, 400)), "max_tokens": 40}
    seen = asyncio.Event()

    async def ask() -> set[int]:
        """Again and again: the page looks once a second, and a look may fail on a busy machine."""
        statuses = set()
        while not (statuses and seen.is_set()):
            statuses.add((await system.post("/v1/completions", body, headers=headers))[0])
        return statuses

    requests = [asyncio.get_running_loop().create_task(ask()) for _ in range(100)]
    async with system.http.get(f"{system.base}/ui/events") as answer:
        async for state in states(answer):
            models = [model for group in state["groups"] for model in group["models"]]
            if any(model["waiting"] and model["least_slack_s"] is not None for model in models):
                break
    seen.set()
    (model,) = (model for model in models if model["waiting"])
    assert model["model"] == MODELS[0] and 0 < model["least_slack_s"] < 600 and model["late"] == 0
    assert set().union(*await asyncio.gather(*requests)) == {200}


async def test_ui_stream_ends_with_its_gateway_and_not_with_placement(system: World) -> None:
    await system.complete(MODELS[0], PROMPT, 4)
    async with system.http.get(f"{system.base}/ui/events") as answer:
        stream = states(answer)
        assert (await anext(stream))["decisions"]
        system.kill("placement")
        succeeded = False
        async for state in stream:
            succeeded |= state.get("decisions") == []  # its successor has decided nothing
            if succeeded and state["placement"]["away"] is None:
                break
        os.kill(system.system.running["gateway"].pid, signal.SIGTERM)
        async for _ in stream:
            pass
