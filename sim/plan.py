"""Capacity planning: a load on a fleet, and the fewest GPUs that serve it as well as required.

Before the load every model gets one request, which does not count: a fleet that serves has started its models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

from sim.engines.cost import H200, GpuModel
from sim.inputs.catalogue import ModelSet
from sim.inputs.request import SimulatedRequest
from sim.inputs.trace import Workload
from sim.replay import Replay
from sim.report import build
from sim.system import Build, FleetError, SettingError

_WARM_GAP_S = 10.0
"""Seconds between the first requests of two models before the load: longer than a start takes."""


@dataclass(frozen=True)
class PlannedLoad:
    """A trace that can be replayed again and again: a replay writes into its requests."""

    trace: Workload

    def models(self) -> list[str]:
        """Names of the models that are asked for, sorted."""
        return sorted({request.model for request in self.trace.requests})

    def again(self) -> tuple[Workload, list[SimulatedRequest]]:
        """A workload of new requests, with one for each model before the load, and the requests that count."""
        names = self.models()
        warm = [SimulatedRequest(f"warm-{name}", name, i * _WARM_GAP_S, 16, 1) for i, name in enumerate(names)]
        begin = len(names) * _WARM_GAP_S
        counted = [
            SimulatedRequest(r.id, r.model, begin + r.arrival, r.prompt_tokens, r.output_tokens, r.ttft_s, r.tpot_s)
            for r in self.trace.requests
        ]
        return Workload([*warm, *counted], begin + self.trace.seconds, self.trace.clipped), counted


@dataclass(frozen=True)
class FleetAttempt:
    """One fleet with the report of its replay, or why it cannot serve these models at all."""

    sizes: Sequence[int]
    """Number of devices of each group."""
    report: dict[str, Any] | None = None
    refused: str = ""

    @property
    def gpus(self) -> int:
        return sum(self.sizes)

    @property
    def attainment(self) -> float:
        return float(self.report["all"]["attainment"]) if self.report else -inf


@dataclass
class FleetPlanner:
    """Tries fleets. `groups` are always there; the number of groups of one GPU beside them varies."""

    load: PlannedLoad
    catalogue: ModelSet
    build: Build
    settings: dict[str, str] = field(default_factory=dict)
    groups: Sequence[int] = ()
    hardware: GpuModel = H200
    progress: Callable[[str], None] = lambda line: None

    def tried(self, singles: int) -> FleetAttempt:
        """The attempt with so many GPUs as a group each, beside the fixed groups. Raises SettingError."""
        sizes = [*[1] * singles, *self.groups]
        if not sizes:
            return FleetAttempt(sizes, refused="no GPUs")
        trace, counted = self.load.again()
        replay = Replay(
            trace,
            self.catalogue,
            sizes,
            self.build,
            dict(self.settings),
            self.hardware,
            progress=self.progress,
        )
        try:
            outcome = replay.run()
        except SettingError:
            raise
        except FleetError as error:
            return FleetAttempt(sizes, refused=str(error))
        return FleetAttempt(sizes, build(replace(outcome, trace=replace(self.load.trace, requests=counted))))

    def fewest(self, most: int, target: float) -> list[FleetAttempt]:
        """Every fleet that was tried, in order; the last one is the answer, which misses the target only if `most` GPUs
        in groups of their own miss it too. More GPUs are taken to serve no worse, which is nearly always so: the number
        is searched by halves. Raises SettingError."""
        seen = [self.tried(most)]
        if seen[0].attainment < target:
            return seen
        low, high, best = 0 if self.groups else 1, most, seen[0]
        while low < high:
            middle = (low + high) // 2
            tried = self.tried(middle)
            seen.append(tried)
            if tried.attainment >= target:
                high, best = middle, tried
            else:
                low = middle + 1
        return [*(tried for tried in seen if tried is not best), best]
