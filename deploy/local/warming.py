"""Reports to the person at the terminal until each group has an engine that can take a model, or has a model that
answers: what engines are doing, for how long, and what went wrong."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path

from gpu_scheduler.client import GpuSchedulerClient
from protos import common_pb2, gpu_scheduler_pb2
from services.runtime import tasks
from services.runtime.progress import Far, ProgressMeter

EVERY_S = 10.0
"""Seconds between two lines about a group of which nothing new is known."""
_DRAWN_S = 0.5
"""Seconds between two drawings on a terminal."""
LONGEST_S = 300.0
"""The most seconds of waiting, longer than a gpu_scheduler waits for an engine's imports: by then it is known what went
wrong."""
_SILENT_S = 5.0
"""Seconds without a report after which a group counts as silent; it reports every second."""
_LAST_LINES = 12


@dataclass(frozen=True)
class WatchedGroup:
    """A group: the address of its gpu_scheduler, and the gpu_scheduler's log, to which its engines write as well."""

    name: str
    address: str
    log: Path


def doing(state: gpu_scheduler_pb2.GroupState) -> str:
    """What the engines of a group are doing: those that start, and those that bring a model up at once."""
    parts = [step if count == 1 else f"{step} ({count} engines)" for step, count in Counter(state.starting).items()]
    for resident in state.residents:
        if resident.residency == common_pb2.WAKING:
            step = resident.progress.step
            parts.append(f"{resident.model}: {step}" if step else f"{resident.model} comes up")
    return ", ".join(parts) or "no engine is on its way"


def serves(state: gpu_scheduler_pb2.GroupState) -> bool:
    """Whether a model of the group answers: a request that came early took the first engine before it was seen warm."""
    return any(resident.residency == common_pb2.ACTIVE for resident in state.residents)


def last_lines(log: Path) -> list[str]:
    """The last lines that engines wrote: a traceback, or output of a library. The lines of services are JSON."""
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        return []
    return [f"    {line}" for line in lines if line.strip() and not line.startswith("{")][-_LAST_LINES:]


class Warming:
    """Watches all groups. `run` ends when each has a warm engine or a model that answers, or starts none any more, or
    the time is over."""

    def __init__(self, groups: Sequence[WatchedGroup], say: Callable[[str], None]) -> None:
        self._groups = groups
        self._say = say
        self._states: dict[str, gpu_scheduler_pb2.GroupState] = {}
        self._heard_at: dict[str, float] = {}
        self._waiting = {group.name for group in groups}
        self.problems: dict[str, str] = {}
        """Group -> why it has no warm engine."""

    async def run(self) -> None:
        began = asyncio.get_running_loop().time()
        telling = tasks.spawn(self._tell(began), "tell what engines are at")
        try:
            async with asyncio.timeout(LONGEST_S):
                await asyncio.gather(*(self._follow(group, began) for group in self._groups))
        except TimeoutError:
            for group in self._groups:
                if group.name in self._waiting:
                    self._failed(group, f"no engine is warm after {LONGEST_S:.0f} s: {self._at(group.name)}")
        finally:
            await tasks.cancel(telling)

    async def _follow(self, group: WatchedGroup, began: float) -> None:
        now = asyncio.get_running_loop().time
        client = GpuSchedulerClient(group.address)
        told = ""
        try:
            async for state in client.watch():
                if state is None:
                    continue
                self._states[group.name], self._heard_at[group.name] = state, now()
                if state.warm_engines:
                    self._say(f"{group.name} has a warm engine ({now() - began:.0f} s)")
                    break
                if serves(state):
                    self._say(f"{group.name} has a model that answers ({now() - began:.0f} s)")
                    break
                if state.engines_given_up:
                    self._failed(group, f"engines do not start: {state.engines_error}")
                    break
                if state.engines_error not in ("", told):
                    self._say(f"{group.name}: {state.engines_error}; another one is started (log: {group.log})")
                    told = state.engines_error
            self._waiting.discard(group.name)
        finally:
            await client.close()

    def _failed(self, group: WatchedGroup, why: str) -> None:
        self.problems[group.name] = f"{why}; its log is {group.log}"
        self._say("\n".join([f"{group.name}: {self.problems[group.name]}", *last_lines(group.log)]))

    async def _tell(self, began: float) -> None:
        """Tells what engines are doing, for ever: on a terminal all the time, elsewhere every EVERY_S seconds, with one
        line for all groups that do the same."""
        now = asyncio.get_running_loop().time
        with ProgressMeter("prism", self._say) as meter:
            while True:
                await asyncio.sleep(_DRAWN_S if meter.draws else EVERY_S)
                at: dict[str, list[str]] = {}
                for group in self._groups:
                    if group.name in self._waiting:
                        at.setdefault(self._at(group.name), []).append(group.name)
                lines = [f"{', '.join(names)}: {what}" for what, names in at.items()]
                if meter.draws and lines:
                    meter.show(Far("; ".join(lines)))
                elif not meter.draws:
                    for line in lines:
                        self._say(f"{line}, {now() - began:.0f} s")

    def _at(self, name: str) -> str:
        silent_s = asyncio.get_running_loop().time() - self._heard_at.get(name, -inf)
        return "its gpu_scheduler does not answer" if silent_s > _SILENT_S else doing(self._states[name])
