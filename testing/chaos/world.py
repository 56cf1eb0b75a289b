"""The system that faults happen to: two groups, two gateways, three models under load and one that is away until it is
asked for."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import shutil
import subprocess
import tempfile
import time
import tomllib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import tomli_w

from balloond.client import BalloondClient
from deploy.healthy import healthy
from deploy.local.processes import LocalSystem
from deploy.local.topology import Local, Process
from gateway.access import keys as gateway_keys
from gpu_scheduler.client import GpuSchedulerClient
from loader.client import LoaderClient
from placement.client import PlacementClient
from services.runtime import tasks
from testing import faketime
from testing.chaos.ledger_audit import LedgerAudit, held
from testing.chaos.load import Load, body
from testing.patience import PATIENCE_S
from testing.ports import free_port
from testing.systems.local import FOLDER, MODELS, World, catalogue, print_ends

SPARE = "spare"
DEVICES = {"cpu:0": 64 << 20, "cpu:1": 64 << 20}
STEP_MS = 100
"""Of a decode step: 50 streams are then 500 tokens a second."""
_DISK_BYTES = 160 << 20


class KeyFile:
    """A gateway's file of keys: one that may do everything, and as many more as somebody likes."""

    def __init__(self) -> None:
        self.bearer = gateway_keys.new()

    def write(self, path: Path, more: int = 0) -> None:
        """In one go, as a mounted file changes."""
        secrets = {"load": self.bearer, **{f"other-{i}": gateway_keys.new() for i in range(more)}}
        entries = [
            f'[[key]]\nname = "{name}"\nhash = "{gateway_keys.digest(secret)}"\nadmin = true\n'
            for name, secret in secrets.items()
        ]
        fresh = path.with_suffix(".new")
        fresh.write_text("\n".join(entries))
        fresh.replace(path)


class Chaos(World):
    """A world under a load, which can tell when it serves in full again and what is left behind."""

    def __init__(
        self,
        local: Local,
        system: LocalSystem,
        http: aiohttp.ClientSession,
        placement: PlacementClient,
        bases: dict[str, str],
        models: list[str],
        streams: int,
    ) -> None:
        super().__init__(local, system, http, placement)
        self.bases = bases
        self.models = models
        """Under load."""
        self.load = Load(http, list(bases.values()), models, streams)
        self.spare_errors: list[str] = []
        """What was answered for it instead of its text."""
        self.balloond = BalloondClient(local.unix("balloond"))
        self.loader = LoaderClient(local.unix("loader"))

    async def close(self) -> None:
        await self.balloond.close()
        await self.loader.close()

    def pids(self) -> list[int]:
        """Of everything that runs."""
        return [running.pid for running in self.system.running.values()] + self.engine_pids()

    def name_of(self, process: str) -> str:
        """In the plan; of gpu_schedulers the first."""
        return self.local.scheduler("cpu:0") if process == "gpu_scheduler" else process

    def pid_of(self, process: str) -> int:
        return self.system.running[self.name_of(process)].pid

    def set_clock(self, days: int) -> None:
        """How far everybody's time of day is ahead; for a world of `clock`."""
        faketime.write(_clock(self.local.state), days)

    def taken_up_again(self) -> int:
        """Streams so far that went on at another place, or at their own one again, after their first token."""
        logs = [self.local.state / "logs" / f"{name}.log" for name in self.bases]
        # A line that is being written would count now and, whole, no more.
        whole = [log.read_text(errors="replace").rpartition("\n")[0] for log in logs]
        lines = [line for text in whole for line in text.splitlines()]
        return sum('"stream paused"' in line and '"emitted": 0,' not in line for line in lines)

    async def prepare(self) -> None:
        """All models under load are up, and the spare one is away with an image in host memory."""
        await asyncio.gather(*(self.complete(model, [5, 6, 7], 2) for model in (*self.models, SPARE)))
        for model in (*self.models, SPARE):

            async def imaged(model: str = model) -> bool:
                state = await self.loader.state(model)
                return state.entry.has_image and not state.under_way

            await self.until(imaged, f"no image of {model} is made")
        await self.away(SPARE)

    async def full_service(self, since: float, replaced: dict[str, int]) -> float:
        """Seconds from `since`, on the monotonic clock, until all processes are healthy, those of `replaced` with
        another pid than there, every stream has gone on, and each gateway has answered for the spare model, which was
        away."""

        async def serves(base: str) -> None:
            request = {**body(SPARE, 0, 4), "stream": False}
            while True:
                with contextlib.suppress(aiohttp.ClientError):
                    async with self.http.post(base + "/v1/completions", json=request) as answer:
                        if answer.status == 200:
                            return
                        self.spare_errors.append(f"{answer.status} {await answer.text()}")
                await asyncio.sleep(0.1)

        async def runs(name: str) -> None:
            running = self.system.running[name]
            while running.pid == replaced.get(name) or not await healthy(running.spec.probe, timeout_s=1.0):
                await asyncio.sleep(0.05)

        async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
            for name in self.system.running:
                group.create_task(runs(name))
            for base in self.bases.values():
                group.create_task(serves(base))
            group.create_task(self.load.all_told_since(since))
        return time.monotonic() - since

    async def left_behind(self) -> tuple[int, int]:
        """(bytes by the ledger, bytes by the kernel) that are still taken when no request runs and no model is up and
        there is no image. What goes away by itself is waited for, as long as tests wait."""

        async def idle() -> bool:
            for group in self.local.group_names:
                client = GpuSchedulerClient(self.local.unix(self.local.scheduler(group)))
                state = await client.state()
                await client.close()
                if any(resident.running + resident.waiting for resident in state.residents):
                    return False
            return True

        await self.until(idle, "requests run on without a client")
        books = LedgerAudit(self.balloond)
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            # Again: what asked for a model may have been under way, and an image that can be dropped is not lost.
            await self.rest()
            if not await books.taken() and not held(self.pids()):
                break
            await asyncio.sleep(1)
        return await books.taken(), held(self.pids())


@contextlib.asynccontextmanager
async def chaos(
    streams: int = 50,
    *,
    small_disk: bool = False,
    step_ms: int = STEP_MS,
    under: tuple[str, ...] = (),
    models: dict[str, dict[str, Any]] | None = None,
    keys: KeyFile | None = None,
    images_on_disk: bool = False,
    clock: bool = False,
    host_capacity_bytes: int = 256 << 20,
    metrics_port: int = 0,
    left_out: Mapping[str, str] | None = None,
    patient: bool = False,
) -> AsyncIterator[Chaos]:
    """A system that serves; ends it whatever happens, and shows the logs' last lines when that was a failure.
    `small_disk`: all its files lie on a tmpfs of its own (needs root). `under`: of every process. `models`: the
    catalogue's entries of those under load, by default the examples. `keys`: which both gateways ask for.
    `host_capacity_bytes`: of weight images. `clock`: their time of day can be set (needs libfaketime).
    `metrics_port`: the first of a row of ports for services that tell their metrics; 0: none does. `left_out`: process
    -> a setting that its file does not have, because an older version would not know it. `patient`: gateways let
    requests wait for a place as long as tests wait, and not as long as is set by default."""
    state = Path(tempfile.mkdtemp(prefix="prism-"))
    if small_disk:
        _run("mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "prism-chaos", str(state))
    if clock:
        faketime.write(_clock(state), 0)
        under = faketime.as_in(_clock(state))
    disk = {"disk_folder": str(state / "images"), "disk_capacity_bytes": 1 << 30}
    models = models or {name: {} for name in MODELS}
    listed = catalogue(state, "echo", {**models, SPARE: {"path": str(FOLDER / MODELS[1])}})
    gateway: dict[str, Any] = {"park_time_out_s": PATIENCE_S, "reach_time_out_s": PATIENCE_S} if patient else {}
    if keys is not None:
        gateway["keys_file"] = str(state / "keys.toml")
        keys.write(state / "keys.toml")
    local = Local(
        state=state,
        catalogue=listed,
        http=f"127.0.0.1:{free_port()}",
        engine="echo",
        engine_options={"step_ms": str(step_ms)},
        # Placement knows bytes, not processes: every model may have one on every group.
        engines=max(4, len(models) + 2),
        devices=DEVICES,
        loader=disk if small_disk or images_on_disk else {},
        host_capacity_bytes=host_capacity_bytes,
        gateway=gateway,
        metrics_port=metrics_port,
    )
    plan = local.processes()
    for name, setting in (left_out or {}).items():
        path = state / f"{name}.toml"
        settings = tomllib.loads(path.read_text())
        del settings[setting]
        path.write_text(tomli_w.dumps(settings))
    bases = {"gateway": f"http://{local.http}"}
    plan.append(_second_gateway(local, bases))
    system = LocalSystem([dataclasses.replace(each, under=under) for each in plan], state / "logs", print)
    try:
        await system.start()
        placement = PlacementClient(local.unix("placement"))
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        headers = {} if keys is None else {"authorization": f"Bearer {keys.bearer}"}
        time_out = aiohttp.ClientTimeout(total=PATIENCE_S)
        async with aiohttp.ClientSession(timeout=time_out, connector=connector, headers=headers) as http:
            it = Chaos(local, system, http, placement, bases, list(models), streams)
            await it.all_heard()
            await it.load.learn()
            yield it
            await it.close()
        await placement.close()
    except BaseException:
        print_ends(state / "logs")
        raise
    finally:
        await system.end()
        faketime.forget_the_dead()
        if small_disk:
            _run("umount", "--lazy", str(state))
        shutil.rmtree(state, ignore_errors=True)


def _clock(state: Path) -> Path:
    return state / "clock"


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


def _second_gateway(local: Local, bases: dict[str, str]) -> Process:
    name, http = "gateway-2", f"127.0.0.1:{free_port()}"
    config = {"name": name, "listen": local.unix(name), "http": http, "placement": local.unix("placement")}
    config.update(local.gateway)
    path = local.state / f"{name}.toml"
    path.write_text(tomli_w.dumps({**config, "log_format": "json"}))
    bases[name] = f"http://{http}"
    return Process(name, "gateway", ("--config", str(path)), config["listen"], ("placement",))


@contextlib.asynccontextmanager
async def watched(it: Chaos) -> AsyncIterator[LedgerAudit]:
    """The ledger is looked at all the time in the block."""
    books = LedgerAudit(it.balloond)
    watching = tasks.spawn(books.watch(), "watch the ledger")
    try:
        yield books
    finally:
        await tasks.cancel(watching)


async def busiest_engine(it: Chaos) -> int:
    """The process that has most KV."""
    devices = (await it.balloond.inspect()).devices
    return max((lease for device in devices for lease in device.leases), key=lambda lease: lease.kv_used_bytes).pid


def memory_bytes(pid: int) -> int:
    """Of the process's own."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
