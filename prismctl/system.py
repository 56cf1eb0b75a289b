"""Where the services of a system are, and asking them. How a command ends is told by its exit status."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import typer

from balloond.client import BalloondClient
from gpu_scheduler.client import GpuSchedulerClient
from loader.client import LoaderClient
from placement.client import PlacementClient
from services import rpc
from services.errors import Conflict, PrismError, TimedOut, Unavailable
from services.sockets import unix_path

NO, USAGE, UNREACHABLE, BUSY = 1, 2, 3, 4
"""Exit statuses beside 0, done: the answer is no, or it was refused; the command line, or a file that it names, cannot
be used; who has to answer does not; another change is under way, so that trying again can help."""
T = TypeVar("T")


class _Client(Protocol):
    async def close(self) -> None: ...


C = TypeVar("C", bound=_Client)


@dataclass(frozen=True)
class System:
    """Addresses, as the command line and the environment give them. Empty: the service's socket in `state`."""

    state: Path
    placement: str = ""
    loader: str = ""
    balloond: str = ""
    gateway: str = ""
    wait_s: float = 2.0
    """How long a service that does not answer is waited for: a restart takes less."""

    def address(self, service: str) -> str:
        """Of placement, loader, balloond or gateway."""
        return getattr(self, service) or f"unix:{self.state.resolve() / service}.sock"

    def is_here(self, service: str) -> bool:
        """Whether something is known of it: its address was given, or it has a socket in `state`."""
        return bool(getattr(self, service)) or os.path.exists(unix_path(self.address(service)) or "")

    def group_sockets(self) -> list[str]:
        """Addresses of the gpu_schedulers whose sockets are in `state`: for when placement cannot be asked."""
        return [f"unix:{path.resolve()}" for path in sorted(self.state.glob("gpu?scheduler*.sock"))]

    @asynccontextmanager
    async def open_placement(self) -> AsyncIterator[PlacementClient]:
        async with self._open("placement", self.address("placement"), PlacementClient) as client:
            yield client

    @asynccontextmanager
    async def open_loader(self) -> AsyncIterator[LoaderClient]:
        async with self._open("the loader", self.address("loader"), LoaderClient) as client:
            yield client

    @asynccontextmanager
    async def open_balloond(self) -> AsyncIterator[BalloondClient]:
        async with self._open("balloond", self.address("balloond"), BalloondClient) as client:
            yield client

    @asynccontextmanager
    async def open_group(self, group: str, address: str) -> AsyncIterator[GpuSchedulerClient]:
        async with self._open(group, address, GpuSchedulerClient) as client:
            yield client

    @asynccontextmanager
    async def _open(self, name: str, address: str, connect: Callable[[str], C]) -> AsyncIterator[C]:
        """Raises Unavailable with the name: what gRPC says of a connection names nobody."""
        if not await rpc.healthy(address, self.wait_s):
            path = unix_path(address)
            away = "; there is no such socket: --state FOLDER, or PRISM_STATE, says where the services are"
            raise Unavailable(f"{name} at {address} does not answer{away if path and not os.path.exists(path) else ''}")
        client = connect(address)
        try:
            yield client
        finally:
            await client.close()


def run(work: Awaitable[T]) -> T:
    """Carries out the work of a command; an error ends it with one line and a status."""

    async def working() -> T:
        return await work

    try:
        return asyncio.run(working())
    except PrismError as error:
        raise failed(str(error), _status(error)) from None


def failed(line: str, status: int) -> typer.Exit:
    """Says why, and is to be raised."""
    typer.echo(f"prismctl: {line}", err=True)
    return typer.Exit(status)


def _status(error: PrismError) -> int:
    if isinstance(error, (Unavailable, TimedOut)):
        return UNREACHABLE
    return BUSY if isinstance(error, Conflict) else NO
