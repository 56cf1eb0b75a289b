"""One run: a trace through a system, on the virtual clock."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from placement.policy.traffic import ExpectedTraffic
from sim.clock import Clock
from sim.engines.cost import H200, GpuModel
from sim.inputs.catalogue import ModelSet, Spec
from sim.inputs.request import SimulatedRequest
from sim.inputs.trace import Workload
from sim.system import Build, System, World

_PROGRESS_EVERY_S = 10.0
"""Seconds of real time between lines of progress."""


@dataclass(frozen=True)
class ReplayOutcome:
    """The outcome of a replay."""

    trace: Workload
    system: System
    specs: Sequence[Spec]
    clock: Clock
    wall_s: float
    cpu_s: float
    ended_s: float
    """Virtual second at which the last request ended."""


@dataclass
class Replay:
    """A replay of a trace. `progress` is called with a line from time to time."""

    trace: Workload
    catalogue: ModelSet
    sizes: Sequence[int]
    build: Build
    settings: dict[str, str] = field(default_factory=dict)
    hardware: GpuModel = H200
    rates: Mapping[str, float] | None = None
    """Tokens per second of each model that systems planned ahead are told; None: the mean rates of this replay."""
    expected: Mapping[str, ExpectedTraffic] = field(default_factory=dict)
    """What each model was asked for before this replay, for systems that remember it."""
    patience_s: float = 3600.0
    """Virtual seconds after the last arrival in which requests may still end; later they count as failed."""
    progress: Callable[[str], None] = lambda line: print(line, file=sys.stderr)
    check_every_s: float = 0.0
    """Virtual seconds between two checks of every byte; 0: only at the end."""

    def run(self) -> ReplayOutcome:
        """Runs the replay. Raises FleetError before anything runs."""
        self._clock = Clock()
        self._ended = 0
        self._last_end = 0.0
        self._handed = -inf
        specs = self._specs()
        world = World(self._clock, self.hardware, self.sizes, specs, self._rates(), self.expected)
        system = self.build(world, self._count, self.settings)
        self._system = system
        self._arrivals = iter(self.trace.requests)
        self._next_arrival()
        if self.check_every_s:
            self._clock.after(self.check_every_s, self._check)
        began, began_cpu = time.perf_counter(), time.process_time()
        end = self.trace.seconds + self.patience_s
        self._pump(end, began)
        for request in self.trace.requests:
            if not request.served and not request.failed:
                request.failed = "it never ended"
        for group in system.groups:
            group.check()
        wall_s, cpu_s = time.perf_counter() - began, time.process_time() - began_cpu
        return ReplayOutcome(self.trace, system, specs, self._clock, wall_s, cpu_s, self._last_end)

    def _specs(self) -> list[Spec]:
        names = sorted({request.model for request in self.trace.requests})
        return [spec for name in names if (spec := self.catalogue.find(name)) is not None]

    def _rates(self) -> Mapping[str, float]:
        if self.rates is not None:
            return self.rates
        tokens: dict[str, int] = {}
        for request in self.trace.requests:
            tokens[request.model] = tokens.get(request.model, 0) + request.prompt_tokens + request.output_tokens
        return {name: count / self.trace.seconds for name, count in tokens.items()}

    def _pump(self, end: float, began: float) -> None:
        clock, total = self._clock, len(self.trace.requests)
        step, told = self.trace.seconds / 1000, began
        while self._ended < total and clock.now < end:
            if not clock.run(min(end, clock.now + step)):
                break
            now = time.perf_counter()
            if now - told > _PROGRESS_EVERY_S:
                told = now
                self.progress(
                    f"{clock.now / 3600:.2f} h of {self.trace.seconds / 3600:.2f} h, {self._ended} of {total} "
                    f"requests, {now - began:.0f} s"
                )

    def _next_arrival(self) -> None:
        request = next(self._arrivals, None)
        if request is not None:
            handed = max(request.arrival + self.hardware.path_s, self._handed + self.hardware.handover_s)
            self._handed = handed
            self._clock.at(handed, self._arrive, request)

    def _arrive(self, request: SimulatedRequest) -> None:
        self._next_arrival()
        self._system.submit(request)

    def _count(self, request: SimulatedRequest) -> None:
        self._ended += 1
        self._last_end = self._clock.now

    def _check(self) -> None:
        for group in self._system.groups:
            group.check()
        self._clock.after(self.check_every_s, self._check)
