"""A child that answers lines."""

from __future__ import annotations

import sys

import pytest

from services.ipc.line_process import LineProcess

ECHO = (
    sys.executable,
    "-c",
    "import sys\nprint('ready', flush=True)\nfor line in sys.stdin: print(line[::-1].strip(), flush=True)",
)
DIES = (sys.executable, "-c", "import sys\nprint('ready', flush=True)\nsys.stdin.readline()")
SILENT = (sys.executable, "-c", "import sys\nsys.stdin.read()")


async def test_line_process_answers_each_line() -> None:
    process = await LineProcess.start(ECHO, 60)
    assert await process.ask(b"abc", 60) == b"cba\n"
    assert await process.ask(b"de", 60) == b"ed\n"
    await process.stop()
    assert not process.alive


async def test_line_process_that_dies_at_a_line_raises_for_that_line() -> None:
    process = await LineProcess.start(DIES, 60)
    with pytest.raises(OSError, match="ended"):
        await process.ask(b"abc", 60)
    await process.stop()


async def test_line_process_that_cannot_start_or_is_never_ready_raises() -> None:
    with pytest.raises(OSError):
        await LineProcess.start(("/nowhere/at/all",), 60)
    with pytest.raises(OSError, match="ended"):
        await LineProcess.start((sys.executable, "-c", ""), 60)
    with pytest.raises(TimeoutError):
        await LineProcess.start(SILENT, 0.01)


async def test_line_process_that_takes_too_long_times_out() -> None:
    process = await LineProcess.start(DIES[:2] + ("print('ready', flush=True)\nimport signal\nsignal.pause()",), 60)
    with pytest.raises(TimeoutError):
        await process.ask(b"abc", 0.01)
    await process.stop()
