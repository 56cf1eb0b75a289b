"""Addresses that stand for several: `dns:HOST:PORT` is PORT at every address of HOST, as gRPC writes names.

Names are looked up again all the time, with one look-up of a name at a time, beside everything else. A name that cannot
be looked up, or has no address, keeps its last answer: that DNS is away says nothing about nodes.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, NamedTuple

from services.telemetry import log
from services.wording import addresses

_log = log.get(__name__)
LookUp = Callable[[str], Awaitable[Sequence[str]]]
"""Looks up a host's addresses. Raises OSError, UnicodeError."""
Spawn = Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]]


class Name(NamedTuple):
    """A host name that stands for several addresses, and the port at each."""

    host: str
    port: int


def parse(address: str) -> Name | None:
    """The name in a checked address (`services/wording/addresses.py`); None if the address stands for itself."""
    name = addresses.of_several(address)
    return None if name is None else Name(*addresses.host_and_port(name))


async def look_up(host: str) -> list[str]:
    """The host's IPv4 addresses; its IPv6 addresses, in brackets, if it has no others: a node that has both would be
    there twice. Raises OSError, after as long as the system's resolver takes."""
    found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    addresses = {family: {str(at[0]) for kind, _, _, _, at in found if kind == family} for family, *_ in found}
    if four := addresses.get(socket.AF_INET):
        return sorted(four)
    return sorted(f"[{each}]" for each in addresses.get(socket.AF_INET6, ()))


class Names:
    """All names of a configuration with their last answers."""

    def __init__(self, period_s: float, on_change: Callable[[], None], spawn: Spawn, look_up: LookUp = look_up) -> None:
        """`period_s`: seconds from an answer to the next look-up. `on_change` is called when a name has a new
        answer."""
        self._period_s = period_s
        self._on_change = on_change
        self._spawn = spawn
        self._look_up = look_up
        self._answers: dict[str, tuple[str, ...]] = {}
        """Host -> its addresses at the last look-up that had any."""
        self._tasks: dict[str, asyncio.Task[None]] = {}

    @property
    def unanswered(self) -> bool:
        """Whether a name has had no answer yet."""
        return self._tasks.keys() != self._answers.keys()

    def keep(self, addresses: Iterable[str]) -> None:
        """Looks up the names among these addresses from now on, and no others."""
        hosts = {name.host for name in map(parse, addresses) if name is not None}
        for host in self._tasks.keys() - hosts:
            self._tasks.pop(host).cancel()
            self._answers.pop(host, None)
        for host in sorted(hosts - self._tasks.keys()):
            self._tasks[host] = self._spawn(self._follow(host), f"look up {host}")

    def expand(self, addresses: Iterable[str]) -> list[str]:
        """The addresses with each name replaced by what it stands for, each address once."""
        found: dict[str, None] = {}
        for address in addresses:
            name = parse(address)
            hosts = self._answers.get(name.host, ()) if name is not None else ()
            found |= dict.fromkeys([address] if name is None else [f"{host}:{name.port}" for host in hosts])
        return list(found)

    async def _follow(self, host: str) -> None:
        failed = False
        while True:
            try:
                answer = tuple(await self._look_up(host))
                if not answer:
                    raise OSError("it has no address")
            except (OSError, UnicodeError) as error:  # UnicodeError: no host can have that name
                if not failed:
                    why = getattr(error, "strerror", None) or str(error)
                    _log.warning("name not looked up", host=host, why=why, kept=list(self._answers.get(host, ())))
                failed = True
            else:
                failed = False
                if answer != self._answers.get(host):
                    _log.info("name looked up", host=host, addresses=list(answer))
                    self._answers[host] = answer
                    self._on_change()
            await asyncio.sleep(self._period_s)
