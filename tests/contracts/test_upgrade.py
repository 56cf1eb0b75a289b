"""A system of the version before becomes one of this version, process by process, while streams run."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import time

import pytest
import pytest_asyncio

from services.errors import PrismError
from testing.chaos.load import steady
from testing.chaos.world import SPARE, Chaos, chaos, watched
from testing.systems.local import MODELS
from tests.contracts import older

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(not older.there(), reason=f"the repository has no commit {older.COMMIT}"),
]
STREAMS = 12


@pytest.fixture(scope="module")
def old(tmp_path_factory) -> tuple[str, ...]:
    folder = tmp_path_factory.mktemp("older")
    older.unpack(folder)
    return older.runs(folder)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(old):
    left_out = {"placement": "traffic_file"}
    async with chaos(STREAMS, step_ms=30, under=old, left_out=left_out, patient=True) as it:
        it.load.balanced = True
        await it.prepare()
        yield it


def ran_from(it: Chaos, name: str) -> str:
    return os.readlink(f"/proc/{it.system.running[name].pid}/cwd")


async def other_version(it: Chaos, name: str, under: tuple[str, ...]) -> None:
    """It is stopped, and comes back as the other; then all is served, also a model that was away."""
    process = it.system.running[name]
    process.spec = dataclasses.replace(process.spec, under=under)
    before = process.pid
    os.kill(before, signal.SIGTERM)
    await it.full_service(time.monotonic(), {name: before})
    assert (ran_from(it, name) == str(older.ROOT)) == (not under)
    await it.away(SPARE)


async def moves(it: Chaos) -> None:
    """From a group of one version to one of the other."""

    async def moved() -> bool:
        group, _ = await it.resident(MODELS[0]) or ("", None)
        other = next(each for each in it.local.group_names if each != group)
        with contextlib.suppress(PrismError):  # it moves by itself now
            await it.placement.migrate(MODELS[0], other)
            return True
        return False

    await it.until(moved, "it does not move")


ORDER = ("gateway", "loader", "gpu_scheduler-cpu-0", "placement", "balloond", "keeper")
"""One gateway and one group stay old: all of these meet others of both versions."""
STOPPING = "this gateway is stopping"
"""What a gateway of 1.0 answers to whom it took in its last moments."""


async def test_processes_of_versions_one_apart_serve_together_without_failed_streams(running, old):
    async with watched(running) as books, steady(running.load) as load:
        for name in ORDER:
            await other_version(running, name, ())
            if name == "gpu_scheduler-cpu-0":
                await moves(running)
        await other_version(running, "loader", old)
        await moves(running)
    assert [failure for failure in load.failures if STOPPING not in failure.why] == []
    assert (load.wrong, load.ended >= STREAMS) == ([], True)
    assert books.looks and not books.unequal
