"""Starts a local system's processes in order, restarts those that die, and ends all."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import math
import os
import re
import signal
import sys
import time
import types
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path

from deploy.healthy import healthy
from deploy.local.topology import Process
from services.runtime import tasks

_START_TIMEOUT_S = 120.0
_RESTART_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 30.0
_SETTLED_S = 10.0
"""Seconds after which a process that ends is one that had worked: it is started again soon."""
_MOST_CRASHES = 3
_RECENT_S = 5.0
"""Seconds before an end in which lines were written that may give its reason."""
_DATE = re.compile(r'"timestamp": "([^"]+)"')
"""The date in a line of a log; what other programs write has none."""
_USUAL = '"level": "info"'
"""Part of the lines of a log that give no reason for an end."""
_STOP_S = 20.0
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)
_NO_MORE: Mapping[str, str] = types.MappingProxyType({})


class StartFailed(Exception):
    """A process ended before it was healthy; the message has its last lines."""


def die_with_parent() -> None:
    """Has the child die with its parent, so that even a killed launcher leaves no process behind. Runs in the child."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _end(status: int) -> str:
    """How a process ended whose exit status is this; the negative of a signal for one that a signal killed."""
    if status >= 0:
        return f"ended with status {status}"
    known = -status in set(signal.Signals)
    return f"was killed by {signal.Signals(-status).name if known else f'signal {-status}'}"


def recent(lines: Sequence[str], written: float, since: float) -> list[str]:
    """The lines at the end of a log that were written at `since` or later. `written`: when the last one was; both in
    seconds of the epoch. A line without a date is taken to be as old as the next one that has a date."""
    latest, found = written, list[str]()
    for line in reversed(lines):
        if (date := _DATE.search(line)) is not None:
            with contextlib.suppress(ValueError):
                latest = datetime.fromisoformat(date[1]).timestamp()
        if latest < since:
            break
        found.append(line)
    return found[::-1]


class SupervisedProcess:
    """One process, started again when it dies by itself."""

    def __init__(
        self, process: Process, logs: Path, say: Callable[[str], None], environment: Mapping[str, str] = _NO_MORE
    ) -> None:
        self.spec = process
        self._environment = environment
        self.log_path = logs / f"{process.name}.log"
        self.restarts = 0
        self._say = say
        self._child: asyncio.subprocess.Process | None = None
        self._log_from = 0
        """Bytes of the log that were there when the process was started last."""
        self._ending = asyncio.Event()
        self._watch: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        return self._child.pid if self._child is not None else 0

    async def start(self) -> None:
        """Starts the process, and returns when it is healthy. Raises StartFailed."""
        await self._spawn()
        await self._healthy()
        self._watch = tasks.spawn(self._keep(), f"watch {self.spec.name}")

    async def _spawn(self) -> None:
        with open(self.log_path, "ab") as log:
            self._log_from = log.tell()
            self._child = await asyncio.create_subprocess_exec(
                *self.spec.under,
                sys.executable,
                "-m",
                self.spec.module,
                *self.spec.arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C reaches the launcher alone, which ends the processes in order
                preexec_fn=die_with_parent,
                env={**os.environ, **self._environment, "PYTHONUNBUFFERED": "1"},
            )

    async def _healthy(self) -> None:
        assert self._child is not None
        began = time.monotonic()
        while time.monotonic() - began < _START_TIMEOUT_S:
            status = self._child.returncode
            if status is not None and status < 0 and self.restarts < _MOST_CRASHES:
                # A crash, not a refusal: a supervisor would start it again.
                self.restarts += 1
                self._say(f"{self.spec.name} {_end(status)} while it started; starting it again")
                await self._spawn()
                continue
            if status is not None:
                raise StartFailed(f"{self.spec.name} {_end(status)}:\n{self._last_lines()}")
            if await healthy(self.spec.probe, timeout_s=1.0):
                return
            await asyncio.sleep(0.05)
        raise StartFailed(f"{self.spec.name} was not healthy after {_START_TIMEOUT_S:.0f} s:\n{self._last_lines()}")

    def _last_lines(self, since: float = -math.inf) -> str:
        """The last lines that the process wrote since it was started last, and since `since`, seconds of the epoch."""
        try:
            with open(self.log_path, "rb") as log:
                log.seek(self._log_from)
                lines = log.read().decode(errors="replace").splitlines()
                written = os.fstat(log.fileno()).st_mtime
        except OSError:
            return "(no log)"
        lines = recent(lines, written, since)
        return "\n".join("    " + line for line in lines[-12:])

    async def _keep(self) -> None:
        """Starts the process again whenever it ends, after longer and longer pauses if it does so soon. What it wrote
        last, just before its end, is said once for each reason: lines that differ in their numbers only have one."""
        pause_s = _RESTART_PAUSE_S
        told: set[str] = set()
        while not self._ending.is_set():
            assert self._child is not None
            began = time.monotonic()
            status = await self._child.wait()
            if self._ending.is_set():
                return
            self.restarts += 1
            if time.monotonic() - began >= _SETTLED_S:
                pause_s, told = _RESTART_PAUSE_S, set()
            lines = self._last_lines(since=time.time() - _RECENT_S).splitlines()
            last = "\n".join(line for line in lines if _USUAL not in line)
            reason = re.sub(r"\d+", "", last)
            shown = f":\n{last}" if reason and reason not in told else ""
            told.add(reason)
            self._say(f"{self.spec.name} {_end(status)}; starting it again in {pause_s:g} s{shown}")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._ending.wait()
                    return
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            await self._spawn()

    async def kill(self) -> None:
        """Ends the process with SIGKILL; it is not started again."""
        await self._start_no_more()
        if self._child is not None and self._child.returncode is None:
            self._child.kill()
            await self._child.wait()

    async def _start_no_more(self) -> None:
        """Returns when the process that is there is the last one."""
        self._ending.set()
        if self._watch is not None and self._child is not None and self._child.returncode is not None:
            await asyncio.wait([self._watch])  # it may be about to start the next one

    async def end(self) -> None:
        await self._start_no_more()
        child = self._child
        if child is None or child.returncode is not None:
            return
        child.terminate()
        try:
            async with asyncio.timeout(_STOP_S):
                await child.wait()
        except TimeoutError:
            self._say(f"{self.spec.name} did not end; killing it")
            os.killpg(child.pid, signal.SIGKILL)
            await child.wait()


class LocalSystem:
    """All processes of a local system."""

    def __init__(
        self,
        plan: list[Process],
        logs: Path,
        say: Callable[[str], None],
        environment: Mapping[str, str] = _NO_MORE,
    ) -> None:
        """`environment`: variables that the processes get beside the launcher's own."""
        logs.mkdir(parents=True, exist_ok=True)
        self.running = {process.name: SupervisedProcess(process, logs, say, environment) for process in plan}
        self._plan = plan
        self._say = say

    async def start(self) -> None:
        """Starts every process as soon as those before it are healthy. On failure everything is ended, and StartFailed
        raised."""
        healthy = {process.name: asyncio.Event() for process in self._plan}

        async def start_one(process: Process) -> None:
            for name in process.after:
                await healthy[name].wait()
            began = time.monotonic()
            await self.running[process.name].start()
            self._say(f"{process.name} is up ({time.monotonic() - began:.1f} s)")
            healthy[process.name].set()

        try:
            async with asyncio.TaskGroup() as group:
                for process in self._plan:
                    group.create_task(start_one(process), name=f"start {process.name}")
        except* StartFailed as failures:
            await self.end()
            raise failures.exceptions[0] from None

    async def kill(self) -> None:
        """Kills all processes at once, as when a host dies."""
        await asyncio.gather(*(running.kill() for running in self.running.values()))

    async def end(self) -> None:
        """Ends the processes in the reverse order: a client goes before its server."""
        for process in reversed(self._plan):
            await self.running[process.name].end()
