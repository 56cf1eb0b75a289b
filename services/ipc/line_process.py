"""A child process that gets requests as lines and answers each with one line: for work that may end the process that
does it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from services.ipc import children

_LONGEST_LINE = 1 << 16


async def started(
    command: Sequence[str], within_s: float, longest_line: int = _LONGEST_LINE
) -> tuple[children.Process, bytes]:
    """A child process with its first line, which it writes once it is ready. Raises OSError if it cannot be started or
    ends, TimeoutError after `within_s` seconds."""
    process = await children.start(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        limit=longest_line,
        start_new_session=True,
    )
    try:
        return process, await _line_of(process, within_s)
    except BaseException:
        await children.end(process)
        raise


async def _line_of(process: children.Process, within_s: float) -> bytes:
    assert process.stdout is not None
    async with asyncio.timeout(within_s):
        line = await process.stdout.readline()
    if not line.endswith(b"\n"):
        raise OSError("it has ended")
    return line


class LineProcess:
    """One child process. Callers have to take turns, and have to import `services.ipc.forking` before grpc."""

    def __init__(self, process: children.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, command: Sequence[str], within_s: float) -> LineProcess:
        """Starts the child, and returns once it has written its first line. Raises OSError if it cannot be started or
        ends, TimeoutError after `within_s` seconds."""
        process, _ = await started(command, within_s)
        return cls(process)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    async def ask(self, line: bytes, within_s: float) -> bytes:
        """The child's answer to `line`, which has no line break. Raises OSError if the child has ended, TimeoutError
        after `within_s` seconds; after either error the child is of no use any more."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + b"\n")
        except RuntimeError as error:  # uvloop raises it for a closed pipe
            raise OSError(str(error)) from None
        return await _line_of(self._process, within_s)

    async def ended(self) -> None:
        """Returns once the process has ended and no more output comes from it."""
        assert self._process.stdout is not None
        await self._process.wait()
        await self._process.stdout.read()

    async def stop(self) -> None:
        await children.end(self._process)
