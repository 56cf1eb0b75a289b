"""What one placement process does for a fleet: real gRPC, groups and a loader that are stand-ins.

    python benchmarks/placement_fleet.py [--groups 32,128,512,1000] [--models 64] [--seconds 10]

Eight groups are a node, with a loader that lists all models and a balloond whose ledger changes all the time. Each
group has its share of the models, two thirds of them awake and busy: every 0.1 s it has counted more tokens, as one
does whose engines decode. Of the others some are asked for, one after the other (`Activate`), while all of it goes on.
Reported for each number of groups, in seconds:

    core       of a core that placement used, of each second
    reports    that groups and balloonds sent it in a second, all together
    age        how old what it says of a group is (`GetCluster`), as groups' clocks tell
    activate   a call of `Activate`, until its answer: a group was chosen, and has begun
    routed     from the call to the route that has the model there, as a gateway hears it

Stand-ins take a core as well, and more than placement does. Where they cannot send what a fleet would send, `reports`
shows it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import services.ipc.forking  # noqa: F401  (before grpc: this starts processes)

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import uvloop

from benchmarks import _report
from gpu_scheduler.report.report_rate import telling
from placement.client import PlacementClient
from protos import (
    balloond_pb2,
    balloond_pb2_grpc,
    common_pb2,
    gpu_scheduler_pb2,
    gpu_scheduler_pb2_grpc,
    loader_pb2,
    loader_pb2_grpc,
)
from services.rpc import rpc

GIB = 1 << 30
GROUP, LOADER, BALLOOND = "prism.gpu_scheduler.v1.GpuScheduler", "prism.loader.v1.Loader", "prism.balloond.v1.Balloond"
OF_A_NODE = 8
SIZES = "32,128,512,1000"
EVERY_S = 0.1
_ASKED = 40
_HEARD_S = 60.0
_MODEL = common_pb2.ModelSpec(
    weights_bytes=3 * GIB, floor_bytes=GIB // 4, quota_bytes=GIB, kv_bytes_per_token=131072, path="/"
)


def model(number: int) -> common_pb2.ModelSpec:
    spec = common_pb2.ModelSpec(name=f"m{number}")
    spec.MergeFrom(_MODEL)
    return spec


class Group(gpu_scheduler_pb2_grpc.GpuSchedulerServicer):
    """Takes every order at once, and counts."""

    def __init__(self, name: str, address: str, node: str, models: list[int]) -> None:
        self.sent = 0
        self._state = gpu_scheduler_pb2.GroupState(group=name, address=address, node=node)
        self._state.memory.add(device=name, capacity_bytes=80 * GIB, free_bytes=60 * GIB)
        for number in models:
            self._state.memory[0].bookings.add(model=f"m{number}", quota_bytes=GIB, weights_bytes=3 * GIB)
        for place, number in enumerate(models):
            awake = place % 3 < 2
            self._state.residents.add(
                model=f"m{number}",
                residency=common_pb2.ACTIVE if awake else common_pb2.HIBERNATING,
                running=int(awake),
                idle_s=0.0 if awake else 60.0,
                active_s=60.0 if awake else 0.0,
                weights_bytes=3 * GIB,
                quota_bytes=GIB,
                kept_bytes=600 << 20,
                wake_s=0.1,
                cold_s=3.0,
            )

    @property
    def memory(self) -> balloond_pb2.DeviceState:
        return self._state.memory[0]

    def asleep(self) -> list[str]:
        return [r.model for r in self._state.residents if r.residency == common_pb2.HIBERNATING]

    async def Watch(self, request: gpu_scheduler_pb2.WatchRequest, context: Any) -> Any:
        sparing = telling(getattr(request, "figures_ms", 0) / 1e3)
        while True:
            for resident in self._state.residents:
                if resident.running:
                    resident.decode_tokens += 50
                    resident.kv_held_bytes = int(1e6 * time.monotonic())
            self._state.revision += 1
            if not sparing.wait_s(self._state, time.monotonic()):
                self.sent += 1
                yield self._state
            await asyncio.sleep(EVERY_S)

    async def SetResidency(self, request: gpu_scheduler_pb2.SetResidencyRequest, context: Any) -> Any:
        name = request.model.name
        (resident,) = [r for r in self._state.residents if r.model == name] or [self._state.residents.add(model=name)]
        resident.idle_s, resident.residency = 0.0, request.target
        yield gpu_scheduler_pb2.ResidencyProgress(residency=request.target)


class Balloond(balloond_pb2_grpc.BalloondServicer):
    """Every 0.05 s a page more is somebody's."""

    def __init__(self, name: str, groups: list[Group]) -> None:
        self.sent = 0
        self._name, self._groups = name, groups

    async def Watch(self, request: balloond_pb2.WatchRequest, context: Any) -> Any:
        every_s = max(0.05, min(1.0, getattr(request, "pages_ms", 0) / 1e3))
        while True:
            self.sent += 1
            for group in self._groups:
                group.memory.free_bytes ^= 1 << 21
            yield balloond_pb2.NodeState(node=self._name, devices=[group.memory for group in self._groups])
            await asyncio.sleep(every_s)


class Loader(loader_pb2_grpc.LoaderServicer):
    def __init__(self, models: int) -> None:
        self._entries = [loader_pb2.Entry(model=model(number), has_image=True) for number in range(models)]

    async def Watch(self, request: loader_pb2.WatchRequest, context: Any) -> Any:
        yield loader_pb2.Catalogue(revision=1, entries=self._entries)
        await asyncio.Event().wait()


def addresses(folder: Path, groups: int) -> list[str]:
    return [f"unix:{folder}/{number}.sock" for number in range(groups)]


def nodes(folder: Path, groups: int) -> list[tuple[str, str]]:
    """Where the loaders and balloonds are."""
    count = -(-groups // OF_A_NODE)
    return [(f"unix:{folder}/loader-{number}.sock", f"unix:{folder}/balloond-{number}.sock") for number in range(count)]


async def stand_in(folder: Path, groups: int, models: int) -> None:
    """All of a fleet but placement. Writes how many reports were sent, once a second."""
    servers, here, balloonds = [], list[Group](), list[Balloond]()

    async def serve(address: str, adder: Any, servicer: Any, name: str) -> None:
        servers.append(rpc.Server(address))
        servers[-1].add(adder, servicer, name)
        await servers[-1].start()

    for number, address in enumerate(addresses(folder, groups)):
        group = Group(f"g{number}", address, f"n{number // OF_A_NODE}", list(range(number, models, groups)))
        here.append(group)
        await serve(address, gpu_scheduler_pb2_grpc.add_GpuSchedulerServicer_to_server, group, GROUP)
    for number, (loader, balloond) in enumerate(nodes(folder, groups)):
        balloonds.append(Balloond(f"n{number}", here[OF_A_NODE * number : OF_A_NODE * (number + 1)]))
        await serve(balloond, balloond_pb2_grpc.add_BalloondServicer_to_server, balloonds[-1], BALLOOND)
        await serve(loader, loader_pb2_grpc.add_LoaderServicer_to_server, Loader(models), LOADER)
    (folder / "asleep").write_text("\n".join(name for group in here for name in group.asleep()[:1]))
    (folder / "up").touch()
    while True:
        (folder / "sent").write_text(str(sum(each.sent for each in [*here, *balloonds])))
        await asyncio.sleep(1.0)


def core_s(pid: int) -> float:
    """That a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.asynccontextmanager
async def started(*arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(sys.executable, *arguments)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def until(there: Any, what: str) -> None:
    async with asyncio.timeout(_HEARD_S):
        while not there():
            await asyncio.sleep(0.05)
    print(f"  {what}", file=sys.stderr)


async def measured(groups: int, models: int, seconds: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        loaders, balloonds = zip(*nodes(folder, groups), strict=True)
        config = folder / "placement.toml"
        config.write_text(
            f'name = "placement"\nlog_level = "error"\nlisten = "unix:{folder}/placement.sock"\n'
            f"groups = {addresses(folder, groups)}\nloaders = {list(loaders)}\nballoond = {list(balloonds)}\n"
        )
        itself = str(Path(__file__).resolve())
        async with started(itself, "--stand-in", str(folder), "--groups", str(groups), "--models", str(models)):
            await until((folder / "up").exists, f"{groups} groups are up")
            async with started("-m", "placement", "--config", str(config)) as placement:
                await until((folder / "placement.sock").exists, "placement is up")
                client = PlacementClient(f"unix:{folder}/placement.sock")
                try:
                    return await _measured(client, placement.pid, folder, groups, seconds)
                finally:
                    await client.close()


async def _measured(client: PlacementClient, pid: int, folder: Path, groups: int, seconds: float) -> dict[str, Any]:
    async with asyncio.timeout(_HEARD_S):
        while sum(group.reachable for group in (await client.cluster()).groups) < groups:
            await asyncio.sleep(0.2)
    await asyncio.sleep(2.0)
    names = iter((folder / "asleep").read_text().split())
    routed: dict[str, asyncio.Event] = {}
    follower = asyncio.get_running_loop().create_task(_follow(client, routed))
    sent, used, began = _sent(folder), core_s(pid), time.monotonic()
    ages, calls, routes = list[float](), list[float](), list[float]()
    try:
        while (passed := time.monotonic() - began) < seconds:
            for at, times in await _asked(client, names, routed, int(passed / seconds * _ASKED) - len(calls)):
                calls.append(at)
                routes.append(times)
            ages += _ages(await client.cluster())
            await asyncio.sleep(0.5)
        passed = time.monotonic() - began
        return {
            "groups": groups,
            "core": (core_s(pid) - used) / passed,
            "reports": (_sent(folder) - sent) / passed,
            "age_s": _report.spread(ages),
            "activate_s": _report.spread(calls),
            "routed_s": _report.spread(routes),
        }
    finally:
        follower.cancel()


def _sent(folder: Path) -> int:
    text = (folder / "sent").read_text() if (folder / "sent").exists() else ""
    return int(text or 0)


def _ages(cluster: Any) -> list[float]:
    now = time.monotonic()
    return [now - max(m.kv_held_bytes for m in group.models) / 1e6 for group in cluster.groups if group.models]


async def _asked(
    client: PlacementClient, names: Iterator[str], routed: dict[str, asyncio.Event], count: int
) -> list[tuple[float, float]]:
    found = []
    for name in [name for _, name in zip(range(count), names, strict=False)]:
        routed[name] = asyncio.Event()
        began = time.monotonic()
        await client.activate(name)
        called = time.monotonic() - began
        async with asyncio.timeout(_HEARD_S):
            await routed[name].wait()
        found.append((called, time.monotonic() - began))
    return found


async def _follow(client: PlacementClient, routed: dict[str, asyncio.Event]) -> None:
    async for routes in client.watch_routes():
        for route in routes.routes if routes is not None else ():
            if route.places and route.model.name in routed:
                routed[route.model.name].set()


def main() -> None:
    parser = _report.arguments("placement_fleet", str(__doc__))
    parser.add_argument("--groups", default=SIZES, help="(default: %(default)s)")
    parser.add_argument("--models", type=int, default=64, help="at least; four for each group")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--stand-in", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.stand_in:
        uvloop.run(stand_in(given.stand_in, int(given.groups), given.models))
        return
    rows = []
    for groups in map(int, given.groups.split(",")):
        models = max(given.models, 4 * groups)
        found = {"models": models, **asyncio.run(measured(groups, models, given.seconds))}
        rows.append(found)
        figures = [f"core {found['core']:.2f}", f"reports {found['reports']:.0f}/s"]
        for key in ("age_s", "activate_s", "routed_s"):
            figures.append(f"{key} {found[key]['p50']:.3f}, p99 {found[key]['p99']:.3f}")
        print(f"{groups} groups, {models} models: {'; '.join(figures)}", flush=True)
    _report.write(given.out, "placement_fleet", {"rows": rows})


if __name__ == "__main__":
    main()
