"""Background tasks that have a name, are kept alive by a reference, and whose failure is seen."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from services.errors import PrismError, TimedOut
from services.telemetry import log

T = TypeVar("T")
_log = log.get(__name__)
_running: set[asyncio.Task[Any]] = set()


def spawn(
    work: Coroutine[Any, Any, Any], name: str, on_failure: Callable[[BaseException], None] | None = None
) -> asyncio.Task[Any]:
    """Starts `work` in the running loop. A failure is logged (with its trace, unless it is a PrismError) and passed to
    `on_failure`; a cancellation is neither."""
    task = asyncio.get_running_loop().create_task(work, name=name)
    _running.add(task)

    def ended(done: asyncio.Task[Any]) -> None:
        _running.discard(done)
        if done.cancelled():
            return
        failure = done.exception()
        if isinstance(failure, PrismError):  # it is one line, and a caller that waits for the task gets it as well
            _log.info("task ended", task=name, why=str(failure))
        elif failure is not None:
            _log.error("task failed", task=name, exc_info=failure)
        if failure is not None and on_failure is not None:
            on_failure(failure)

    task.add_done_callback(ended)
    return task


async def cancel(*tasks: asyncio.Task[Any]) -> None:
    """Cancels tasks and waits until they have ended, whatever they end with."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def within(work: Awaitable[T], limit_s: float, idle_s: Callable[[], float] | None = None) -> T:
    """What `work` returns. Raises TimedOut if that takes more than `limit_s` seconds. `idle_s`: seconds since something
    last happened for which the work may take longer, such as a kernel that is compiled; the limit counts from then, if
    that is later."""
    if idle_s is None:
        try:
            async with asyncio.timeout(limit_s):
                return await work
        except TimeoutError:
            raise TimedOut(f"not done within {limit_s:.0f} s") from None

    async def answer() -> T:
        return await work

    whole = asyncio.get_running_loop().create_task(answer())
    left_s = limit_s
    try:
        while left_s > 0:
            await asyncio.wait((whole,), timeout=left_s)
            if whole.done():
                return whole.result()
            left_s = limit_s - idle_s()
        raise TimedOut(f"not done within {limit_s:.0f} s")
    finally:
        if not whole.done():
            whole.cancel()
            await asyncio.wait((whole,))
            if not whole.cancelled():
                whole.exception()  # it is TimedOut that the caller gets
