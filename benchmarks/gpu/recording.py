"""Engines that record where their time goes (`profiled`), from the side of who asks them."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.gpu import profiled
from benchmarks.gpu.fleet import Client
from gpu_scheduler.engines.kinds import KINDS

_WRITTEN_S = 120.0


def possible() -> None:
    """Engines started from now on are able to, if their environment says so."""
    for kind in profiled.MAINS:
        KINDS[kind] = replace(KINDS[kind], module="benchmarks.gpu.profiled")


def environment(kind: str, path: Path, recorders: Sequence[str]) -> Mapping[str, str]:
    """Of an engine's process. `kind`: sglang or stock; `path`: where its recordings come."""
    return {
        profiled.KIND_VARIABLE: kind,
        profiled.FILE_VARIABLE: str(path),
        profiled.RECORDERS_VARIABLE: ",".join(recorders),
    }


@contextlib.asynccontextmanager
async def recorded(
    clients: Sequence[Client], folder: Path, recorder: str, wake: Callable[[Client], Awaitable[None]] | None = None
) -> AsyncIterator[dict[str, profiled.Found]]:
    """What goes on inside is recorded by the next recorder of each engine, there by its name when it is over. This
    begins and ends with its next turn, so it is to be busy then, or `wake` makes it."""
    found: dict[str, profiled.Found] = {}
    for client in clients:
        (folder / f"{client.name}.{recorder}").unlink(missing_ok=True)
        (folder / f"{client.name}.toggle").touch()
    yield found
    for client in clients:
        (folder / f"{client.name}.toggle").touch()
    for client in clients:
        path = folder / f"{client.name}.{recorder}"
        async with asyncio.timeout(_WRITTEN_S):
            while not path.exists():
                if not client.engine.alive:
                    raise RuntimeError(f"{client.name} ended with {await client.engine.ranks[0].wait()}")
                await asyncio.sleep(0.05)
                if wake is not None:
                    await wake(client)
        found[client.name] = {name: (times, seconds) for name, (times, seconds) in json.loads(path.read_text()).items()}
