"""A whole gateway in this process: real HTTP, real gRPC to fakes of placement and of two groups."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from gateway.__main__ import build
from gateway.config import GatewayConfig
from protos import placement_pb2
from services.service import Service
from testing.patience import PATIENCE_S
from testing.ports import free_port
from tests.gateway import fakes, tokenizers
from tests.gateway.fakes import FakeGroup, FakePlacement, Output

MODEL = "org/tiny"


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model's folder with a byte-level tokenizer."""
    return tokenizers.write(tokenizers.tiny(), tmp_path_factory.mktemp("model"))


@dataclass
class World:
    """What a test sees."""

    folder: str
    sockets: Path
    placement: FakePlacement
    groups: list[FakeGroup]
    http: httpx.AsyncClient
    openai: openai.AsyncOpenAI
    service: Service
    url: str
    grpc_address: str
    extra: dict[str, Any] = field(default_factory=dict)
    published: int = 0
    """How often the routes were set."""

    def ids(self, text: str) -> list[int]:
        return list(tokenizers.tiny().encode(text, add_special_tokens=False).ids)

    def say(self, text: str, *, end: bool = True) -> list[int]:
        """Both groups' engines say `text` from now on."""
        ids = self.ids(text)
        for group in self.groups:
            group.script = Output(ids, end=end)
        return ids

    async def publish(self, *routes: placement_pb2.Route, key: str = "") -> None:
        """Sets the routes and waits until the gateway has them; `key`: by which it answers, if it has keys."""
        self.published += 1
        for route in routes:
            route.measured_private_bytes = self.published  # whatever else of a route has changed, its card tells this
        self.placement.routes.set(list(routes))
        wanted = sorted((route.model.name, self.published) for route in routes)
        while True:
            cards = (await self.http.get("/v1/models", headers=self.bearer(key))).json()["data"]
            models = [card for card in cards if card["id"] == card["root"]]  # no aliases
            if sorted((card["id"], card["measured_private_bytes"]) for card in models) == wanted:
                return
            await asyncio.sleep(0.005)

    def bearer(self, key: str) -> dict[str, str]:
        return {"authorization": f"Bearer {key}"} if key else {}

    def route(self, *places: placement_pb2.Place, name: str = MODEL, **more: Any) -> placement_pb2.Route:
        return fakes.route(name, self.folder, *places, **more)

    def body(self, **more: Any) -> dict[str, Any]:
        return {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], **more}

    async def chat(self, **more: Any) -> httpx.Response:
        return await self.http.post("/v1/chat/completions", json=self.body(**more))

    async def complete(self, **more: Any) -> httpx.Response:
        return await self.http.post("/v1/completions", json={"model": MODEL, "prompt": "hello", **more})


@pytest.fixture
def stopped_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wall clock stands still. A gateway's counters forget requests while the next minute of it goes by, and a test
    may begin just before one."""
    now_s = time.time()
    monkeypatch.setattr("time.time", lambda: now_s)


@pytest.fixture
def settings() -> dict[str, Any]:
    """Of the gateway; a test module may override it."""
    return {}


@pytest.fixture
def waits() -> dict[str, float]:
    """How long the gateway waits where that is no setting (`gateway.__main__.build`); a test module may override it."""
    return {}


@pytest.fixture
def key() -> str:
    """By which the gateway answers a first question; of modules whose gateway has keys."""
    return ""


@pytest.fixture
async def world(
    tmp_path: Path, folder: str, settings: dict[str, Any], waits: dict[str, float], key: str
) -> AsyncIterator[World]:
    """The gateway with one model, active on the first of two groups."""
    placement = FakePlacement(str(tmp_path / "placement.sock"))
    groups = [FakeGroup(str(tmp_path / f"group{n}.sock"), Output([])) for n in range(2)]
    await asyncio.gather(placement.start(), *(group.start() for group in groups))
    port = free_port()
    config = GatewayConfig(
        name="gateway",
        listen=f"unix:{tmp_path}/gateway.sock",
        http=f"127.0.0.1:{port}",
        placement=placement.address,
        **{"drain_s": 5, **settings},
    )
    service = Service(config)
    await build(service, **waits)
    url = f"http://127.0.0.1:{port}"
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http:
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=http)
        world = World(folder, tmp_path, placement, groups, http, client, service, url, config.listen)
        await world.publish(world.route(fakes.place(groups[0])), key=key)
        yield world
    await service._end()
    await asyncio.gather(*(group.die() for group in groups))
    await placement.die()
