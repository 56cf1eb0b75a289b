"""Work in a thread that reports its progress, and ends soon once its result is not wanted any more."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Executor

Moved = Callable[[int], None]
"""Callback of the working thread for every so many bytes more. Raises Stopped: the work then ends."""

_APART_S = 0.02
"""Least seconds between two reports of progress: a copy has a part done every 0.2 ms, and to report takes longer than
that."""


class Stopped(Exception):
    """Raised in the thread when the work is not waited for any more."""


async def counted(work: Callable[[Moved], None], threads: Executor | None = None) -> AsyncGenerator[int, None]:
    """Runs `work` in a thread (of `threads`, or any) and yields the bytes done, as they grow. Closed or cancelled, it
    stops the work and waits for the thread, so that nothing is given back that is still written to. Raises what `work`
    raises."""
    loop = asyncio.get_running_loop()
    stirred = asyncio.Event()
    stopped = threading.Event()
    adding = threading.Lock()
    done = 0
    next_s = 0.0

    def moved(nbytes: int) -> None:
        nonlocal done, next_s
        if stopped.is_set():
            raise Stopped
        with adding:
            done += nbytes
        if (now := time.monotonic()) >= next_s:
            next_s = now + _APART_S
            loop.call_soon_threadsafe(stirred.set)

    running = loop.run_in_executor(threads, work, moved)
    running.add_done_callback(lambda _: stirred.set())
    try:
        while not running.done():
            yield done
            await stirred.wait()
            stirred.clear()
        await running
    finally:
        stopped.set()
        await _ended(running)


async def finished(work: Callable[[], None]) -> None:
    """Runs `work` in a thread to its end, however often the waiting is cancelled. Raises what `work` raises."""
    running = asyncio.get_running_loop().run_in_executor(None, work)
    await _ended(running)
    running.result()


async def _ended(running: asyncio.Future[None]) -> None:
    """Waits until the thread is done with its work, however often the waiting is cancelled meanwhile; the cancellation
    is then raised."""
    cancelled: asyncio.CancelledError | None = None
    while not running.done():
        try:
            await asyncio.wait([running])
        except asyncio.CancelledError as error:
            cancelled = error
    if not running.cancelled():
        running.exception()  # looked at, so that it is not reported as forgotten
    if cancelled is not None:
        raise cancelled
