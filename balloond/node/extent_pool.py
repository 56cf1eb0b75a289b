"""Extents made ahead, so that a grant costs no creation, and one extent that keeps the device awake.

A spare belongs to no lease: it has no id and no record in the keeper, and is gone with this process. The bytes of
spares are set aside from what the ledger gives out, once, so that the device never holds more than its capacity.
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
"""Number of sizes, those requested last, of which extents are kept ahead."""
_PAUSE_S = 0.005
"""Seconds without a request after which spares are made: making them beside a growth would slow it down."""
_FEWEST = 4
"""A size of which the budget holds fewer than this many extents is made on demand (weights)."""


def shares(sizes: Sequence[int], budget_bytes: int) -> dict[int, int]:
    """Number of extents to keep, by size in bytes: each size has an equal part of the budget."""
    return {size: budget_bytes // len(sizes) // size for size in sizes}


class ExtentPool:
    """An ExtentMaker around another, whose thread makes up for the spares that were taken."""

    def __init__(self, maker: ExtentMaker, budget_bytes: int, first_bytes: int) -> None:
        """`first_bytes`: size of the extents to begin with. Raises OSError if the device gives no memory at all."""
        self.page_bytes = maker.page_bytes
        self.set_aside_bytes = budget_bytes + maker.page_bytes
        self._maker = maker
        self._budget = budget_bytes
        # The first extent of a CUDA device costs a millisecond to make, and the last one as much to close.
        self._never_the_first = maker.create(maker.page_bytes)
        self._changed = threading.Condition()
        """Condition whose lock guards everything below."""
        self._sizes: list[int] = []
        """Sizes in bytes of which spares are kept, the one requested last first."""
        self._ready: dict[int, list[int]] = {}
        """Descriptors of spares, by size in bytes."""
        self._asked_at = -math.inf
        self._requests = 0
        self._failed_at = -1
        """Number of requests at which a spare could not be made; it is tried again after the next request."""
        self._closed = False
        self._ask_for(first_bytes)
        self._thread = threading.Thread(target=self._fill, name="spares", daemon=True)
        self._thread.start()

    def create(self, nbytes: int) -> int:
        """Descriptor of an extent of `nbytes`, a spare if there is one; callable from any thread. Raises OSError."""
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
        """Number of spares by size in bytes, without the sizes of which there is none."""
        with self._changed:
            return {size: len(fds) for size, fds in self._ready.items() if fds}

    def wait_full(self, timeout_s: float) -> bool:
        """Whether all spares that should exist do within `timeout_s`."""
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
        """The size in bytes to make a spare of; None if no spare is missing."""
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
        """Waits until a spare is to be made and returns (its bytes, the number of requests so far); None once
        closed."""
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
