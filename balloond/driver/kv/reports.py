"""Reports of a range to balloond: at once when they answer something, otherwise at most every 100 ms."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

from balloond.driver.connection.lease import Lease, Usage

_EVERY_S = 0.1
_CACHED = 64
"""Most entries of prefixes in a report."""


class Reports:
    """Reports of one range. `measure` returns (bytes held, bytes of reserve) when one is due, on the lease's thread."""

    def __init__(self, lease: Lease, measure: Callable[[], tuple[int, int]]) -> None:
        self._lease = lease
        self._measure = measure
        self._lock = threading.Lock()
        self._used = 0
        self._cached: tuple[tuple[float, int], ...] = ()
        self._at = 0.0
        """Time at which `_used` and `_cached` were given."""
        self._due = False
        self._sent_at = 0.0

    @property
    def running(self) -> bool:
        """Whether requests run, as far as the engine has reported."""
        return self._used > 0

    def usage(self, used: int, cached: Iterable[tuple[float, int]]) -> None:
        """Takes the bytes of running requests, and (seconds since last use, bytes) of prefixes; callable on any thread.
        Prefixes with the same ages as last time were used since, so a report is due for them too."""
        cached = tuple(cached)
        with self._lock:
            if used == self._used and not cached and not self._cached:
                return
            self._used, self._cached, self._at = used, cached, time.monotonic()
        self.soon()

    def soon(self) -> None:
        """Has a report sent because something changed; callable on any thread."""
        if not self._due:
            self._due = True
            self._lease.loop.call(self._schedule)

    # --- on the lease's thread

    def _schedule(self) -> None:
        wait = self._sent_at + _EVERY_S - time.monotonic()
        if wait > 0:
            self._lease.loop.later(wait, self._send_if_due)
        else:
            self._send_if_due()

    def _send_if_due(self) -> None:
        if self._due:
            self.send()

    def send(self, reclaim_id: int = 0, returned: int = 0) -> None:
        """Sends a report now. `reclaim_id`: the reclaim that it answers; `returned`: bytes given back for it."""
        self._due = False
        held, reserve = self._measure()
        with self._lock:
            used, cached, at = self._used, self._cached, self._at
            now = self._sent_at = time.monotonic()
        self._lease.report(
            Usage(
                held=held,
                used=used,
                reserve=reserve,
                cached=coarse((age_s + now - at, nbytes) for age_s, nbytes in cached),
                reclaim_id=reclaim_id,
                returned=returned,
            )
        )


def coarse(cached: Iterable[tuple[float, int]]) -> tuple[tuple[float, int], ...]:
    """(seconds since last use, bytes) of at most 64 groups, oldest first: neighbours are added up, and are as young as
    the youngest of them."""
    oldest_first = sorted(cached, reverse=True)
    step = -(-len(oldest_first) // _CACHED) or 1
    groups = [oldest_first[start : start + step] for start in range(0, len(oldest_first), step)]
    return tuple((group[-1][0], sum(nbytes for _, nbytes in group)) for group in groups)
