"""Engines that tests use one after another: starting one takes far longer than most of the tests.

Tests and engines are of one loop: `pytest.mark.asyncio(loop_scope=...)`.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from protos import engine_pb2
from testing.engines.harness import EngineEnd, engine


class Engines:
    """Warm engines, all started with the same arguments."""

    def __init__(self, *arguments: str, **options: Any) -> None:
        """The arguments are those of `engine`."""
        self._arguments = arguments
        self._options = options
        self._warm: list[tuple[EngineEnd, contextlib.AsyncExitStack]] = []

    @contextlib.asynccontextmanager
    async def one(self) -> AsyncIterator[EngineEnd]:
        """A warm engine that nobody else has. It is kept for the next test if this one has not failed, nor ended it."""
        end, stack = self._warm.pop() if self._warm else await self._start()
        async with stack:
            yield end
            if end.process.returncode is None:
                await _leave(end)
                end.renew()
                self._warm.append((end, stack.pop_all()))

    async def _start(self) -> tuple[EngineEnd, contextlib.AsyncExitStack]:
        stack = contextlib.AsyncExitStack()
        end = await stack.enter_async_context(engine(*self._arguments, **self._options))
        return end, stack

    async def close(self) -> None:
        """Ends them in order."""
        while self._warm:
            end, stack = self._warm.pop()
            async with stack:
                assert await end.close() == 0


async def _leave(end: EngineEnd) -> None:
    """The model leaves with all that waits for it."""
    number = end.send(unload=engine_pb2.Unload())
    while (message := await end.hear("done", "failed")).done.command_id != number:
        assert message.WhichOneof("message") == "done" or message.failed.reason == "the model was unloaded", message
