"""The threads that carry copies: one for each link, for as long as a copy goes over it."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol, TypeVar

from loader.policy.links import CopyWork, Links
from loader.transfers.base import Busy, nobody
from services.telemetry import log

_log = log.get(__name__)
W = TypeVar("W", bound=CopyWork)
Move = Callable[[Any], None]
"""Callback that has the bytes of one chunk moved; the argument is the link's stream, where it has one."""
Carrying = Callable[[], tuple[str, ...]]
"""Callback for the links that carry a copy: those that it began with or fewer, none when it is over."""


class Lane(Protocol):
    """One link. Only its thread uses it."""

    def open(self) -> None:
        """Makes the link ready. It may take its time: other links carry meanwhile. When it raises, nothing is left to
        close."""
        ...

    def begin(self, move: Move) -> None:
        """Begins to move a chunk. When it raises, nothing of the chunk is under way."""
        ...

    def finish(self) -> None:
        """Waits until the oldest chunk that was begun is done. When it raises, nothing of it is under way either."""
        ...

    def close(self) -> None:
        """Gives the link up; nothing is under way."""
        ...


class _CarriedCopy:
    """One call of `carry`, as the links' threads see it."""

    def __init__(self, number: int, move: Callable[[Any, Any], None], lock: threading.Lock) -> None:
        self.number = number
        self.move = move
        self.arrived: list[Any] = []
        """Parts that were moved and not reported yet."""
        self.arrived_bytes = 0
        self.awaited_bytes = 0
        """Bytes of which the copy's caller is woken when they have arrived."""
        self.error: Exception | None = None
        """What the last link raised, when no link is left."""
        self.changed = threading.Condition(lock)


class Lanes:
    """The links' threads and the copies that they carry. Several copies may be carried at a time, each by a thread that
    calls."""

    def __init__(self, make: Callable[[str], Lane], window_bytes: int, busy: Busy = nobody) -> None:
        """`make` returns the lane of a link; `window_bytes` is that of `loader.policy.links`."""
        self._make = make
        self._busy = busy
        self._window_bytes = window_bytes
        self._links: Links[Any] = Links(window_bytes)
        self._copies: dict[int, _CarriedCopy] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._waiting: dict[str, threading.Condition] = {}
        """Condition that a link's thread waits for when it has nothing to do, by link that has a thread."""
        self._idle: set[str] = set()
        """Links whose threads wait so, and were not woken yet: a thread that wakes costs more than a chunk."""

    def carry(
        self,
        links: Sequence[str],
        plan: Sequence[W],
        *,
        move: Callable[[W, Any], None],
        done: Callable[[W], None],
        prepare: Callable[[W], None] = lambda work: None,
        opened: Callable[[Carrying], None] = lambda carrying: None,
    ) -> None:
        """Moves all of the plan and returns then. The first link is the device's own. `opened`, `prepare` and `done`
        are called in this thread: once before all else, with each part in the plan's order before a link may have it,
        and with each part that was moved, some at a time. A link that fails is left out, and what the last one raised
        is raised here. However the call ends, nothing is being moved any more."""
        # While the caller sleeps, and until it has seen to what woke it, every link has more to take.
        together = len(links) * self._window_bytes
        ahead = 2 * together + len(links) * max((work.nbytes for work in plan), default=0)
        untold = 0
        with self._opened(links, sum(work.nbytes for work in plan), move) as copy:
            opened(partial(self._carrying, copy))
            for work in plan:
                while untold and untold + work.nbytes > ahead:
                    untold -= self._tell(copy, done, min(together, untold))
                prepare(work)
                untold += work.nbytes
                with self._lock:
                    self._links.offer(copy.number, work)
                    self._stir()
            while untold:
                untold -= self._tell(copy, done, min(together, untold))

    @contextmanager
    def _opened(self, links: Sequence[str], total: int, move: Callable[[Any, Any], None]) -> Iterator[_CarriedCopy]:
        copy = _CarriedCopy(next(self._numbers), move, self._lock)
        busy = self._busy(links) if len(links) > 1 else {}
        with self._lock:
            self._links.open(copy.number, links, total, busy)
            self._copies[copy.number] = copy
        try:
            with self._lock:
                for link in self._links.of(copy.number):
                    if link not in self._waiting:
                        threading.Thread(target=self._serve, args=(link,), name=f"link {link}").start()
                        self._waiting[link] = threading.Condition(self._lock)
                self._stir()  # copies that lose links to this one may use those that they spared
            yield copy
        finally:
            with self._lock:
                self._links.withdraw(copy.number)
                copy.awaited_bytes = 0
                self._stir()
                while self._links.under_way(copy.number):
                    copy.changed.wait()
                self._links.close(copy.number)
                del self._copies[copy.number]

    def _carrying(self, copy: _CarriedCopy) -> tuple[str, ...]:
        with self._lock:
            return self._links.of(copy.number) if copy.number in self._copies else ()

    def _tell(self, copy: _CarriedCopy, done: Callable[[Any], None], least_bytes: int) -> int:
        """Reports what has arrived, at least one part and `least_bytes`, to `done`. Returns its bytes."""
        with self._lock:
            copy.awaited_bytes = least_bytes
            while not copy.arrived or copy.arrived_bytes < least_bytes:
                if copy.error is not None:
                    raise copy.error
                copy.changed.wait()
            arrived, nbytes = copy.arrived, copy.arrived_bytes
            copy.arrived, copy.arrived_bytes = [], 0
        for work in arrived:
            done(work)
        return nbytes

    # --- the links' threads

    def _serve(self, link: str) -> None:
        try:
            lane = self._make(link)
            lane.open()
        except Exception as error:  # whatever it is: a copy's caller waits for this link
            self._give_up(link, error)
            return
        begun: deque[tuple[_CarriedCopy, CopyWork]] = deque()
        moved: tuple[_CarriedCopy, CopyWork] | None = None
        while True:
            taken = self._next(link, moved, wait=not begun)
            moved = None
            if taken is not None:
                copy, work = taken
                if self._survived(link, copy, work, lane.begin, partial(copy.move, work)):
                    begun.append(taken)
            elif begun:
                copy, work = begun.popleft()
                if self._survived(link, copy, work, lane.finish):
                    moved = copy, work
            else:
                break
        lane.close()

    def _next(
        self, link: str, moved: tuple[_CarriedCopy, CopyWork] | None, wait: bool
    ) -> tuple[_CarriedCopy, CopyWork] | None:
        """Takes in the part that was `moved`, and returns the part to begin; None when there is nothing. If it was to
        `wait` for that, the link's thread is not needed any more."""
        with self._lock:
            if moved is not None:
                self._arrived(link, *moved)
            while (taken := self._links.take(link)) is None and wait:
                if not self._links.users(link):
                    del self._waiting[link]
                    self._idle.discard(link)
                    return None
                self._idle.add(link)
                self._waiting[link].wait()
            if taken is None:
                return None
            number, work = taken
            if self._links.spares(number):
                self._stir()  # a spared link may have more because this one has
            return self._copies[number], work

    def _arrived(self, link: str, copy: _CarriedCopy, work: CopyWork) -> None:
        self._links.done(link, copy.number, work)
        copy.arrived.append(work)
        copy.arrived_bytes += work.nbytes
        if copy.arrived_bytes >= copy.awaited_bytes:
            copy.changed.notify()

    def _survived(
        self, link: str, copy: _CarriedCopy, work: CopyWork, act: Callable[..., None], *arguments: Move
    ) -> bool:
        try:
            act(*arguments)
        except Exception as error:  # whatever it is: a caller waits for this work
            _log.warning("a link failed a copy", link=link, why=str(error))
            with self._lock:
                if not self._links.failed(link, copy.number, work):
                    copy.error = error
                copy.changed.notify()
                self._stir()
            return False
        return True

    def _give_up(self, link: str, error: Exception) -> None:
        _log.warning("a link cannot be used", link=link, why=str(error))
        with self._lock:
            del self._waiting[link]
            for number in self._links.users(link):
                if not self._links.leave(link, number):
                    self._copies[number].error = error
                    self._copies[number].changed.notify()
            self._stir()

    def _stir(self) -> None:
        """Wakes the links that had no work, because there may be some."""
        for link in self._idle:
            self._waiting[link].notify()
        self._idle.clear()
