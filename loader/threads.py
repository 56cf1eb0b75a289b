"""Work in a thread that tells how far it is, and ends soon once nobody wants it any more."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Executor

Moved = Callable[[int], None]
"""Told by the working thread of every so many bytes more. Raises Stopped: the work then ends."""


class Stopped(Exception):
    """Nobody waits for the work any more."""


async def counted(work: Callable[[Moved], None], threads: Executor | None = None) -> AsyncGenerator[int, None]:
    """Runs `work` in a thread (of `threads`, or any) and yields the bytes done, as they grow. Closed or cancelled, it
    stops the work and waits for the thread, so that nothing is given back that is still written to. Raises what `work`
    does."""
    loop = asyncio.get_running_loop()
    stirred = asyncio.Event()
    stopped = threading.Event()
    adding = threading.Lock()
    done = 0

    def moved(nbytes: int) -> None:
        nonlocal done
        if stopped.is_set():
            raise Stopped
        with adding:
            done += nbytes
        if not stirred.is_set():  # or the loop has yet to look at it
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


async def _ended(running: asyncio.Future[None]) -> None:
    """Returns when the thread is done with it, however often the waiting is cancelled meanwhile; the cancellation is
    then raised."""
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
