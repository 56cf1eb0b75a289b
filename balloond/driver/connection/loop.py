"""A thread that waits for descriptors, times and calls from other threads, and does nothing in between."""

from __future__ import annotations

import heapq
import itertools
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable


class DescriptorLoop:
    """Runs callbacks on its thread, one at a time. If one raises, the thread dies with its traceback."""

    def __init__(self, name: str) -> None:
        self._calls: deque[Callable[[], None]] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._wake, select.POLLIN)
        self._readers: dict[int, Callable[[], None]] = {}
        self._writers: dict[int, Callable[[], None]] = {}
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def here(self) -> bool:
        """Whether the caller is on this thread."""
        return threading.current_thread() is self._thread

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def call(self, what: Callable[[], None]) -> None:
        """Runs `what` on the thread soon; callable from any thread."""
        first = not self._calls
        self._calls.append(what)
        if first and not self.here():
            os.eventfd_write(self._wake, 1)

    def stop(self) -> None:
        """Ends the thread after what it does now; callable from any thread."""

        def end() -> None:
            self._stopping = True

        self.call(end)

    def join(self, timeout_s: float) -> None:
        if not self.here():
            self._thread.join(timeout_s)

    # --- on the thread

    def later(self, delay_s: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (time.monotonic() + delay_s, next(self._order), what))

    def add_reader(self, fd: int, what: Callable[[], None]) -> None:
        self._readers[fd] = what
        self._watch(fd)

    def remove_reader(self, fd: int) -> None:
        if self._readers.pop(fd, None) is not None:
            self._watch(fd)

    def add_writer(self, fd: int, what: Callable[[], None]) -> None:
        self._writers[fd] = what
        self._watch(fd)

    def remove_writer(self, fd: int) -> None:
        if self._writers.pop(fd, None) is not None:
            self._watch(fd)

    def _watch(self, fd: int) -> None:
        events = select.POLLIN * (fd in self._readers) | select.POLLOUT * (fd in self._writers)
        if events:
            self._poll.register(fd, events)
        else:
            self._poll.unregister(fd)

    def _run(self) -> None:
        while not self._stopping:
            for fd, events in self._poll.poll(self._wait_ms()):
                if fd == self._wake:
                    os.eventfd_read(self._wake)
                    continue
                if events & select.POLLOUT and fd in self._writers:
                    self._writers[fd]()
                # The event may also be an end or an error, which reading finds out.
                if events & ~select.POLLOUT and fd in self._readers:
                    self._readers[fd]()
            while self._calls and not self._stopping:
                self._calls.popleft()()
            now = time.monotonic()
            while self._timers and self._timers[0][0] <= now and not self._stopping:
                heapq.heappop(self._timers)[2]()
        # The eventfd is not closed: a late `call` must not write to a descriptor that is something else by then.

    def _wait_ms(self) -> float | None:
        if self._calls:
            return 0
        if not self._timers:
            return None
        return max(0.0, 1e3 * (self._timers[0][0] - time.monotonic()) + 0.5)
