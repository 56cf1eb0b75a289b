"""A whole local system for tests: real processes, real sockets, in a folder of the test's own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import tempfile
import tomllib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import aiohttp

from deploy.local.processes import LocalSystem, SupervisedProcess
from deploy.local.topology import Local
from gpu_scheduler.client import GpuSchedulerClient
from loader.client import LoaderClient
from placement.client import PlacementClient
from protos import common_pb2, gpu_scheduler_pb2, placement_pb2
from services.errors import Conflict, PrismError
from testing import zygote
from testing.patience import PATIENCE_S
from testing.ports import free_port

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(os.environ.get("PRISM_TEST_MODELS", ROOT / "examples" / "models"))
MODELS = ("llama-debian", "qwen2-python", "qwen3-perl")


def catalogue(folder: Path, engine: str, models: dict[str, dict[str, Any]] | None = None) -> Path:
    """A catalogue file of the example models, or of others; the entry of each may add keys."""
    lines = []
    for name, keys in (models or {name: {} for name in MODELS}).items():
        own = {} if "base" in keys else {"engine": engine}  # an adapter has its base's
        entry = {"name": name, "path": str(FOLDER / name), **own, **keys}
        lines.append("[[model]]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in entry.items()))
    path = folder / "catalogue.toml"
    path.write_text("\n".join(lines))
    return path


async def until(condition: Any, what: str, timeout_s: float = PATIENCE_S) -> Any:
    """Waits until `condition()` (async) is true; the cluster's state changes are not pushed to tests."""
    async with asyncio.timeout(timeout_s):
        while True:
            value = await condition()
            if value:
                return value
            await asyncio.sleep(0.05)
    raise AssertionError(what)


async def lists(http: aiohttp.ClientSession, base: str, models: Iterable[str], **keys: Any) -> bool:
    """Whether the gateway at `base` knows all of these models. On a busy machine it may serve before placement has
    heard of any, and then answers 404."""
    async with http.get(base + "/v1/models", **keys) as answer:
        return answer.status == 200 and {*models} <= {model["id"] for model in (await answer.json())["data"]}


class World:
    """A running system and ways to talk to it."""

    def __init__(
        self, local: Local, system: LocalSystem, http: aiohttp.ClientSession, placement: PlacementClient
    ) -> None:
        self.local = local
        self.system = system
        self.http = http
        self.placement = placement
        self.base = f"http://{local.http}"
        self.bases = {"gateway": self.base}
        """Gateway process -> its URL."""

    async def post(self, path: str, body: Any, **keys: Any) -> tuple[int, Any]:
        async with self.http.post(self.base + path, json=body, **keys) as answer:
            return answer.status, await answer.json()

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.http.get(self.base + path) as answer:
            return answer.status, await answer.json()

    async def complete(self, model: str, prompt: Any, tokens: int, **keys: Any) -> dict[str, Any]:
        """A greedy completion that must succeed."""
        body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, **keys}
        status, answer = await self.post("/v1/completions", body)
        assert status == 200, answer
        return dict(answer)

    async def stream(
        self, model: str, prompt: Any, tokens: int, started: asyncio.Event | None = None, **keys: Any
    ) -> tuple[str, dict[str, Any], str]:
        """A greedy streamed completion that must succeed: (text, usage, finish_reason). `started` is set with its
        first text."""
        body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **keys,
        }
        text, finish, done = "", "", False
        usage: dict[str, Any] = {}
        async with self.http.post(self.base + "/v1/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
            async for line in answer.content:
                if not line.startswith(b"data: "):
                    continue
                data = line[6:].strip()
                if data == b"[DONE]":
                    done = True
                    break
                event = json.loads(data)
                assert "error" not in event, event
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    text += choice["text"]
                    finish = choice["finish_reason"] or finish
                    if started is not None and choice["text"]:
                        started.set()
        assert done, "a stream must end with [DONE]"
        return text, usage, finish

    async def resident(self, model: str) -> tuple[str, placement_pb2.GroupModel] | None:
        """(group, facts) of the model where it is, active places first."""
        found = [(g.group, m) for g in (await self.placement.cluster()).groups for m in g.models if m.model == model]
        found.sort(key=lambda pair: pair[1].residency != common_pb2.ACTIVE)
        return found[0] if found else None

    async def measured(self, model: str) -> gpu_scheduler_pb2.Resident:
        """What the group that has the model tells of it."""
        resident = await self.told_of(model)
        assert resident is not None, f"{model} is on no group"
        return resident

    async def told_of(self, model: str) -> gpu_scheduler_pb2.Resident | None:
        """The same; None where no group has it. Placement hears of it a moment later."""
        for group in self.local.group_names:
            client = GpuSchedulerClient(self.local.unix(self.local.scheduler(group)))
            try:
                async with contextlib.aclosing(client.watch()) as states:
                    async for state in states:
                        for resident in state.residents if state is not None else ():
                            if resident.model == model:
                                return resident
                        break
            finally:
                await client.close()
        return None

    async def until(self, condition: Any, what: str, timeout_s: float = PATIENCE_S) -> Any:
        return await until(condition, what, timeout_s)

    async def all_heard(self) -> None:
        """Returns when placement hears all groups, and every gateway lists all models."""
        models = [model["name"] for model in tomllib.loads(self.local.catalogue.read_text())["model"]]

        async def heard() -> bool:
            reachable = all(group.reachable for group in (await self.placement.cluster()).groups)
            return reachable and all([await lists(self.http, base, models) for base in self.bases.values()])

        await self.until(heard, "groups or models are missing")

    async def wait_residency(self, model: str, residency: common_pb2.Residency, timeout_s: float = PATIENCE_S) -> None:
        async def there() -> bool:
            return any(
                route.model.name == model and route.residency == residency
                for route in (await self.placement.routes()).routes
            )

        await self.until(there, f"{model} never was {common_pb2.Residency.Name(residency)}", timeout_s)

    async def evict(self, model: str, target: common_pb2.Residency) -> common_pb2.Residency:
        """Brings a model down once it is up; the residency that it has then."""
        return await self._ordered(model, lambda: self.placement.evict(model, target), "brought down")

    async def migrate(self, model: str, to_group: str) -> None:
        """Moves a model once it is up."""
        await self._ordered(model, lambda: self.placement.migrate(model, to_group), "moved")

    async def replicate(self, model: str, to_group: str = "") -> None:
        """Brings a model up on one group more once it is up."""
        await self._ordered(model, lambda: self.placement.replicate(model, to_group), "brought up on another group")

    async def _ordered(self, model: str, order: Callable[[], Awaitable[T]], what: str) -> T:
        """Placement's answer to an order for a model, once that is up. It takes requests before its group has ended the
        change that brought it up, and refuses another one that long."""
        await self.wait_residency(model, common_pb2.ACTIVE)

        async def carried_out() -> tuple[T] | None:
            if any(decision.outcome == "under way" for decision in await self.placement.explain(model, limit=1)):
                return None
            with contextlib.suppress(Conflict):  # a group starts a model by itself when its engine died
                return (await order(),)
            return None

        (answer,) = await self.until(carried_out, f"{model} is not {what}")
        return answer  # type: ignore[no-any-return]

    async def away(self, model: str) -> None:
        """Returns when the model is on no group."""

        async def gone() -> bool:
            if await self.told_of(model) is None and await self.resident(model) is None:
                return True
            with contextlib.suppress(PrismError):  # on its way up, or to another group
                await self.placement.evict(model, common_pb2.COLD)
            return False

        await self.until(gone, f"{model} does not leave")

    async def rest(self) -> None:
        """As after the start: no model is on a group, and host memory has no image. For tests that share a system."""
        loader = LoaderClient(self.local.unix("loader"))
        for name in [route.model.name for route in (await self.placement.routes()).routes]:

            async def nothing_under_way(name: str = name) -> bool:
                return not (await loader.state(name)).under_way

            await self.away(name)
            await self.until(nothing_under_way, f"the loader does not end what is under way for {name}")
            await loader.drop_image(name)
        await loader.close()

    def engine_pids(self) -> list[int]:
        """Engine processes of all groups."""
        pids = []
        for name, running in self.system.running.items():
            if name.startswith("gpu_scheduler"):
                children = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
                pids += [pid for pid in map(int, children) if not zygote.is_one(pid)]
        return pids

    def kill(self, name: str) -> None:
        """SIGKILL, no goodbye; the supervisor starts it again."""
        os.kill(self.system.running[name].pid, signal.SIGKILL)

    @contextlib.asynccontextmanager
    async def without(self, name: str) -> AsyncIterator[None]:
        """The process is killed, and started again when the block is left."""
        old = self.system.running[name]
        await old.kill()
        try:
            yield
        finally:
            self.system.running[name] = SupervisedProcess(old.spec, old.log_path.parent, print)
            await self.system.running[name].start()


def print_ends(logs: Path) -> None:
    """The last lines of each, in folders below too, for who reads why a test failed."""
    for log in sorted(logs.rglob("*.log")):
        print(f"--- {log.relative_to(logs)}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-25:]))


@contextlib.asynccontextmanager
async def world(
    engine: str,
    models: dict[str, dict[str, Any]] | None = None,
    *,
    options: dict[str, str] | None = None,
    gateway: dict[str, Any] | None = None,
    **local: Any,
) -> AsyncIterator[World]:
    """A system that serves; ends it whatever happens, and shows the logs' last lines when the test failed."""
    # Unix socket paths are short; pytest's folders are not.
    state = Path(tempfile.mkdtemp(prefix="prism-"))
    plan = Local(
        state=state,
        catalogue=catalogue(state, engine, models),
        http=f"127.0.0.1:{free_port()}",
        engine=engine,
        engine_options=options or {},
        gateway={"park_time_out_s": PATIENCE_S, "reach_time_out_s": PATIENCE_S, **(gateway or {})},
        **local,
    )
    system = LocalSystem(plan.processes(), state / "logs", print)
    try:
        await system.start()
        placement = PlacementClient(plan.unix("placement"))
        async with aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=PATIENCE_S), connector=aiohttp.TCPConnector(limit=0)
        ) as http:
            it = World(plan, system, http, placement)
            if "keys_file" not in plan.gateway:  # who has one asks with it
                await it.all_heard()
            yield it
        await placement.close()
    except BaseException:
        print_ends(state / "logs")
        raise
    finally:
        await system.end()
        shutil.rmtree(state, ignore_errors=True)
