"""A fleet for tests: nodes in network namespaces, speaking TCP with placement and gateway, which run outside of them.

Node b has its own copy of the models' files, where the kernel allows it a monotonic clock that is a day ahead, and
where libfaketime is installed a calendar that is two days ahead: none of it may matter. Node b has these clocks until
it is started again, and those of its host from then on.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import tomli_w

from deploy.local.processes import LocalSystem
from deploy.local.topology import Process
from placement.client import PlacementClient
from protos import common_pb2
from services.errors import PrismError
from testing import faketime
from testing.fleet.network import Network
from testing.patience import PATIENCE_S
from testing.ports import free_port
from testing.systems.local import FOLDER, MODELS, ROOT, World, catalogue, print_ends

NODES = ("a", "b")
NAME = "nodes.prism.test"
"""Of all nodes, for placement."""
DEVICE = "cpu:0"
PROMPT = list(range(20, 60))
_BALLOOND, _LOADER, _GROUP = 7001, 7002, 7010


def group_name(node: str) -> str:
    return f"{node}/{DEVICE}"


def _another_clock() -> tuple[str, ...]:
    """A command that becomes one whose monotonic clock is a day ahead."""
    command = ("unshare", "--time", "--monotonic", "86400")
    tried = subprocess.run([*command, "true"], capture_output=True)
    return command if tried.returncode == 0 else ()


class Node:
    """The processes of one."""

    def __init__(self, name: str, state: Path, network: Network, models: Path) -> None:
        self.name = name
        self.state = state / name
        self.state.mkdir()
        self.address = network.address(name)
        self._network = network
        self.models = models
        """The folder of its models' files."""
        self.under: tuple[str, ...] = ("ip", "netns", "exec", network.namespace(name))
        self._clocks: tuple[str, ...] = ()
        """A command under which its processes have other clocks, in its first life: they are new interpreters then."""
        if name != NODES[0]:
            self._clocks = _another_clock() + (faketime.ahead(2) if faketime.INSTALLED else ())
        self.group = f"{self.address}:{_GROUP}"
        self.loader = f"{self.address}:{_LOADER}"
        self.balloond = f"{self.address}:{_BALLOOND}"
        self.system: LocalSystem | None = None

    def _processes(self, version: str, under: tuple[str, ...]) -> list[Process]:
        keeper, handoff = str(self.state / "keeper.sock"), str(self.state / "handoff.sock")
        plan = [Process("keeper", "balloond.keeper", ("--socket", keeper), keeper, under=under)]
        listed = catalogue(self.state, "echo", {model: {"path": str(self.models / model)} for model in MODELS})

        def add(name: str, module: str, after: tuple[str, ...], probe: str, config: dict[str, Any]) -> None:
            path = self.state / f"{name}.toml"
            listen = f"0.0.0.0:{probe.rpartition(':')[2]}"
            path.write_text(tomli_w.dumps({"name": name, "listen": listen, "log_format": "json", **config}))
            arguments: tuple[str, ...] = ("--config", str(path))
            if version:
                module, arguments = "testing.fleet.as_version", (version, module, *arguments)
            plan.append(Process(name, module, arguments, probe, after, under))

        devices = [{"name": DEVICE, "capacity_bytes": 64 << 20}]
        own = {"keeper": keeper, "handoff": handoff}
        add("balloond", "balloond", ("keeper",), self.balloond, {"node": self.name, "devices": devices, **own})
        host = {"catalogue": str(listed), "host_capacity_bytes": 256 << 20}
        add("loader", "loader", ("balloond",), self.loader, {**host, **own})
        config = {
            "group": group_name(self.name),
            "devices": [DEVICE],
            "balloond": f"127.0.0.1:{_BALLOOND}",
            "balloond_handoff": handoff,
            "loader": f"127.0.0.1:{_LOADER}",
            "engines": {"kind": "echo", "warm": 1, "limit": 4, "options": {"step_ms": "20"}},
        }
        add("gpu_scheduler", "gpu_scheduler", ("balloond", "loader"), self.group, config)
        return plan

    async def start(self, version: str = "") -> None:
        """All its processes; `version`: of the protocol that its services speak, if it is not ours."""
        under, self._clocks = self.under + self._clocks, ()
        self.system = LocalSystem(self._processes(version, under), self.state / "logs", print)
        await self.system.start()

    async def kill(self) -> None:
        """All of them, its engines too, at once."""
        assert self.system is not None
        await self.system.kill()
        for pid in self._network.pids(self.name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.system = None

    async def end(self) -> None:
        if self.system is not None:
            await self.system.end()

    async def requests(self, model: str) -> tuple[int, int]:
        """(requests that it has, tokens that it made) of a model, as its gpu_scheduler says on the node itself: it may
        be cut off."""
        ask = await asyncio.create_subprocess_exec(
            *(*self.under, sys.executable, "-m", "testing.fleet.asked", self.group),
            stdout=asyncio.subprocess.PIPE,
            cwd=ROOT,
        )
        out, _ = await ask.communicate()
        found = [line.split() for line in out.decode().splitlines()]
        return next(((int(has), int(made)) for name, has, made in found if name == model), (0, 0))


class Fleet(World):
    """Nodes, placement, gateway."""

    def __init__(self, state: Path, network: Network, nodes: dict[str, Node]) -> None:
        self.state = state
        self.network = network
        self.nodes = nodes
        self._plan = self._control()
        self.control = LocalSystem(self._plan, state / "logs", print)

    def _resolving(self) -> tuple[str, ...]:
        """A command under which names are looked up in the fleet's own file of hosts."""
        self.hosts = self.state / "hosts"
        self.resolve(*self.nodes)
        return "unshare", "--mount", "sh", "-c", f'mount --bind {self.hosts} /etc/hosts && exec "$@"', "sh"

    def resolve(self, *nodes: str) -> None:
        """NODES is the name of these from now on."""
        self.hosts.write_text("".join(f"{self.nodes[node].address} {NAME}\n" for node in nodes))

    def configure(self, **settings: Any) -> None:
        """Placement's file has these from now on."""
        path = self.state / "placement.toml"
        fresh = path.with_suffix(".new")  # it is never seen half written
        fresh.write_text(tomli_w.dumps(tomllib.loads(path.read_text()) | settings))
        fresh.rename(path)

    def _control(self) -> list[Process]:
        """Placement, a gateway that waits as long as a test may, and one that gives up soon."""
        http, soon = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
        placement = f"127.0.0.1:{free_port()}"
        configs: dict[str, dict[str, Any]] = {
            "placement": {
                "listen": placement,
                "groups": [f"dns:{NAME}:{_GROUP}"],
                "loaders": [f"dns:{NAME}:{_LOADER}"],
                "balloond": [f"dns:{NAME}:{_BALLOOND}"],
                "look_up_s": 0.2,
                "idle_s": 0.2,
                "drain_ms": 200,
                "rebalance": False,
            },
            "gateway": {"http": http, "park_time_out_s": PATIENCE_S, "reach_time_out_s": PATIENCE_S},
            "gateway-soon": {"http": soon, "reach_time_out_s": 2.0},
        }
        plan = []
        for name, config in configs.items():
            module = name.partition("-")[0]
            after = ("placement",) if module == "gateway" else ()
            if module == "gateway":
                config |= {"listen": f"unix:{self.state}/{name}.sock", "placement": placement}
            path = self.state / f"{name}.toml"
            path.write_text(tomli_w.dumps({"name": name, "log_format": "json", **config}))
            under = self._resolving() if name == "placement" else ()
            plan.append(Process(name, module, ("--config", str(path)), str(config["listen"]), after, under))
        self.local = SimpleNamespace(http=http)  # type: ignore[assignment]
        self.base = f"http://{http}"
        self.base_soon = f"http://{soon}"
        self.placement = PlacementClient(placement)
        return plan

    async def start(self) -> None:
        await asyncio.gather(*(node.start() for node in self.nodes.values()))
        await self.control.start()

    async def end(self) -> None:
        await self.placement.close()
        await self.control.end()
        await asyncio.gather(*(node.end() for node in self.nodes.values()))

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        """placement or the gateway; the supervisor starts it again if that ends it."""
        os.kill(self.control.running[name].pid, number)

    def said(self, name: str, event: str) -> list[dict[str, Any]]:
        """Such lines of the log of placement or the gateway."""
        lines = (self.state / "logs" / f"{name}.log").read_text(errors="replace").splitlines()
        parsed = [json.loads(line) for line in lines if line.startswith("{")]
        return [line for line in parsed if line.get("event") == event]

    async def reachable(self) -> set[str]:
        """Nodes whose groups placement hears."""
        groups = (await self.placement.cluster()).groups
        return {name for name, node in self.nodes.items() for g in groups if g.reachable and g.address == node.group}

    async def named(self) -> set[str]:
        """Nodes whose groups placement knows of, there or not."""
        groups = (await self.placement.cluster()).groups
        return {name for name, node in self.nodes.items() for g in groups if g.address == node.group}

    async def knows(self, *nodes: str) -> bool:
        """Whether it knows of exactly these."""
        return await self.named() == set(nodes)

    async def looked_up(self, *nodes: str) -> bool:
        """Whether that was the last answer."""
        lines = self.said("placement", "name looked up")
        return bool(lines) and lines[-1]["addresses"] == sorted(self.nodes[node].address for node in nodes)

    async def heard(self, *nodes: str) -> None:
        """Returns when placement hears exactly these."""

        async def so() -> bool:
            try:
                return await self.reachable() == set(nodes)
            except PrismError:
                return False

        await self.until(so, f"not {nodes}")

    async def whole(self) -> None:
        """Both nodes run, are connected, named and heard; every model is on one of them at most."""
        self.resolve(*self.nodes)
        for node in self.nodes.values():
            self.network.mend(node.name)
            if node.system is None:
                await node.start()
        await self.heard(*self.nodes)
        await self.settled()

    async def settled(self) -> None:
        async def once() -> bool:
            places = [m.model for g in (await self.placement.cluster()).groups for m in g.models]
            return len(places) == len(set(places))

        await self.until(once, "a model stays on two nodes")

    async def places(self, model: str) -> list[str]:
        """Nodes to which requests for a model are sent."""
        routes = (await self.placement.routes()).routes
        where = [p.group for r in routes for p in r.places if r.model.name == model]
        return [node for node in self.nodes if group_name(node) in where]

    async def on(self, model: str, node: str) -> None:
        """The model serves on the node and nowhere else."""
        await self.complete(model, PROMPT, 2)
        await self.wait_residency(model, common_pb2.ACTIVE)
        if await self.places(model) != [node]:
            await self.migrate(model, group_name(node))

        async def there() -> bool:
            return await self.places(model) == [node]

        await self.until(there, f"{model} is not on {node}")

    async def streams(self, model: str, tokens: int, count: int = 4) -> list[asyncio.Task[Told]]:
        """So many open streams, all past their first token."""
        started = [asyncio.Event() for _ in range(count)]
        loop = asyncio.get_running_loop()
        streams = [
            loop.create_task(self.timed(model, [7 + i, *PROMPT], tokens, event)) for i, event in enumerate(started)
        ]
        async with asyncio.timeout(PATIENCE_S):
            for event in started:
                await event.wait()
        return streams

    async def undisturbed(self, model: str, tokens: int, count: int = 4) -> list[str]:
        told = await asyncio.gather(*(self.timed(model, [7 + i, *PROMPT], tokens) for i in range(count)))
        return [each.text for each in told]

    async def timed(self, model: str, prompt: Any, tokens: int, started: asyncio.Event | None = None) -> Told:
        """A greedy stream that must succeed, with the longest time between two of its pieces."""
        body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True}
        text, gap, last = "", 0.0, time.monotonic()
        async with self.http.post(self.base + "/v1/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
            async for line in answer.content:
                if line.startswith(b"data: ["):
                    return Told(text, gap)
                if not line.startswith(b"data: "):
                    continue
                event = json.loads(line[6:])
                assert "error" not in event, event
                now = time.monotonic()
                gap, last = max(gap, now - last if text else 0.0), now
                text += event["choices"][0]["text"]
                if started is not None and text:
                    started.set()
        raise AssertionError("a stream must end with [DONE]")


@dataclasses.dataclass(frozen=True)
class Told:
    """What a stream said, and how many seconds it paused at most."""

    text: str
    gap_s: float


@contextlib.asynccontextmanager
async def fleet() -> AsyncIterator[Fleet]:
    """Two nodes that serve; ends all whatever happens, and shows the logs' last lines when the test failed."""
    state = Path(tempfile.mkdtemp(prefix="prism-"))
    try:
        with Network(NODES) as network:
            copy = state / "models"
            shutil.copytree(FOLDER, copy)
            nodes = {name: Node(name, state, network, FOLDER if name == NODES[0] else copy) for name in NODES}
            it = Fleet(state, network, nodes)
            try:
                it.http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=PATIENCE_S))
                async with it.http:
                    await it.start()
                    yield it
            except BaseException:
                print_ends(state)
                raise
            finally:
                for node in nodes.values():
                    network.mend(node.name)
                await it.end()
                faketime.forget_the_dead()
    finally:
        shutil.rmtree(state, ignore_errors=True)
