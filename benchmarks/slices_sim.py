"""The real comparison's eight models and two GPUs, in the simulator, over eighteen four-minute slices: those of
`benchmarks.gpu.compare`, and twelve more of servegen48, one from every second hour.

    python benchmarks/slices_sim.py --traces FOLDER                              # Prism as it is
    python benchmarks/slices_sim.py --traces FOLDER --set prefill_priority_ms=0  # other settings; may be repeated
    python benchmarks/slices_sim.py --traces FOLDER --system static --only busy
    python benchmarks/slices_sim.py --traces FOLDER --starts 4                   # after models came up in four orders

A change to a policy is to be better in the mean of all, not in the slice that it was made for: settings next to each
other differ by some tenths of a point. Targets are made as they are there, of the simulator's own figures. Prints a
line for each slice, and the means; one process for each core, at low priority.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import inf, isnan
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._pool import pool
from benchmarks.gpu.slices import ALONE, ALONE_GAP_S, CAPACITY_BYTES, MODELS, SLICES, TPOT_SCALE, TTFT_SCALE, deal
from sim import report
from sim.engines.cost import H200
from sim.inputs import trace
from sim.inputs.catalogue import SHAPES, ModelSet, Spec
from sim.inputs.request import SimulatedRequest
from sim.inputs.trace import Workload
from sim.policies import SYSTEMS
from sim.replay import Replay
from sim.system import FleetError

HARDWARE = replace(H200, capacity_bytes=CAPACITY_BYTES)
CONTEXT_TOKENS = 8192
SPECS = {name: Spec(name, SHAPES[shape], context_tokens=CONTEXT_TOKENS) for name, shape in MODELS.items()}
HOURLY_RATE = 4.0
WARM_GAP_S = 60.0


@dataclass(frozen=True)
class Part:
    """A slice at a rate."""

    name: str
    file: str
    from_s: float
    rate: float
    seconds: float = 240.0
    start: int = 0
    """In which order the models come up before: 0 as they are listed, else drawn with this seed."""


PARTS = [
    Part(f"{name}, {rate:g}", part.trace, part.from_s, rate) for name, part in SLICES.items() for rate in part.rates
] + [Part(f"{hour} h", "servegen48.csv.gz", 3600.0 * hour, HOURLY_RATE) for hour in range(0, 24, 2)]


@cache
def _dealt(file: Path) -> Mapping[str, str]:
    every = ModelSet([Spec("*", SHAPES["1b"])])
    rows = trace.read(file, every, trace.Slice()).requests
    return deal(list({row.model for row in rows}), list(MODELS))


def asked(part: Part, rate: float, traces: Path) -> list[SimulatedRequest]:
    file = traces / part.file
    every = ModelSet([Spec("*", SHAPES["1b"], context_tokens=CONTEXT_TOKENS)])
    found = trace.read(file, every, trace.Slice(part.from_s, part.seconds, rate)).requests
    for request in found:
        request.model = _dealt(file)[request.model]
    return found


def targets(part: Part, traces: Path) -> dict[str, tuple[float, float]]:
    """Of TTFT and TPOT, by model; +inf where no request says."""
    found = dict.fromkeys(SPECS, (inf, inf))
    given = asked(part, 1.0, traces)
    for name, spec in SPECS.items():
        mine, due, before = list[SimulatedRequest](), 0.0, inf
        for request in [each for each in given if each.model == name][:ALONE]:
            due += max(0.0, min(ALONE_GAP_S, request.arrival - before))
            before = request.arrival
            mine.append(SimulatedRequest(request.id, name, due, request.prompt_tokens, request.output_tokens))
        if mine:
            _replay(Workload(mine, due + ALONE_GAP_S), [spec], 1, "static", {})
            ttft_s = report.quantile(sorted(request.ttft for request in mine), 0.95)
            tpot_s = report.quantile(sorted(r.tpot for r in mine if not isnan(r.tpot)), 0.95)
            found[name] = TTFT_SCALE * (ttft_s or inf), TPOT_SCALE * (tpot_s or inf)
    return found


def run(part: Part, system: str, settings: dict[str, str], traces: Path) -> dict[str, Any]:
    """What the simulator's report says of all requests. Raises FleetError."""
    slos = targets(part, traces)
    specs = [replace(spec, ttft_s=slos[name][0], tpot_s=slos[name][1]) for name, spec in SPECS.items()]
    warm_s = WARM_GAP_S * (len(specs) + 1)
    order = random.Random(part.start).sample(specs, len(specs)) if part.start else specs
    warm = [SimulatedRequest(f"w{i}", spec.name, WARM_GAP_S * i, 64, 16) for i, spec in enumerate(order)]
    given = [
        SimulatedRequest(r.id, r.model, warm_s + r.arrival, r.prompt_tokens, r.output_tokens, *slos[r.model])
        for r in asked(part, part.rate, traces)
    ]
    outcome = _replay(Workload(warm + given, warm_s + part.seconds), specs, 2, system, settings)
    outcome.trace.requests, outcome.trace.seconds = given, part.seconds
    total: dict[str, Any] = report.build(outcome)["all"]
    return {**total, "cpu_s": outcome.cpu_s}


def _replay(given: Workload, specs: list[Spec], gpus: int, system: str, settings: dict[str, str]) -> Any:
    catalogue, build = ModelSet(specs), SYSTEMS[system]
    return Replay(given, catalogue, (1,) * gpus, build, settings, HARDWARE, progress=lambda line: None).run()


def _try(part: Part, system: str, settings: dict[str, str], traces: Path) -> dict[str, Any] | str:
    try:
        return run(part, system, settings, traces)
    except FleetError as error:
        return str(error)


def _line(name: str, shares: list[float], rest: str = "") -> None:
    print(f"{name:16} {shares[0]:6.2f} ({shares[1]:6.2f} {shares[2]:6.2f}) {rest}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        "slices_sim", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--traces", type=Path, required=True, help="where the traces' files are")
    parser.add_argument("--system", choices=sorted(SYSTEMS), default="prism", help="(default: %(default)s)")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="of its policies")
    parser.add_argument("--only", default="", help="slices whose names have this in them")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes (default: %(default)s)")
    parser.add_argument("--starts", type=int, default=1, help="orders in which models come up (default: %(default)s)")
    given = parser.parse_args()
    settings = dict(each.split("=", 1) for each in given.set)
    parts = [replace(part, start=start) for part in PARTS if given.only in part.name for start in range(given.starts)]
    rows = []
    print(f"{'slice':16} both % (TTFT TPOT); p50, p99 of TTFT and TPOT in ms")
    with pool(given.workers) as processes:
        for part, future in [
            (part, processes.submit(_try, part, given.system, settings, given.traces)) for part in parts
        ]:
            found = future.result()
            if isinstance(found, str):
                print(f"{part.name:16} refused: {found}")
                continue
            rows.append([100 * found[f"{what}attainment"] for what in ("", "ttft_", "tpot_")])
            times = ", ".join(f"{1e3 * found[of][at]:.1f}" for of in ("ttft_s", "tpot_s") for at in ("p50", "p99"))
            name = part.name + "'" * part.start
            _line(name, rows[-1], f"{times}; {found['requests']} requests, {found['cpu_s']:.1f} s")
    if rows:
        _line("mean", [sum(column) / len(rows) for column in zip(*rows, strict=True)])


if __name__ == "__main__":
    main()
