"""What processes need and do not get for a while: disk, descriptors, memory."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp

from services.runtime import tasks
from testing.chaos.faults import Fault, Replaced
from testing.chaos.ledger_audit import descriptors
from testing.chaos.load import body
from testing.chaos.world import SPARE, Chaos, busiest_engine

_FOR_S = 8.0
_CONNECTIONS = 100
_BODIES = 8
_BODY_BYTES = 30 << 20
_MEMORY_LEFT_BYTES = 32 << 20
_LITTLE_BYTES = 1 << 20


@contextlib.contextmanager
def _limited(pid: int, kind: int, most: int) -> Iterator[None]:
    before = resource.prlimit(pid, kind)
    resource.prlimit(pid, kind, (most, before[1]))
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):  # it did not survive that
            resource.prlimit(pid, kind, before)


async def disk_full(it: Chaos) -> Replaced:
    """Logs, images, sockets and configuration lie on it; an engine dies meanwhile, and a model without an image is
    asked for."""
    await it.loader.drop_image(SPARE, from_disk=True)
    filler = it.local.state / "filler"
    with open(filler, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 16))
    with open(filler, "ab", buffering=0) as file:
        try:
            file.write(bytes(1 << 16))
        except OSError as error:
            assert error.errno == errno.ENOSPC
    try:
        os.kill(await busiest_engine(it), signal.SIGKILL)
        asking = tasks.spawn(_ask(it), "ask for the spare model")
        await asyncio.sleep(_FOR_S)
    finally:
        filler.unlink()
    await asking
    return {}


async def _ask(it: Chaos) -> None:
    url = next(iter(it.bases.values())) + "/v1/completions"
    async with it.http.post(url, json={**body(SPARE, 0, 4), "stream": False}) as answer:
        if answer.status != 200:
            it.spare_errors.append(f"{answer.status} {await answer.text()}")


async def gateway_out_of_descriptors(it: Chaos) -> Replaced:
    """More connections than a gateway may have descriptors."""
    pid = it.system.running["gateway"].pid
    where = urlsplit(it.bases["gateway"])
    writers: list[asyncio.StreamWriter] = []
    with _limited(pid, resource.RLIMIT_NOFILE, descriptors(pid) + 5):
        for _ in range(_CONNECTIONS):
            _, writer = await asyncio.open_connection(where.hostname, where.port)
            writers.append(writer)
        await asyncio.sleep(_FOR_S)
    for writer in writers:
        writer.close()
    return {}


def out_of_descriptors(process: str, engine_dies: bool = False) -> Fault:
    """A model without an image is asked for meanwhile."""

    async def fault(it: Chaos) -> Replaced:
        pid = it.pid_of(process)
        await it.loader.drop_image(SPARE, from_disk=True)
        with _limited(pid, resource.RLIMIT_NOFILE, descriptors(pid)):
            if engine_dies:
                os.kill(await busiest_engine(it), signal.SIGKILL)
            asking = tasks.spawn(_ask(it), "ask for the spare model")
            await asyncio.sleep(_FOR_S)
        await asking
        return {}

    return fault


def out_of_memory(process: str) -> Fault:
    """Its address space does not grow by more than a little; a model without an image is asked for meanwhile."""

    async def fault(it: Chaos) -> Replaced:
        pid = it.pid_of(process)
        await it.loader.drop_image(SPARE, from_disk=True)
        with _limited(pid, resource.RLIMIT_AS, _address_space(pid) + _LITTLE_BYTES):
            asking = tasks.spawn(_ask(it), "ask for the spare model")
            await asyncio.sleep(_FOR_S)
        await asking
        return {} if os.path.exists(f"/proc/{pid}/fd/0") else {it.name_of(process): pid}

    return fault


def _address_space(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


async def gateway_out_of_memory(it: Chaos) -> Replaced:
    """Bodies that its address space has no room for."""
    pid = it.system.running["gateway"].pid

    async def send() -> None:
        with contextlib.suppress(aiohttp.ClientError):
            async with it.http.post(it.bases["gateway"] + "/v1/completions", data=bytes(_BODY_BYTES)) as answer:
                await answer.read()

    with _limited(pid, resource.RLIMIT_AS, _address_space(pid) + _MEMORY_LEFT_BYTES):
        await asyncio.gather(*(send() for _ in range(_BODIES)))
    return {}
