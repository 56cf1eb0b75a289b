"""What a staircase of rates is measured with: eight models that fill two GPUs, an hour of traffic that no policy was
made on, the hour before it, and what is known of the systems before the first request.

The eight are the tight ones of the Prism paper's artifact (`benchmarks/_paper.py`): weights take three quarters of two
times 80 GiB. Nothing of the slice itself is known to anybody at the start: static partition and MuxServe++ are planned
from the hour before, and Prism's placement remembers it, as after a restart.
"""

from __future__ import annotations

import csv
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path

from benchmarks._paper import MISTRAL_7B, NEMO_12B
from benchmarks._slices import HOUR_S, UNSEEN_DEALING, dealt
from benchmarks._stairs import RATES, STEP_S, StairRow, climb
from benchmarks.gpu import compared
from benchmarks.systems import SYSTEMS, Model, Sizes, System, plan
from placement.planning import traffic_file
from placement.policy.assignment.partition import Part
from placement.policy.traffic import ExpectedTraffic, TrafficCounts, TrafficHour
from sim.inputs import trace
from sim.inputs.catalogue import SHAPES, ModelSet, Spec
from sim.inputs.history import expected
from sim.inputs.request import SimulatedRequest

MODELS = {
    "12b-1": "12b",
    "12b-2": "12b",
    "8b-1": "8b",
    "12b-3": "12b",
    "7b-1": "7b",
    "7b-2": "7b",
    "3b-1": "3b",
    "3b-2": "3b",
}
"""With their shapes, in the order in which names of the trace are dealt to them."""
SIMULATED = {"12b": NEMO_12B, "8b": SHAPES["8b"], "7b": MISTRAL_7B, "3b": SHAPES["3b"]}
CAPACITY_BYTES = 80 << 30
"""Of each GPU, for models."""
QUOTA_BYTES = 1792 << 20
"""Of each engine beside weights, graphs and KV: those up to 8B took 1.61 GiB at most; one of 12B is not measured
yet."""
IMAGE_BYTES = 140 << 30
"""Host memory for weight images: 123 GiB of weights, and the rounding of eight images."""
ENGINE_HOST_BYTES = 5 << 30
"""Host memory that each engine process is reckoned with, beside images."""
CONTEXT_TOKENS = 8192
TRACE, HOUR = "servegen48.csv.gz", 17
"""An hour of the half that no policy was made on, the livelier one of its quick cells (`benchmarks/_slices.py`)."""
TTFT_SCALE = TPOT_SCALE = 5.0
"""Times the P95 of each model alone: the artifact's."""
ALONE, ALONE_GAP_S = 20, 0.5
"""Requests of each model by which its time alone is measured, and the longest gap between two of them."""


@dataclass(frozen=True)
class StairLoad:
    """A slice at rate 1, and what each model was asked for in the hour before it."""

    rows: Sequence[StairRow]
    before: Mapping[str, ExpectedTraffic]
    counts: Mapping[str, TrafficCounts]
    """Of that hour."""

    def plan(
        self,
        models: Sequence[Model],
        devices: Mapping[str, int],
        sizes: Sizes,
        slos: Mapping[str, Mapping[str, float]] | None = None,
    ) -> dict[str, Part]:
        """Places and memory by what each model was asked for in the hour before, and by `slos` in milliseconds where
        they are known. Raises ValueError."""
        targets = {name: of["tpot_ms"] / 1e3 for name, of in (slos or {}).items() if "tpot_ms" in of}
        asked = [
            SimulatedRequest(name, name, 0.0, counts.prompt_tokens, counts.output_tokens, tpot_s=targets.get(name, inf))
            for name, counts in self.counts.items()
        ]
        return plan(models, asked, HOUR_S, devices, sizes)

    def alone(self, model: str, most: int = ALONE) -> list[SimulatedRequest]:
        """Its first requests, with short gaps."""
        found, due, before = list[SimulatedRequest](), 0.0, None
        for row in (row for row in self.rows if row.model == model):
            due += 0.0 if before is None else min(ALONE_GAP_S, row.arrival - before)
            before = row.arrival
            found.append(SimulatedRequest(str(len(found)), model, due, row.prompt_tokens, row.output_tokens))
            if len(found) == most:
                break
        return found

    def write_stairs(self, path: Path, step_s: float) -> Path:
        """The staircase as a trace with served models' names."""
        return compared.write_trace(path, [tuple(row) for row in climb(self.rows, step_s)])

    def write_traffic(self, path: Path) -> None:
        """The hour before, as a placement that was restarted finds it. Of this hour of the calendar as well, so that
        it does not matter when the next one begins."""
        present = int(time.time() // HOUR_S)
        hour = TrafficHour(HOUR_S, dict(self.counts))
        traffic_file.write(str(path), traffic_file.encoded({present - 1: hour, present: hour}))


def cut(traces: Path, to: Path) -> None:
    """Writes what a host needs of the trace: the slice, and what was asked for in the hour before."""
    names = dealt(sorted({row[2] for row in trace.rows(traces / TRACE)}), list(MODELS), UNSEEN_DEALING)

    def read(from_s: float, seconds: float) -> list[SimulatedRequest]:
        every = ModelSet([Spec("*", SHAPES["8b"], context_tokens=CONTEXT_TOKENS)])
        found = trace.read(traces / TRACE, every, trace.Slice(from_s, seconds)).requests
        for each in found:
            each.model = names[each.model]
        return found

    to.mkdir(parents=True, exist_ok=True)
    rows = read(HOUR * HOUR_S, STEP_S * len(RATES))
    compared.write_trace(to / "slice.csv", [(r.arrival, r.model, r.prompt_tokens, r.output_tokens) for r in rows])
    earlier = read((HOUR - 1) * HOUR_S, HOUR_S)
    returns = expected(earlier, HOUR_S)
    before = {}
    for name in MODELS:
        mine = [each for each in earlier if each.model == name]
        tokens = sum(each.prompt_tokens for each in mine), sum(each.output_tokens for each in mine)
        before[name] = [len(mine), *tokens, round(returns[name].returns_per_s * HOUR_S) if mine else 0]
    (to / "before.json").write_text(json.dumps(before, indent=1))


def load(folder: Path) -> StairLoad:
    """What `cut` wrote. Raises OSError."""
    with open(folder / "slice.csv", newline="") as file:
        _, *lines = csv.reader(file)
    rows = [StairRow(float(at), name, int(prompt), int(output)) for at, name, prompt, output in lines]
    counts = {name: TrafficCounts(*found) for name, found in json.loads((folder / "before.json").read_text()).items()}
    before = {
        name: ExpectedTraffic((of.prompt_tokens + of.output_tokens) / HOUR_S, of.returns / HOUR_S)
        for name, of in counts.items()
    }
    return StairLoad(rows, before, counts)


def system(name: str, traffic: Path) -> System:
    """One that is compared; Prism with the memory of the hour before."""
    found = SYSTEMS[name]
    if found.planned:
        return found
    return replace(found, placement={**found.placement, "traffic_file": str(traffic)})
