"""Members of the cluster: the groups, loaders and balloonds that the configuration names, as it and DNS say now.

A newly named member is followed at once. One that is named no more is kept as long as it can be reached, and forgotten
when it cannot: Kubernetes takes a pod out of DNS when it is not ready, a file may be cut short, and neither is a reason
to turn away from what serves. An operator who wants a node empty drains it.
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
    """What to do with the addresses of one kind of service."""

    follow: Callable[[str], Coroutine[Any, Any, None]]
    """Adds the member at an address; the coroutine that it returns keeps what the member reports fresh, for ever."""
    is_there: Callable[[str], bool]
    """Whether the member at an address can be reached."""
    forget: Callable[[str], None]


class Members:
    """All members, by kind; a kind is the name of its list in the configuration."""

    def __init__(self, kinds: Mapping[str, MemberKind], names: Names, spawn: Spawn) -> None:
        self._kinds = kinds
        self._names = names
        self._spawn = spawn
        self._lists: Mapping[str, Sequence[str]] = {}
        self._followed: dict[tuple[str, str], asyncio.Task[None]] = {}
        """(kind, address) -> task that follows the member."""
        self._leaving: set[tuple[str, str]] = set()
        """(kind, address) of followed members that are named no more."""

    def named(self, lists: Mapping[str, Sequence[str]]) -> None:
        """Sets the addresses that the configuration names: kind -> addresses."""
        self._lists = lists
        self._names.keep(address for addresses in lists.values() for address in addresses)
        self.renew()

    def renew(self) -> None:
        """Follows the members that the names stand for now; those that are named no more begin to leave."""
        wanted = {(kind, each): None for kind, listed in self._lists.items() for each in self._names.expand(listed)}
        for kind, address in wanted:
            if (kind, address) not in self._followed:
                _log.info("member joins", kind=kind, address=address)
                work = self._kinds[kind].follow(address)
                self._followed[kind, address] = self._spawn(work, f"follow {address}")
        self._leaving = self._followed.keys() - wanted.keys()
        self.look()

    def look(self) -> None:
        """Forgets members that are named no more and cannot be reached."""
        for kind, address in [each for each in self._leaving if not self._kinds[each[0]].is_there(each[1])]:
            _log.info("member leaves", kind=kind, address=address)
            self._leaving.discard((kind, address))
            # The client's channel is closed when nothing refers to it any more. Calls under way would not survive an
            # earlier close; so they end by themselves, with an error that says why.
            self._followed.pop((kind, address)).cancel()
            self._kinds[kind].forget(address)
