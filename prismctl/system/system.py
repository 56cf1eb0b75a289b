"""Addresses of a system's services, and calls to them. Exit statuses tell how a command ended."""

from __future__ import annotations

import asyncio
import glob
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

import typer

from gpu_scheduler.client import GpuSchedulerClient
from loader.client import LoaderClient
from placement.client import PlacementClient
from prismctl.system import presence
from prismctl.system.patience import RequiredProcess, attending
from services.errors import Conflict, PrismError, TimedOut, Unavailable
from services.ipc.sockets import unix_path

NO, USAGE, UNREACHABLE, BUSY = 1, 2, 3, 4
"""Exit statuses beside 0 (done): the answer is no, or the operation was refused; the command line, or a file that it
names, cannot be used; a service that has to answer does not; another change is under way, so that trying again can
help."""
SERVICES = ("placement", "loader", "balloond", "gateway")
_CALLED = {"loader": "the loader", "keeper": "the keeper"}
_DEPLOYED = Path("/run/prism")
"""Folder of the sockets under systemd and in compose."""
_LEAST_S = 1.0
"""The least seconds of waiting for a service that is busy while an operation is under way: nothing is lost by it."""
T = TypeVar("T")


class _Client(Protocol):
    async def close(self) -> None: ...


C = TypeVar("C", bound=_Client)


@dataclass(frozen=True)
class SystemAddresses:
    """Addresses of the services, as the command line and the environment give them. Empty: the service's socket in
    `state`."""

    state: Path
    placement: str = ""
    loader: str = ""
    balloond: str = ""
    gateway: str = ""
    wait_s: float = 2.0
    """Seconds of waiting for a service that does not answer: a restart takes less."""
    deployed: Path = _DEPLOYED
    """Folder in which a deployed system has its sockets, for the hint where none answers."""

    def address(self, service: str) -> str:
        """The gRPC address of placement, loader, balloond or gateway."""
        return getattr(self, service) or f"unix:{self.state.resolve() / service}.sock"

    @property
    def keeper_socket(self) -> str:
        return str(self.state.resolve() / "keeper.sock")

    def is_here(self, service: str) -> bool:
        """Whether the service is known here: its address was given, or it has a socket in `state`."""
        if service == "keeper":
            return os.path.exists(self.keeper_socket)
        return bool(getattr(self, service)) or os.path.exists(unix_path(self.address(service)) or "")

    def group_sockets(self) -> list[str]:
        """Addresses of the gpu_schedulers whose sockets are in `state`, for use when placement does not answer."""
        return [f"unix:{path}" for path in _sockets(self.state.resolve(), "gpu?scheduler*")]

    def nowhere(self) -> str | None:
        """A hint for a system of which no process answers: where it was looked for, and where else one may be; None if
        addresses were given instead."""
        if self.placement:
            return None
        folder = self.state.resolve()
        there = f" ({self.deployed} has some)" if folder != self.deployed and _sockets(self.deployed) else ""
        named = f"--state FOLDER, or PRISM_STATE, says where its sockets are{there}"
        return f"no system in {folder}: {_seen(folder)}; {named}"

    # --- processes that have to answer

    def node(self) -> list[RequiredProcess]:
        """The node's known processes on which it depends that models come up and go down."""
        here = [service for service in ("loader", "balloond") if self.is_here(service)]
        found = [self.asked(_CALLED.get(service, service), self.address(service)) for service in here]
        if self.is_here("keeper"):
            path = self.keeper_socket
            found.append(
                RequiredProcess(_CALLED["keeper"], path, partial(presence.keeper_problem, path), self._look(path))
            )
        return found

    async def groups(self, placement: PlacementClient, model: str = "", *more: str) -> list[RequiredProcess]:
        """Groups that placement can reach: all, or those that have the model and those in `more`."""
        return [
            self.asked(each.group, each.address)
            for each in (await placement.cluster()).groups
            if each.reachable
            and (not model or each.group in more or any(there.model == model for there in each.models))
        ]

    def attending(self, asked: Iterable[RequiredProcess]) -> AbstractAsyncContextManager[None]:
        """A context in which work goes on as long as these processes answer. Raises Unavailable."""
        return attending(list(asked), max(self.wait_s, _LEAST_S))

    def asked(self, name: str, address: str) -> RequiredProcess:
        """The process that serves at a gRPC address."""
        return RequiredProcess(name, address, partial(presence.problem, address), self._look(address))

    def _look(self, address: str) -> str:
        """Hint at the log of the process there; empty if it has none here."""
        path = unix_path(address) or address
        log = self.state.resolve() / "logs" / f"{Path(path).stem}.log"
        return f"its log is {os.path.relpath(log)}" if os.path.isfile(log) and os.path.exists(path) else ""

    # --- calls

    @asynccontextmanager
    async def open_placement(self) -> AsyncIterator[PlacementClient]:
        async with self._open("placement", self.address("placement"), PlacementClient) as client:
            yield client

    @asynccontextmanager
    async def open_loader(self) -> AsyncIterator[LoaderClient]:
        """A client of the loader, as long as the node's other processes answer too: the loader waits for them."""
        address = self.address("loader")
        others = [each for each in self.node() if each.address != address]
        async with self._open("the loader", address, LoaderClient, others) as client:
            yield client

    @asynccontextmanager
    async def open_group(self, group: str, address: str) -> AsyncIterator[GpuSchedulerClient]:
        async with self._open(group, address, GpuSchedulerClient) as client:
            yield client

    @asynccontextmanager
    async def _open(
        self, name: str, address: str, connect: Callable[[str], C], others: Iterable[RequiredProcess] = ()
    ) -> AsyncIterator[C]:
        """A client of a service, as long as the service and `others` answer. Raises Unavailable with the name of one
        that does not: gRPC's own text about a connection names no service."""
        asked = self.asked(name, address)
        problem = await asked.problem(self.wait_s)
        if problem == presence.NO_SOCKET:
            raise Unavailable(asked.silent(f"{problem}: --state FOLDER, or PRISM_STATE, says where the services are"))
        if problem:
            raise Unavailable(asked.silent(problem))
        client = connect(address)
        try:
            async with self.attending([asked, *others]):
                yield client
        finally:
            await client.close()


def _sockets(folder: Path, name: str = "*") -> list[str]:
    """Paths of sockets, in order; none if the folder may not be read."""
    return sorted(glob.glob(os.path.join(glob.escape(str(folder)), f"{name}.sock")))


def _seen(folder: Path) -> str:
    """What a folder holds in which no process answers."""
    try:
        os.stat(os.path.join(folder, "."))  # checks that it is a folder
    except FileNotFoundError:
        return "there is no such folder"
    except NotADirectoryError:
        return "it is no folder"
    except OSError:
        return "this user may not look into it"
    return "of the processes whose sockets are there none answers" if _sockets(folder) else "it has no sockets"


def run(work: Awaitable[T]) -> T:
    """The result of a command's work; an error ends the command with one line and a status."""

    async def working() -> T:
        return await work

    try:
        return asyncio.run(working())
    except PrismError as error:
        raise failed(str(error), _status(error)) from None
    except UnicodeEncodeError as error:  # bytes of the command line that are no text, on their way into a message
        raise failed(f"{error.object!r} is not text", USAGE) from None


def failed(line: str, status: int) -> typer.Exit:
    """Prints why the command failed, and returns the exception to raise."""
    typer.echo(f"prismctl: {line}", err=True)
    return typer.Exit(status)


def _status(error: PrismError) -> int:
    if isinstance(error, (Unavailable, TimedOut)):
        return UNREACHABLE
    return BUSY if isinstance(error, Conflict) else NO
