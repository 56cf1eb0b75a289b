"""Who is followed: the groups, loaders and balloonds that the configuration names, as it and DNS say now.

Who is named anew is followed at once. Who is named no more is kept as long as it can be reached, and forgotten when it
cannot: Kubernetes takes a pod out of DNS when it is not ready, a file may be cut short, and neither is a reason to turn
away from what serves. An operator who wants a node empty drains it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from placement.cluster.names import Names, Spawn
from services.telemetry import log

_log = log.get(__name__)


@dataclass(frozen=True)
class MemberKind:
    """What becomes of an address of one kind of service."""

    follow: Callable[[str], Coroutine[Any, Any, None]]
    """Takes it in; what is returned keeps what it says fresh, for ever."""
    is_there: Callable[[str], bool]
    """Whether it can be reached."""
    forget: Callable[[str], None]


class Members:
    """Of all kinds, by the name that their list has in the configuration."""

    def __init__(self, kinds: Mapping[str, MemberKind], names: Names, spawn: Spawn) -> None:
        self._kinds = kinds
        self._names = names
        self._spawn = spawn
        self._lists: Mapping[str, Sequence[str]] = {}
        self._followed: dict[tuple[str, str], asyncio.Task[None]] = {}
        """By kind and address."""
        self._leaving: set[tuple[str, str]] = set()
        """Those of them that are named no more."""

    def named(self, lists: Mapping[str, Sequence[str]]) -> None:
        """The configuration says so from now on."""
        self._lists = lists
        self._names.keep(address for addresses in lists.values() for address in addresses)
        self.renew()

    def renew(self) -> None:
        """Names may stand for others now."""
        wanted = {(kind, each): None for kind, listed in self._lists.items() for each in self._names.expand(listed)}
        for kind, address in wanted:
            if (kind, address) not in self._followed:
                _log.info("member joins", kind=kind, address=address)
                work = self._kinds[kind].follow(address)
                self._followed[kind, address] = self._spawn(work, f"follow {address}")
        self._leaving = self._followed.keys() - wanted.keys()
        self.look()

    def look(self) -> None:
        """Forgets who is named no more and cannot be reached."""
        for kind, address in [each for each in self._leaving if not self._kinds[each[0]].is_there(each[1])]:
            _log.info("member leaves", kind=kind, address=address)
            self._leaving.discard((kind, address))
            # Its channel is closed when nobody has it any more. Calls under way would not survive that, and end by
            # themselves, with an error that says why.
            self._followed.pop((kind, address)).cancel()
            self._kinds[kind].forget(address)
