"""What is compared on: the models and their targets, the slices of traces, and which model each name of a trace is
dealt to."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path

from sim.engines.cost import Shape
from sim.inputs import trace
from sim.inputs.catalogue import ModelSet, Spec
from sim.inputs.request import SimulatedRequest


@dataclass(frozen=True)
class Slice:
    """A part of a trace, and how many requests are made of each of its."""

    trace: str
    from_s: float
    rates: tuple[float, ...]
    seconds: float = 240.0


SLICES = {
    "hyperbolic": Slice("hyperbolic7.csv.gz", 0.0, (8.0, 24.0)),
    "busy": Slice("servegen48.csv.gz", 11 * 3600.0, (2.0, 6.0)),
    "quiet": Slice("servegen48.csv.gz", 6 * 3600.0, (2.0, 6.0)),
}
"""servegen48's liveliest hour and its calmest, by its README."""
MODELS = {
    "8b-1": "8b",
    "3b-1": "3b",
    "1b-1": "1b",
    "8b-2": "8b",
    "3b-2": "3b",
    "1b-2": "1b",
    "3b-3": "3b",
    "1b-3": "1b",
}
"""Name of each model -> its shape."""
GRAPH_BYTES = {"12b": 832 << 20, "8b": 512 << 20, "7b": 640 << 20, "3b": 640 << 20, "1b": 640 << 20}
"""Bytes booked for an engine's CUDA graphs, by shape: one extent of 32 MiB more than they took on H200s (480 MiB of 8b,
608 of 3b and 1b; 12b and 7b are not measured yet, and reckoned with more). A plan that fills a device to the last byte
does not come up with one less: static partition once did not, where 576 were taken for all of them."""
CAPACITY_BYTES = 44 << 30
"""Bytes of each GPU that the system may use: weights, engines and graphs of all eight take about 40 GB on either, so
that KV is short."""
TTFT_SCALE, TPOT_SCALE = 5.0, 2.0
"""Times the P95 of each model alone: of ALONE requests, with gaps of ALONE_GAP_S at most; the smaller one of two times
where there were two (`compare.py`)."""
ALONE, ALONE_GAP_S = 24, 1.0


def deal(names: Sequence[str], models: Sequence[str]) -> dict[str, str]:
    """Sorted, round and round."""
    return dict(zip(sorted(names), cycle(models), strict=False))


def cut(traces: Path, to: Path, models: Sequence[str]) -> None:
    """Writes each slice, with the times it had, and to which model each name of the whole trace is dealt."""
    to.mkdir(parents=True, exist_ok=True)
    for name, part in SLICES.items():
        with gzip.open(traces / part.trace, "rt", newline="") as file:
            header, *rows = csv.reader(file)
        (to / f"{name}.json").write_text(json.dumps(deal(list({row[1] for row in rows}), models), indent=1))
        with open(to / f"{name}.csv", "w", newline="") as file:
            end = part.from_s + part.seconds
            csv.writer(file).writerows([header, *(row for row in rows if part.from_s <= float(row[0]) < end)])


@dataclass(frozen=True)
class Cut:
    """A slice as it is replayed."""

    path: Path
    names: Mapping[str, str]
    """Of the trace -> served model."""
    part: Slice

    @property
    def arguments(self) -> list[str]:
        """Of a replay."""
        return ["--from-s", str(self.part.from_s), "--seconds", str(self.part.seconds)]

    def requests(self, context_tokens: int, slos: Mapping[str, Mapping[str, float]]) -> list[SimulatedRequest]:
        """One for each of the trace, under the served models' names, with their targets."""
        catalogue = ModelSet([Spec("*", Shape(0, 0), context_tokens=context_tokens)])
        found = trace.read(self.path, catalogue, trace.Slice(self.part.from_s, self.part.seconds)).requests
        for request in found:
            request.model = self.names[request.model]
            if target_ms := slos.get(request.model, {}).get("tpot_ms"):
                request.tpot_s = target_ms / 1e3
        return found


def load(folder: Path, name: str, models: Sequence[str], seconds: float | None = None) -> Cut:
    """What `cut` wrote; in a rehearsal dealt to these models alone. `seconds`: so much of it, from its beginning."""
    part = SLICES[name]
    names = json.loads((folder / f"{name}.json").read_text())
    if seconds is not None:
        part = replace(part, seconds=seconds)
    if not set(names.values()) <= set(models):
        names = deal(list(names), models)
    return Cut(folder / f"{name}.csv", names, part)


def only(whole: Cut, models: Sequence[str], to: Path) -> Cut:
    """The requests of these models alone, written to the file `to`."""
    names = {name: model for name, model in whole.names.items() if model in models}
    with open(whole.path, newline="") as file, open(to, "w", newline="") as out:
        header, *rows = csv.reader(file)
        csv.writer(out).writerows([header, *(row for row in rows if row[1] in names)])
    return replace(whole, path=to, names=names)
