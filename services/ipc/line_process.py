"""A child process that is asked by lines and answers each with one: for work that may end the process that does it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from services.ipc import children

_LONGEST_LINE = 1 << 16


class LineProcess:
    """One child. Callers take turns. Importing `services.ipc.forking` before grpc is theirs to do."""

    def __init__(self, process: children.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, command: Sequence[str], within_s: float) -> LineProcess:
        """Started, once it has said its first line. Raises OSError where it cannot be, TimeoutError."""
        process = await children.start(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            limit=_LONGEST_LINE,
            start_new_session=True,
        )
        made = cls(process)
        try:
            await made._said(within_s)
        except BaseException:
            await made.stop()
            raise
        return made

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    async def ask(self, line: bytes, within_s: float) -> bytes:
        """Its answer to `line`, which has no line break. Raises OSError when it has ended, TimeoutError; after either
        it is of no use any more."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + b"\n")
        except RuntimeError as error:  # uvloop's, of a closed pipe
            raise OSError(str(error)) from None
        return await self._said(within_s)

    async def _said(self, within_s: float) -> bytes:
        assert self._process.stdout is not None
        async with asyncio.timeout(within_s):
            line = await self._process.stdout.readline()
        if not line.endswith(b"\n"):
            raise OSError("it has ended")
        return line

    async def ended(self) -> None:
        """Returns once the process has ended and nothing more comes from it."""
        assert self._process.stdout is not None
        await self._process.wait()
        await self._process.stdout.read()

    async def stop(self) -> None:
        await children.end(self._process)
