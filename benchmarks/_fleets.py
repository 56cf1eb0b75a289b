"""The fleets of `comparison_sim.py`: which models, of which shapes, on which groups, and what part of a trace asks for
them.

Traces are the CSV files of `--traces` (`sim/inputs/trace.py` has their columns). Of a trace with more models than are
wanted every n-th by number of requests in the whole file is taken, the busiest first, so that the popular and the long
tail are in it. Which model has which shape is drawn by a fixed seed.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from itertools import cycle
from math import inf
from pathlib import Path

from sim.engines.cost import H200, Shape
from sim.inputs import trace
from sim.inputs.catalogue import SHAPES, ModelSet, Spec
from sim.inputs.request import SimulatedRequest

HARDWARE = replace(H200, capacity_bytes=84_000_000_000)
"""An H200 with the memory of an H100 (80 GiB less what is not for models), as in the paper: on all of an H200's these
fleets lack no memory."""
WARM_GAP_S = 60.0
"""Between two requests that warm up, one for each model, before the slice; longer than a model has to be idle to
leave."""
_SHAPES_SEED = 58
ALL = ModelSet([Spec("*", SHAPES["8b"])])


@dataclass(frozen=True, slots=True)
class Source:
    """A slice of a trace file, and how many of its models."""

    file: str
    from_s: float
    seconds: float
    models: int


@dataclass(frozen=True, slots=True)
class Fleet:
    """`groups`: by number of GPUs, the devices of each group."""

    name: str
    sources: dict[str, tuple[Source, ...]]
    """By name of the workload."""
    shapes: tuple[Shape, ...]
    groups: dict[int, tuple[int, ...]]
    many: dict[int, tuple[Shape, ...]]
    """Other shapes, where that many GPUs have them."""


def tp(shape: str, devices: int = 1) -> Shape:
    return replace(SHAPES[shape], devices=devices)


def _ones(*counts: int) -> dict[int, tuple[int, ...]]:
    return {count: (1,) * count for count in counts}


def _busy(models: int) -> tuple[Source, ...]:
    return (Source("servegen48.csv.gz", 11 * 3600.0, 240.0, models),)


SMALL = tuple(tp(name) for name in ("8b", "3b", "1b", "3b", "8b", "1b", "3b", "8b"))
_LONG_TAIL = (tp("1b"),) * 22 + (tp("3b"),) * 21 + (tp("8b"),) * 8 + (tp("14b"),) * 3
FLEETS = {
    fleet.name: fleet
    for fleet in (
        Fleet(
            "eight",
            {
                "hyperbolic7": (Source("hyperbolic7.csv.gz", 0.0, 240.0, 7),),
                "arena27": (Source("arena27.csv.gz", 0.0, 240.0, 8),),
                "servegen48": _busy(8),
            },
            SMALL,
            _ones(2),
            {},
        ),
        Fleet(
            "eighteen",
            {"arena27": (Source("arena27.csv.gz", 0.0, 240.0, 18),), "servegen48": _busy(18)},
            SMALL,
            _ones(1, 2, 3, 4, 6, 8),
            {},
        ),
        Fleet(
            "fifty-eight",
            {
                "mixed": (
                    Source("arena27.csv.gz", 0.0, 240.0, 27),
                    Source("hyperbolic7.csv.gz", 0.0, 240.0, 7),
                    *_busy(24),
                )
            },
            (*_LONG_TAIL, tp("32b", 4), tp("32b", 4), tp("70b", 4), tp("70b", 4)),
            {8: (1,) * 4 + (4,), 16: (1,) * 8 + (4, 4), 24: (1,) * 16 + (4, 4), 32: (1,) * 20 + (4, 8)},
            {32: (*_LONG_TAIL, tp("32b", 4), tp("32b", 4), tp("70b", 4), tp("70b", 8))},
        ),
    )
}


@dataclass(frozen=True, slots=True)
class Workload:
    """What one replay gets. Times of requests count from the beginning of the slice."""

    specs: dict[str, Spec]
    requests: list[SimulatedRequest]
    seconds: float


def workload(fleet: Fleet, name: str, gpus: int, rate: float, traces: Path, seed: int) -> Workload:
    """Without targets. Raises trace.TraceError, OSError."""
    asked: list[SimulatedRequest] = []
    names: list[str] = []
    for source in fleet.sources[name]:
        path = traces / source.file
        taken = chosen(path, source.models)
        names += sorted(taken)
        for row in _slice(path, trace.Slice(source.from_s, source.seconds, rate, seed)):
            if row.model in taken:
                asked.append(SimulatedRequest(row.id, row.model, row.arrival, row.prompt_tokens, row.output_tokens))
    shapes = cycle(fleet.many.get(gpus, fleet.shapes))
    random.Random(_SHAPES_SEED).shuffle(names)
    specs = {name: Spec(name, shape) for name, shape in zip(names, shapes, strict=False)}
    asked.sort(key=lambda request: request.arrival)
    return Workload(specs, asked, max(source.seconds for source in fleet.sources[name]))


@cache
def _slice(path: Path, part: trace.Slice) -> list[SimulatedRequest]:
    """To copy from: a replay writes into its requests."""
    return trace.read(path, ALL, part).requests


@cache
def chosen(path: Path, count: int) -> set[str]:
    """Every n-th model of a trace by its number of requests, so many in all."""
    asked = Counter(request.model for request in trace.read(path, ALL, trace.Slice(0.0, inf)).requests)
    ranked = sorted(asked, key=lambda name: (-asked[name], name))
    return {ranked[i * len(ranked) // count] for i in range(count)}
