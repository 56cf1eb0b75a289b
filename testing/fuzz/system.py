"""The system that is fuzzed: echo engines on CPU pages, all processes real."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from balloond.client import BalloondClient
from deploy.healthy import healthy
from gateway.access import keys
from services.errors import PrismError
from testing.chaos.ledger_audit import LedgerAudit
from testing.fuzz.outcome import LogTails, SurfaceOutcome, descriptors, resident_mib
from testing.patience import PATIENCE_S
from testing.systems.local import MODELS, World, world

DEVICES = {"cpu:0": 64 << 20, "cpu:1": 64 << 20}
ADDED = "added-by-a-call"
"""A name for models that are added."""
MOST_BODY_BYTES = 1 << 20
_MORE_DESCRIPTORS = 24
"""What connections that are kept for later, and files that are opened at the first need, may take."""
_MORE_MIB = 96.0


@dataclass
class Fuzzed:
    """The system, and who looks after each surface."""

    world: World
    key: str = ""
    """An admin's, where there are keys."""
    pids: dict[str, int] = field(default_factory=dict)

    @property
    def state(self) -> Path:
        return self.world.local.state

    async def words(self) -> dict[str, Sequence[Any]]:
        """What means something here now, by field."""
        client = BalloondClient(self.world.local.unix("balloond"))
        leases = [lease for device in (await client.inspect()).devices for lease in device.leases]
        await client.close()
        specs = [route.model for route in (await self.world.placement.routes()).routes]
        groups = list(self.world.local.group_names)
        return {
            "device": list(DEVICES),
            "model": [*MODELS, *MODELS, *MODELS, "no-such-model"],
            "name": [*MODELS, ADDED],
            "path": [spec.path for spec in specs] + [str(self.state)],
            "generation": [spec.generation for spec in specs],
            "engine": ["echo", "echo", ""],
            "devices": [0, 1],
            "lease_id": [lease.lease_id for lease in leases] or ["none"],
            "group": groups,
            "to_group": groups,
            "successor": [self.world.local.unix(self.world.local.scheduler(group)) for group in groups] + [""],
            "context_tokens": [0, 64, 512],
            "floor_tokens": [0, 512],
            "floor_bytes": [0, 1 << 20],
            "quota_bytes": [0, 1 << 20],
            "weights_bytes": [0, 1 << 20],
            "bytes": [0, 64 << 10, 1 << 20, 64 << 20, -1],
            "drain_ms": [0, 50],
            "hold_ms": [0, 50],
        }

    async def restore(self) -> None:
        """Takes back what calls may rightly have asked for: limits, bookings, drained groups, models away."""
        self.reload_catalogue()
        for group in self.world.local.group_names:
            await self.world.placement.undo_drain(group)
        client = BalloondClient(self.world.local.unix("balloond"))
        for device in (await client.inspect()).devices:
            for booking in device.bookings:
                with contextlib.suppress(PrismError):
                    await client.make_room(
                        device.device, booking.model, bytes=0, may_retract=False, hold_ms=0, timeout_s=5
                    )
                    await client.set_limit(device.device, booking.model, -1)
                with contextlib.suppress(PrismError):  # one that a model needs stays
                    await client.drop_booking(device.device, booking.model)
        await client.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_S):
                await self.world.rest()

    def reload_catalogue(self) -> None:
        """What was removed of the file is back then."""
        os.kill(self.world.system.running["loader"].pid, signal.SIGHUP)

    async def settle(self) -> None:
        """Every process is healthy and answers for a model: what was asked for before has had its time."""
        for running in self.world.system.running.values():
            async with asyncio.timeout(PATIENCE_S):
                while not await healthy(running.spec.probe, timeout_s=1.0):
                    await asyncio.sleep(0.05)

    async def serves(self) -> str:
        """Why a completion fails; empty when it does not."""
        headers = {"authorization": f"Bearer {self.key}"} if self.key else {}
        body = {"model": MODELS[0], "prompt": [5, 6, 7], "max_tokens": 2, "temperature": 0}
        said = "no answer"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_S):
                for _ in range(30):
                    status, answer = await self.world.post("/v1/completions", body, headers=headers)
                    if status == 200:
                        return ""
                    said = f"{status} {answer}"
                    await asyncio.sleep(0.5)
        return said

    async def ledger(self) -> list[str]:
        """Where the ledger is not equal to the capacity."""
        client = BalloondClient(self.world.local.unix("balloond"))
        try:
            books = LedgerAudit(client)
            books._look(await client.inspect())
        except PrismError as error:
            return [f"the ledger cannot be read: {error}"]
        finally:
            await client.close()
        return books.unequal


@contextlib.asynccontextmanager
async def fuzzed(with_keys: bool = False, **more: Any) -> AsyncIterator[Fuzzed]:
    """A system that serves."""
    gateway: dict[str, Any] = {
        "most_body_bytes": MOST_BODY_BYTES,
        "park_time_out_s": 5.0,
        "reach_time_out_s": 2.0,
        "ui": True,
        "cors_origins": ["http://page"],
    }
    secret = keys.new() if with_keys else ""
    if with_keys:
        path = Path(os.environ.get("TMPDIR", "/tmp")) / f"prism-fuzz-keys-{os.getpid()}.toml"
        path.write_text(f'[[key]]\nname = "fuzz"\nadmin = true\nhash = "{keys.digest(secret)}"\n')
        gateway["keys_file"] = str(path)
    try:
        # An engine that stands still would be told apart from one that is fuzzed by its steps only.
        async with world("echo", options={"step_ms": "1"}, devices=DEVICES, gateway=gateway, idle_s=3600, **more) as it:
            found = Fuzzed(it, secret)
            assert not await found.serves()
            found.pids = {name: running.pid for name, running in it.system.running.items()}
            yield found
    finally:
        if with_keys:
            path.unlink()


async def attack(it: Fuzzed, surface: str, run: Callable[[SurfaceOutcome], Awaitable[None]]) -> SurfaceOutcome:
    """Fuzzes a surface with `run`, and looks at every process before and after."""
    outcome = SurfaceOutcome()
    before = _use(it)
    logs = LogTails(it.state / "logs")
    began = time.monotonic()
    await run(outcome)
    outcome.seconds = time.monotonic() - began
    try:
        await it.settle()
    except TimeoutError:
        outcome.fault(f"{surface}: a process does not answer its health check afterwards")
    await it.restore()
    for name, running in it.world.system.running.items():
        if running.pid != it.pids[name]:
            outcome.fault(f"{surface}: {name} died and was started again")
            it.pids[name] = running.pid
    if said := await it.serves():
        outcome.fault(f"{surface}: no completion afterwards: {said}")
    for line in [*logs.faults(), *await it.ledger()]:
        outcome.fault(f"{surface}: {line}")
    await _compare(it, outcome, surface, before)
    return outcome


def _use(it: Fuzzed) -> dict[str, tuple[float, int]]:
    return {
        name: (resident_mib(running.pid), descriptors(running.pid)) for name, running in it.world.system.running.items()
    }


async def _compare(it: Fuzzed, outcome: SurfaceOutcome, surface: str, before: dict[str, tuple[float, int]]) -> None:
    gc.collect()
    until = time.monotonic() + PATIENCE_S
    while True:
        after = _use(it)
        more = {name: after[name][1] - before[name][1] for name in before}
        if max(more.values()) <= _MORE_DESCRIPTORS or time.monotonic() > until:
            break
        await asyncio.sleep(0.2)
    for name, (mib, fds) in before.items():
        outcome.processes[name] = {"mib": [mib, after[name][0]], "descriptors": [fds, after[name][1]]}
        if more[name] > _MORE_DESCRIPTORS:
            outcome.fault(f"{surface}: {name} has {more[name]} descriptors more than before")
        if after[name][0] - mib > _MORE_MIB:
            outcome.fault(f"{surface}: {name} grew from {mib} to {after[name][0]} MiB")
