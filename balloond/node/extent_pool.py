"""Extents made ahead, so that a grant costs no creation, and one that keeps the device awake.

Spares are nobody's: no id, no record in the keeper, gone with this process. Their bytes are set aside from what the
ledger gives out, once, so that the device never holds more than its capacity.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Iterable, Sequence

from balloond.backends.base import ExtentMaker
from services.telemetry import log

_log = log.get(__name__)
_SIZES = 2
"""Of the sizes that were asked for, the last so many are kept ahead."""
_PAUSE_S = 0.005
"""Spares are made when nothing was asked for so long: making them beside a growth would slow it down."""
_FEWEST = 4
"""A size of which the budget does not hold so many is made on demand (weights)."""


def shares(sizes: Sequence[int], budget_bytes: int) -> dict[int, int]:
    """How many of each size to have: the budget in equal parts."""
    return {size: budget_bytes // len(sizes) // size for size in sizes}


class ExtentPool:
    """An ExtentMaker around another. A thread makes what was taken."""

    def __init__(self, maker: ExtentMaker, budget_bytes: int, first_bytes: int) -> None:
        """`first_bytes`: the size to begin with. Raises OSError when the device gives nothing at all."""
        self.page_bytes = maker.page_bytes
        self.set_aside_bytes = budget_bytes + maker.page_bytes
        self._maker = maker
        self._budget = budget_bytes
        # The first extent of a CUDA device costs a millisecond to make, and the last one as much to close.
        self._never_the_first = maker.create(maker.page_bytes)
        self._changed = threading.Condition()
        """Its lock guards everything below."""
        self._sizes: list[int] = []
        """The last one asked for first."""
        self._ready: dict[int, list[int]] = {}
        """Size -> descriptors."""
        self._asked_at = -math.inf
        self._requests = 0
        self._failed_at = -1
        """When so many requests had come, one could not be made; it is tried again after the next."""
        self._closed = False
        self._ask_for(first_bytes)
        self._thread = threading.Thread(target=self._fill, name="spares", daemon=True)
        self._thread.start()

    def create(self, nbytes: int) -> int:
        """From any thread."""
        with self._changed:
            self._ask_for(nbytes)
            ready = self._ready.get(nbytes)
            fd = ready.pop() if ready else None
            self._requests += 1
            self._asked_at = time.monotonic()
            self._changed.notify_all()
        return self._maker.create(nbytes) if fd is None else fd

    @property
    def ready(self) -> dict[int, int]:
        """Size -> how many there are."""
        with self._changed:
            return {size: len(fds) for size, fds in self._ready.items() if fds}

    def wait_full(self, timeout_s: float) -> bool:
        """Whether everything that should be ready is, within the time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._next() is None, timeout_s)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        for fds in self._ready.values():
            _close(fds)
        os.close(self._never_the_first)

    # --- with the lock held

    def _ask_for(self, nbytes: int) -> None:
        if nbytes * _FEWEST <= self._budget and nbytes not in self._sizes[:1]:
            self._sizes = [nbytes, *(size for size in self._sizes if size != nbytes)][:_SIZES]
            wanted = shares(self._sizes, self._budget)
            for size, fds in self._ready.items():
                surplus = len(fds) - wanted.get(size, 0)
                _close(fds.pop() for _ in range(surplus))

    def _lacks(self, size: int) -> bool:
        return len(self._ready.get(size, ())) < shares(self._sizes, self._budget).get(size, 0)

    def _next(self) -> int | None:
        """The size to make one of."""
        return next(filter(self._lacks, self._sizes), None)

    # --- the thread

    def _fill(self) -> None:
        while (next_one := self._wait()) is not None:
            size, requests = next_one
            try:
                fd = self._maker.create(size)
            except OSError as error:
                _log.warning("no spare made", bytes=size, why=str(error))
                with self._changed:
                    self._failed_at = requests
                continue
            with self._changed:
                if self._lacks(size):
                    self._ready.setdefault(size, []).append(fd)
                    self._changed.notify_all()
                else:
                    os.close(fd)  # other sizes are wanted by now

    def _wait(self) -> tuple[int, int] | None:
        """Returns when there is one to make: its size, and how many requests there were. None at the end."""
        with self._changed:
            while not self._closed:
                size = self._next() if self._failed_at < self._requests else None
                pause_s = self._asked_at + _PAUSE_S - time.monotonic()
                if size is not None and pause_s <= 0:
                    return size, self._requests
                self._changed.wait(None if size is None else pause_s)
            return None


def _close(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)
