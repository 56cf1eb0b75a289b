"""The process with SGLang's parsers (`gpu_scheduler/engines/sglang/answer_parsers.py`): it starts when it is first
needed, and again after it has ended."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections import deque
from collections.abc import Sequence
from typing import Any

import orjson

from services.errors import Unavailable
from services.ipc import children, line_process
from services.runtime import tasks
from services.telemetry import log

_log = log.get(__name__)
COMMAND = (sys.executable, "-m", "gpu_scheduler.engines.sglang.answer_parsers")
START_S = 120.0
"""Seconds until the process has to be ready: importing SGLang takes five, on a cold and busy disk a minute."""
ANSWER_S = 20.0
"""Seconds until an answer of the process is given up, and the process ended. A parser takes microseconds."""
_LONGEST_LINE = 1 << 26


class ProcessLost(Exception):
    """The process ended, or did not answer, with lines unanswered."""


class RunningParsers:
    """One run of the process. Lines are answered in their order, so several may be on their way."""

    def __init__(self, process: children.Process) -> None:
        self._process = process
        self._asked: deque[asyncio.Future[bytes]] = deque()
        self._reading = tasks.spawn(self._read(), "read from the parsers")

    @classmethod
    async def start(cls, command: Sequence[str]) -> tuple[RunningParsers, dict[str, Any]]:
        """Starts it; returns it with its first line. Raises OSError, TimeoutError."""
        process, line = await line_process.started(command, START_S, _LONGEST_LINE)
        return cls(process), orjson.loads(line)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return not self._reading.done()

    async def _read(self) -> None:
        assert self._process.stdout is not None
        try:
            while (line := await self._process.stdout.readline()).endswith(b"\n"):
                answer = self._asked.popleft()
                if not answer.done():
                    answer.set_result(line)
        finally:
            for answer in self._asked:
                if not answer.done():
                    answer.set_exception(ProcessLost("it has ended"))

    def forget(self, key: int) -> None:
        """Has it forget an answer."""
        if self.alive:
            with contextlib.suppress(ProcessLost):
                self._write(orjson.dumps(("close", key)))

    def _write(self, line: bytes) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + b"\n")
        except (OSError, RuntimeError):  # uvloop raises the second for a closed pipe
            raise ProcessLost("it has ended") from None

    async def ask(self, *what: Any) -> dict[str, Any]:
        """The answer to one request. Raises ProcessLost if the process ends meanwhile."""
        if not self.alive:
            raise ProcessLost("it has ended")
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._asked.append(answer)
        # Schemas of tools may have numbers beyond 64 bits, which orjson does not write.
        self._write(json.dumps(what).encode())
        try:
            async with asyncio.timeout(ANSWER_S):
                found: dict[str, Any] = orjson.loads(await answer)
                return found
        except TimeoutError:
            await self.stop()
            raise ProcessLost("it did not answer") from None

    async def stop(self) -> None:
        await children.end(self._process)
        await tasks.cancel(self._reading)


class ParserProcess:
    """The process, whichever run of it."""

    def __init__(self, command: Sequence[str] = COMMAND) -> None:
        self._command = command
        self._starting: asyncio.Task[RunningParsers] | None = None
        self._closed = False
        self.names: dict[str, list[str]] = {}
        """Names of the parsers by kind ("reasoning", "tools"), once it has started."""

    async def ready(self) -> RunningParsers:
        """The process, started if it does not run. Raises Unavailable if it cannot be started."""
        found = self._starting
        if found is None or (found.done() and (found.exception() is not None or not found.result().alive)):
            if self._closed:
                raise Unavailable("this gateway is stopping")
            found = self._starting = tasks.spawn(self._start(), "start the parsers")
        try:
            return await asyncio.shield(found)
        except (OSError, TimeoutError, ValueError) as error:
            why = str(error) or type(error).__name__
            raise Unavailable(f"the process that takes answers apart cannot be started: {why}") from None

    async def _start(self) -> RunningParsers:
        running, self.names = await RunningParsers.start(self._command)
        if self._closed:
            await running.stop()
            raise OSError("the gateway has ended")
        _log.info("parsers of answers are ready", **{kind: len(names) for kind, names in self.names.items()})
        return running

    async def ask(self, *what: Any) -> dict[str, Any]:
        """The answer to one request. Raises ProcessLost if the process ends meanwhile, Unavailable."""
        return await (await self.ready()).ask(*what)

    async def close(self) -> None:
        self._closed = True
        found, self._starting = self._starting, None
        if found is not None:
            await tasks.cancel(found)
            if not found.cancelled() and found.exception() is None:
                await found.result().stop()
