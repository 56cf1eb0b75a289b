"""The real comparison's eight models and two GPUs, in the simulator, over four-minute slices of traces.

    python benchmarks/slices_sim.py --traces FOLDER                              # eighteen slices, Prism as it is
    python benchmarks/slices_sim.py --traces FOLDER --set prefill_priority_ms=0  # other settings; may be repeated
    python benchmarks/slices_sim.py --traces FOLDER --system static --only busy
    python benchmarks/slices_sim.py --traces FOLDER --starts 4                   # after models came up in four orders
    python benchmarks/slices_sim.py --traces FOLDER --half both --quick          # beside rivals, on unseen hours too
    python benchmarks/slices_sim.py --traces FOLDER --half unseen --out FILE     # the whole half
    python benchmarks/slices_sim.py --traces FOLDER --half unseen --rivals FILE  # rivals' figures as they were then
    python benchmarks/slices_sim.py --traces FOLDER --half unseen --seconds 1500 # longer slices

The eighteen are those of `benchmarks.gpu.compare`, and twelve more of servegen48, one from every second hour. A change
to a policy is to be better in the mean of all, not in the slice that it was made for: settings next to each other
differ by some tenths of a point. With `--half` a cell is a slice at a rate, of the half that policies are tuned on or
of the other one (`_slices.py` says how the traces are split). Slices of four minutes judge how a system begins; slices
of 25 minutes (`--seconds 1500`) show what its placement does later. Beside Prism are static partition and
MuxServe++, whose engines have queues of their own as on GPUs, each in three forms: `blind` knows sizes and no rates
(mean of DRAWS draws), `before` is planned from the rates of the hour before the slice, `slice` from those of the slice
itself.

Where the trace has an hour before the slice, Prism's placement begins with the traffic of it, as services do that
restart; with `--cold` it knows nothing, as in all figures of before 29 November 2026. Rates and places of the slice
itself are never told.

Targets are made as in the real comparison, of the simulator's own figures: so many times the P95 of each model alone.
One process for each core, at low priority.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import cache
from math import inf, isnan
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import _report, sim_bias
from benchmarks._pool import pool
from benchmarks._rivals import Cell, Figures, gap, mean, summary
from benchmarks._slices import EIGHTEEN, HALVES, SECONDS, Part, dealt, parts
from benchmarks.gpu.slices import ALONE, ALONE_GAP_S, CAPACITY_BYTES, MODELS, TPOT_SCALE, TTFT_SCALE
from placement.policy.traffic import ExpectedTraffic
from sim import report
from sim.engines.cost import H200
from sim.inputs import trace
from sim.inputs.catalogue import SHAPES, ModelSet, Spec
from sim.inputs.history import expected
from sim.inputs.request import SimulatedRequest
from sim.inputs.trace import Workload
from sim.policies import SYSTEMS
from sim.replay import Replay
from sim.system import FleetError, System, World

HARDWARE = replace(H200, capacity_bytes=CAPACITY_BYTES)
CONTEXT_TOKENS = 8192
SPECS = {name: Spec(name, SHAPES[shape], context_tokens=CONTEXT_TOKENS) for name, shape in MODELS.items()}
WARM_GAP_S = 60.0
WARM_TOKENS = (64, 16)
Scales = tuple[float, float]
"""Factors of the targets of TTFT and TPOT over the times that a model takes alone."""
SCALES: dict[str, Scales] = {f"{a:g}/{b:g}": (a, b) for a, b in ((TTFT_SCALE, TPOT_SCALE), (5.0, 5.0), (10.0, 10.0))}
PLANS = {"static": ("blind", "before", "slice"), "muxserve": ("blind", "before", "slice")}
"""Sources of the rates by which a system's places are planned, by name of the system; one that is not here plans
nothing ahead."""
OWN = {"muxserve": {"rounds": "false"}}
"""Settings of rivals."""
DRAWS = 3
LEAST_REQUESTS = 20
"""A model with fewer is not taken for the worst one: each of its requests is five points of it."""


@cache
def _read(file: Path, part: trace.Slice) -> list[SimulatedRequest]:
    """To copy from: a replay writes into its requests."""
    every = ModelSet([Spec("*", SHAPES["1b"], context_tokens=CONTEXT_TOKENS)])
    return trace.read(file, every, part).requests


@cache
def _dealt(file: Path, dealing: int) -> Mapping[str, str]:
    return dealt(list({row.model for row in _read(file, trace.Slice())}), list(MODELS), dealing)


def asked(part: Part, rate: float, traces: Path) -> list[SimulatedRequest]:
    file = traces / part.file
    models = _dealt(file, part.dealing)
    return [
        SimulatedRequest(row.id, models[row.model], row.arrival, row.prompt_tokens, row.output_tokens)
        for row in _read(file, trace.Slice(part.from_s, part.seconds, rate))
    ]


def rates_before(part: Part, traces: Path) -> dict[str, float]:
    """Tokens per second of each model before the slice, and of what warms it up."""
    earlier = replace(part, from_s=part.from_s - part.before_s, seconds=part.before_s)
    tokens = dict.fromkeys(SPECS, sum(WARM_TOKENS))
    for request in asked(earlier, 1.0, traces):
        tokens[request.model] += request.prompt_tokens + request.output_tokens
    return {name: count / part.before_s for name, count in tokens.items()}


def expected_before(part: Part, traces: Path) -> dict[str, ExpectedTraffic]:
    """What each model was asked for before the slice, at the slice's rate; nothing if the trace has none before."""
    if part.cold or not part.before_s:
        return {}
    earlier = replace(part, from_s=part.from_s - part.before_s, seconds=part.before_s)
    return expected(asked(earlier, part.rate, traces), part.before_s)


def targets(part: Part, traces: Path, scales: Scales = (TTFT_SCALE, TPOT_SCALE)) -> dict[str, tuple[float, float]]:
    """Of TTFT and TPOT, by model; +inf where no request says."""
    found = _alone(replace(part, name="", rate=1.0, start=0, before_s=0.0, cold=False), traces)
    return {name: (scales[0] * ttft_s, scales[1] * tpot_s) for name, (ttft_s, tpot_s) in found.items()}


@cache
def _alone(part: Part, traces: Path) -> dict[str, tuple[float, float]]:
    """P95 of TTFT and TPOT of each model alone."""
    found = dict.fromkeys(SPECS, (inf, inf))
    given = asked(part, 1.0, traces)
    for name, spec in SPECS.items():
        mine, due, before = list[SimulatedRequest](), 0.0, inf
        for request in [each for each in given if each.model == name][:ALONE]:
            due += max(0.0, min(ALONE_GAP_S, request.arrival - before))
            before = request.arrival
            mine.append(SimulatedRequest(request.id, name, due, request.prompt_tokens, request.output_tokens))
        if mine:
            _replay(Workload(mine, due + ALONE_GAP_S), [spec], 1, SYSTEMS["static"], {})
            ttft_s = report.quantile(sorted(request.ttft for request in mine), 0.95)
            tpot_s = report.quantile(sorted(r.tpot for r in mine if not isnan(r.tpot)), 0.95)
            found[name] = ttft_s or inf, tpot_s or inf
    return found


def run(
    part: Part,
    system: str,
    settings: dict[str, str],
    traces: Path,
    scales: Scales = (TTFT_SCALE, TPOT_SCALE),
    rates: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """The simulator's report of all requests of a slice, with the worst model's share, moves and activations. `rates`:
    requests per second of each model, by which places are planned; None: those of the slice. Raises FleetError."""
    slos = targets(part, traces, scales)
    specs = [replace(spec, ttft_s=slos[name][0], tpot_s=slos[name][1]) for name, spec in SPECS.items()]
    warm_s = WARM_GAP_S * (len(specs) + 1)
    order = random.Random(part.start).sample(specs, len(specs)) if part.start else specs
    warm = [SimulatedRequest(f"w{i}", spec.name, WARM_GAP_S * i, *WARM_TOKENS) for i, spec in enumerate(order)]
    given = [
        SimulatedRequest(r.id, r.model, warm_s + r.arrival, r.prompt_tokens, r.output_tokens, *slos[r.model])
        for r in asked(part, part.rate, traces)
    ]
    before: dict[str, int] = {}

    def build(world: World, finished: Callable[[SimulatedRequest], None], settings: dict[str, str]) -> System:
        built = SYSTEMS[system](world, finished, settings)
        world.clock.at(warm_s - 1e-3, lambda: before.update(_counts(built)))
        return built

    workload, before_it = Workload(warm + given, warm_s + part.seconds), expected_before(part, traces)
    outcome = _replay(workload, specs, 2, build, settings, rates, before_it)
    outcome.trace.requests, outcome.trace.seconds = given, part.seconds
    found = report.build(outcome)
    total: dict[str, Any] = found["all"]
    shares = [of["attainment"] for of in found["models"].values() if of["requests"] >= LEAST_REQUESTS]
    counts = {name: count - before[name] for name, count in _counts(outcome.system).items()}
    return {**total, "worst": min(shares, default=None), **counts, "cpu_s": outcome.cpu_s}


def _counts(system: System) -> dict[str, int]:
    counts = [group.counts for group in system.groups]
    return {
        "moves": system.figures.get("migrations", 0),
        "activations": sum(each.wakes + each.cold_starts for each in counts),
    }


def _replay(
    given: Workload,
    specs: list[Spec],
    gpus: int,
    build: Any,
    settings: dict[str, str],
    rates: Mapping[str, float] | None = None,
    before: Mapping[str, ExpectedTraffic] | None = None,
) -> Any:
    sizes, quiet = (1,) * gpus, lambda line: None
    return Replay(
        given, ModelSet(specs), sizes, build, settings, HARDWARE, rates=rates, expected=before or {}, progress=quiet
    ).run()


def _try(*arguments: Any) -> dict[str, Any] | str:
    try:
        return run(*arguments)
    except FleetError as error:
        return str(error)


def _wanted(name: str, only: Sequence[str]) -> bool:
    """Whether the name has one of these in it; all names are wanted if there are none."""
    return not only or any(part in name for part in only)


# --- one system, slice by slice


def slice_by_slice(systems: Sequence[str], given: argparse.Namespace, settings: dict[str, str]) -> None:
    """A line for each of the eighteen, and the means."""
    found = [
        replace(part, start=start, cold=given.cold)
        for part in EIGHTEEN
        if _wanted(part.name, given.only)
        for start in range(given.starts)
    ]
    for system in systems:
        rows, worst = list[list[float]](), list[float]()
        print(f"{system if len(systems) > 1 else 'slice':16} both % (TTFT TPOT); p50, p99 of TTFT and TPOT in ms")
        with pool(given.workers) as processes:
            running = [
                (part, processes.submit(_try, part, system, settings, given.traces, SCALES[given.scale]))
                for part in found
            ]
            for part, future in running:
                total = future.result()
                if isinstance(total, str):
                    print(f"{part.name:16} refused: {total}")
                    continue
                rows.append([100 * total[f"{what}attainment"] for what in ("", "ttft_", "tpot_")])
                worst.append(100 * (total["worst"] or 0.0))
                times = ", ".join(f"{1e3 * total[of][at]:.1f}" for of in ("ttft_s", "tpot_s") for at in ("p50", "p99"))
                name = part.name + "'" * part.start
                _line(name, rows[-1], f"{times}; {total['requests']} requests, {total['cpu_s']:.1f} s")
                if 0 < part.start == given.starts - 1:
                    _spread(rows[-given.starts :], worst[-given.starts :])
        if rows:
            _line("mean", [sum(column) / len(rows) for column in zip(*rows, strict=True)])


def _spread(rows: Sequence[Sequence[float]], worst: Sequence[float]) -> None:
    both = [row[0] for row in rows]
    means = [sum(column) / len(rows) for column in zip(*rows, strict=True)]
    told = f"{min(both):.2f} to {max(both):.2f}; worst model {sum(worst) / len(worst):.1f}, {min(worst):.1f} at least"
    _line(f"  {len(rows)} starts", means, told)


def _line(name: str, shares: list[float], rest: str = "") -> None:
    print(f"{name:16} {shares[0]:6.2f} ({shares[1]:6.2f} {shares[2]:6.2f}) {rest}", flush=True)


# --- beside rivals, on the halves


@dataclass(frozen=True)
class Contender:
    """A system, with what it is planned from."""

    system: str
    plan: str = ""

    @property
    def label(self) -> str:
        return f"{self.system} {self.plan}".strip()

    def runs(self, part: Part, starts: int, settings: dict[str, str]) -> list[tuple[Part, dict[str, str]]]:
        """Of which the figures are the means. Nothing of a plan depends on the order in which models come up."""
        own = OWN.get(self.system, {}) | settings
        if not self.plan:
            return [(replace(part, start=start), own) for start in range(starts)]
        if self.plan == "blind":
            return [(part, own | {"blind": str(draw)}) for draw in range(DRAWS)]
        return [(part, own)] if self.plan != "before" or part.before_s else []


def _figures(
    part: Part, contender: Contender, settings: dict[str, str], traces: Path, scales: Scales
) -> dict[str, float | None] | str:
    rates = rates_before(part, traces) if contender.plan == "before" else None
    total = _try(part, contender.system, settings, traces, scales, rates)
    if isinstance(total, str):
        return total
    shares = {"both": "attainment", "ttft": "ttft_attainment", "tpot": "tpot_attainment", "worst": "worst"}
    found = {name: None if total[key] is None else 100.0 * total[key] for name, key in shares.items()}
    return {**found, "moves": total["moves"], "activations": total["activations"]}


def compare(systems: Sequence[str], given: argparse.Namespace, settings: dict[str, str]) -> None:
    """A line for each cell, and a summary of each half."""
    kept: dict[str, Cell] = {}
    if given.rivals:
        document = json.loads(given.rivals.read_text())
        for name in ("scale", "corrected", "seconds"):
            if document[name] != getattr(given, name):
                raise SystemExit(f"{given.rivals} has {name} {document[name]}, not {getattr(given, name)}")
        kept = document["cells"]
    contenders = [Contender(system, plan) for system in systems for plan in PLANS.get(system, ("",))]
    halves = HALVES if given.half == "both" else (given.half,)
    every = [
        part for half in halves for part in parts(half, given.quick, given.seconds) if _wanted(part.cell, given.only)
    ]
    every = [replace(part, cold=given.cold) for part in every]
    bias = sim_bias.kept() if given.corrected else {}
    cells: dict[str, dict[str, Figures]] = {}
    columns = [each.label for each in contenders if each.system != "prism"]
    columns += [label for label in next(iter(kept.values()), {}) if label not in (*columns, "prism")]
    heads = [f"{'cell':24} prism: both % (TTFT TPOT), worst model, moves, activations"]
    print(" | ".join([*heads, *columns, "prism - best rival: both, TTFT"]))
    with pool(given.workers) as processes:
        running: list[tuple[Part, dict[str, list[Future[Any]]]]] = []
        for part in every:
            of_part = {}
            for each in contenders:
                if each.system != "prism" and part.cell in kept:
                    continue
                own = settings if each.system == "prism" or len(systems) == 1 else {}
                of_part[each.label] = [
                    processes.submit(_figures, one, each, its, given.traces, SCALES[given.scale])
                    for one, its in each.runs(part, given.starts, own)
                ]
            running.append((part, of_part))
        for part, of_part in running:
            systems_of = {name: of for name, of in kept.get(part.cell, {}).items() if name != "prism"}
            cells[part.cell] = {**systems_of, **_gathered(part, of_part, bias)}
            print(_cell_line(part.cell, cells[part.cell], columns), flush=True)
    print()
    for half in halves:
        for line in summary(half, {name: of for name, of in cells.items() if name.startswith(half)}):
            print(line)
    if given.out:
        rounded = {
            cell: {name: {key: _rounded(value) for key, value in of.items()} for name, of in systems_of.items()}
            for cell, systems_of in cells.items()
        }
        kind = {name: getattr(given, name) for name in ("scale", "corrected", "seconds", "starts")}
        _report.write(given.out, "slices_sim", {**kind, "cells": rounded})


def _rounded(figure: float | None) -> float | None:
    return None if figure is None else round(figure, 4)


def _gathered(
    part: Part, of_part: Mapping[str, Sequence[Future[Any]]], bias: Mapping[str, sim_bias.Row]
) -> dict[str, Figures]:
    """By label. `bias`: runs whose bias is taken off, if there are any."""
    found: dict[str, Figures] = {}
    for label, futures in of_part.items():
        results = [future.result() for future in futures]
        refused = [result for result in results if isinstance(result, str)]
        if refused:
            print(f"{part.cell}: {label} refused: {refused[0]}", file=sys.stderr)
        elif results:
            found[label] = figures = mean(results)
            for measure in sim_bias.MEASURES if bias else ():
                value = figures[measure]
                assert value is not None
                figures[measure] = sim_bias.corrected(value, label.split()[0], bias, measure)
    return found


def _cell_line(name: str, cell: Cell, columns: Sequence[str]) -> str:
    parts = [f"{name:24}"]
    if prism := cell.get("prism"):
        shares = f"{prism['both']:6.2f} ({prism['ttft']:6.2f} {prism['tpot']:6.2f})"
        worst = "-" if prism["worst"] is None else f"{prism['worst']:.1f}"
        parts[0] += f" {shares} {worst:>5} {prism['moves']:4.1f} {prism['activations']:5.1f}"
    for label in columns:
        of = cell.get(label)
        parts.append(f"{of['both']:6.2f} ({of['ttft']:6.2f})" if of else f"{'-':15}")
    gaps = [gap(name, cell, measure) for measure in ("both", "ttft")]
    parts.append(" ".join(f"{each.points:+6.2f}" for each in gaps if each))
    return " | ".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(
        "slices_sim", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--traces", type=Path, required=True, help="where the traces' files are")
    add(
        "--system",
        action="append",
        choices=sorted(SYSTEMS),
        help="may be repeated (default: prism, with --half its rivals too)",
    )
    add("--set", action="append", default=[], metavar="NAME=VALUE", help="of Prism's policies, or the one system's")
    add(
        "--only",
        action="append",
        default=[],
        help="slices, or cells of a half, whose names have this in them; may be repeated",
    )
    add("--workers", type=int, default=os.cpu_count() or 1, help="processes (default: %(default)s)")
    add("--starts", type=int, default=1, help="orders in which models come up (default: %(default)s)")
    add("--scale", choices=SCALES, default=next(iter(SCALES)), help="of targets, TTFT/TPOT (default: %(default)s)")
    add("--cold", action="store_true", help="placement begins without the traffic of the hour before")
    add("--half", choices=(*HALVES, "both"), help="beside rivals, on the slices of a half")
    add("--quick", action="store_true", help="some of the half's cells: about a minute of a core with both")
    add("--seconds", type=float, default=SECONDS, help="of a slice of a half, at most (default: %(default)g)")
    add("--corrected", action="store_true", help="with each system's bias taken off (`sim_bias.py`)")
    add("--rivals", type=Path, metavar="FILE", help="what --out wrote: rivals' figures are taken from there")
    add("--out", type=Path, metavar="FILE", help="all figures of a half, as JSON")
    given = parser.parse_args()
    if not given.half and (given.quick or given.corrected or given.rivals or given.out):
        parser.error("--quick, --corrected, --rivals and --out are for --half")
    settings = dict(each.split("=", 1) for each in given.set)
    if given.half:
        rivals = [] if given.rivals else ["static", "muxserve"]
        compare(given.system or ["prism", *rivals], given, settings)
    else:
        slice_by_slice(given.system or ["prism"], given, settings)


if __name__ == "__main__":
    main()
