"""The identity of a process for longer than its pid (a pid is used again, a pid with its start time is not), and the
watch for its death."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ProcessIdentity:
    """A process of this boot."""

    pid: int
    started: int
    """Start time in clock ticks since boot, as /proc has it."""

    def __str__(self) -> str:
        return f"{self.pid}-{self.started}"


NOBODY = ProcessIdentity(0, 0)
"""Identity that no process ever has: whatever looks for it finds it gone."""


def started(pid: int) -> int:
    """Start time of `pid` in clock ticks since boot. Raises ProcessLookupError if there is no such process, another
    OSError if it cannot be looked up."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        raise ProcessLookupError(f"no process {pid}") from None
    # The name, in parentheses, may hold anything; the 22nd field is the 20th after it.
    return int(stat.rpartition(")")[2].split()[19])


def watch(process: ProcessIdentity) -> int:
    """A pidfd of exactly this process, readable once it is dead; the caller closes it. Raises ProcessLookupError if it
    is gone, another OSError if that cannot be found out: without a free descriptor no process is taken for dead."""
    try:
        pidfd = os.pidfd_open(process.pid)
    except OSError as error:
        if error.errno not in (errno.ESRCH, errno.EINVAL):
            raise
        raise ProcessLookupError(f"no process {process.pid}") from None
    try:
        if started(process.pid) != process.started:
            raise ProcessLookupError(f"{process.pid} is another process now")
    except OSError:
        os.close(pidfd)
        raise
    return pidfd


class DeathWatch:
    """Watches processes in the running loop, each under a key of the caller's."""

    def __init__(self) -> None:
        self._pidfds: dict[str, int] = {}

    def __contains__(self, key: str) -> bool:
        return key in self._pidfds

    def watch(self, key: str, process: ProcessIdentity, on_death: Callable[[], None]) -> None:
        """Calls `on_death` once when `process` is dead; replaces the watch under `key`. Raises what the function
        `watch` does; then the watch under `key` stays as it was."""
        pidfd = watch(process)
        self.forget(key)
        self._pidfds[key] = pidfd

        def died() -> None:
            self.forget(key)
            on_death()

        asyncio.get_running_loop().add_reader(pidfd, died)

    def forget(self, key: str) -> None:
        pidfd = self._pidfds.pop(key, None)
        if pidfd is not None:
            asyncio.get_running_loop().remove_reader(pidfd)
            os.close(pidfd)
