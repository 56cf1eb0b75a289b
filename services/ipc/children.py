"""Starting child processes from coroutines that may be cancelled meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

Process = asyncio.subprocess.Process


async def start(*command: str, **options: Any) -> Process:
    """Starts a process as `asyncio.create_subprocess_exec` does, except that a cancellation waits for the process, ends
    it and is raised then. asyncio itself never returns from a creation that is cancelled before the pipes are connected
    (Python 3.11 and 3.12), and the process stays."""
    creation = asyncio.get_running_loop().create_task(asyncio.create_subprocess_exec(*command, **options))
    try:
        return await asyncio.shield(creation)
    except asyncio.CancelledError:
        with contextlib.suppress(OSError):
            await end(await creation)
        raise


async def end(process: Process) -> None:
    """Kills a process and waits until it has ended."""
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()
