"""Prism and the systems that it is compared with, in the simulator.

    python benchmarks/comparison_sim.py --traces FOLDER              # all that the file does not have yet
    python benchmarks/comparison_sim.py --traces FOLDER --only eighteen
    python benchmarks/comparison_sim.py --show                       # the tables of what it has
    python benchmarks/comparison_sim.py --show --corrected           # with each system's bias taken off

Every system of `sim/policies` over rates, SLO scales and numbers of GPUs, on the fleets of `_fleets.py`; SWEEPS has all
of it. Targets are, as in the paper, the P95 of each model alone on devices of its own with the slice as it is (rate 1),
times the SLO scale, for TTFT and TPOT alike. Before a slice begins each model is asked once, so that everybody has been
loaded, and the slice itself is replayed once: a system that moves models has had them where it wants them then, and
starts them from hibernation. Only the second time counts, with what was moved in it; PAUSE_S lie in between, in which
all queues become empty.

Points are kept by their arguments; one that the file has from the same commit of the simulator and the policies is not
run again. One process for each core, at low priority.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from math import inf, isnan
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import _report, _series, sim_bias
from benchmarks._fleets import FLEETS, HARDWARE, WARM_GAP_S, Fleet, workload
from benchmarks._pool import pool, results
from sim import report
from sim.inputs.catalogue import ModelSet, Spec
from sim.inputs.request import SimulatedRequest
from sim.inputs.trace import Workload
from sim.policies import SYSTEMS
from sim.replay import Replay
from sim.system import FleetError, System, World

SEED = 1
PAUSE_S = 300.0
ASKED_FOR = ", asked for"
"""Of a variant: in a catalogue of the models alone that the slice asks for."""
VARIANTS: dict[str, tuple[str, dict[str, str]]] = {
    "prism": ("prism", {}),
    "prism, chunk 256": ("prism", {"chunk_tokens": "256", "joint_s": "0"}),
    "prism, idle 45 s": ("prism", {"idle_s": "45"}),
    "least_slack": ("least_slack", {}),
    "muxserve": ("muxserve", {}),
    f"muxserve{ASKED_FOR}": ("muxserve", {}),
    "static": ("static", {}),
    f"static{ASKED_FOR}": ("static", {}),
    "qlm": ("qlm", {}),
    "qlm, swap-aware": ("qlm", {"swap_aware": "1"}),
    "serverlessllm": ("serverlessllm", {}),
}
"""Name in the tables: policy, settings. With chunk_tokens of 256, and joint_s of 0, no prefill starts before the one
under way has nearly ended, so that its engine decodes a step in between."""
SOURCES = (
    "sim",
    "placement/policy",
    "placement/config.py",
    "gateway/policy",
    "gpu_scheduler/policy",
    "gpu_scheduler/config.py",
    "balloond/policy",
    "loader/policy/floor.py",
    "benchmarks/_fleets.py",
)
"""What a point depends on."""
SMALL = tuple(name for name in VARIANTS if name != "prism, idle 45 s" and not name.endswith(ASKED_FOR))
KEPT = ("ttft_attainment", "tpot_attainment", "attainment", "served", "requests", "ttft_s", "tpot_s")


@dataclass(frozen=True, slots=True)
class Sweep:
    """Every combination of these."""

    fleet: str
    rates: tuple[float, ...]
    scales: tuple[float, ...]
    variants: tuple[str, ...]


SWEEPS = (
    Sweep("eight", (1, 4, 8, 16), (10,), SMALL),
    Sweep("eight", (4,), (2, 5, 10, 20, 40), SMALL),
    Sweep("eighteen", (4,), (10,), tuple(VARIANTS)),
    Sweep("fifty-eight", (4,), (10,), tuple(name for name in VARIANTS if name != "prism, idle 45 s")),
)


@dataclass(frozen=True, slots=True)
class Point:
    fleet: str
    workload: str
    gpus: int
    variant: str
    rate: float
    scale: float

    @property
    def key(self) -> str:
        return f"{self.fleet}/{self.workload}/{self.gpus}/{self.variant}/{self.rate:g}/{self.scale:g}"

    @property
    def alone(self) -> str:
        """What its targets are kept by: numbers of GPUs with the same shapes share them."""
        name = f"{self.fleet}/{self.workload}"
        return f"{name}/{self.gpus}" if self.gpus in FLEETS[self.fleet].many else name


def points(sweep: Sweep) -> Iterator[Point]:
    fleet = FLEETS[sweep.fleet]
    for rate in sweep.rates:
        for scale in sweep.scales:
            for name in fleet.sources:
                for gpus in fleet.groups:
                    for variant in sweep.variants:
                        yield Point(fleet.name, name, gpus, variant, rate, scale)


# --- one point


Targets = dict[str, tuple[float | None, float | None]]


def alone(fleet: Fleet, name: str, gpus: int, traces: Path) -> Targets:
    """P95 of TTFT and TPOT of each model with devices of its own, seconds; None where no request says."""
    given = workload(fleet, name, gpus, 1.0, traces, SEED)
    found: Targets = {}
    for model, spec in given.specs.items():
        mine = [request for request in given.requests if request.model == model]
        if mine:
            _replay(Workload(mine, given.seconds), [spec], (spec.parts,), SYSTEMS["static"], {})
        ttfts = sorted(request.ttft for request in mine)
        tpots = sorted(request.tpot for request in mine if not isnan(request.tpot))
        found[model] = (report.quantile(ttfts, 0.95), report.quantile(tpots, 0.95))
    return found


def run(point: Point, targets: Targets, traces: Path, times: int = 2) -> dict[str, Any]:
    """What came of the last of so many times, or `refused` with the reason."""
    fleet = FLEETS[point.fleet]
    given = workload(fleet, point.workload, point.gpus, point.rate, traces, SEED)
    specs = {}
    wanted = {request.model for request in given.requests}
    for name, spec in given.specs.items():
        if point.variant.endswith(ASKED_FOR) and name not in wanted:
            continue
        ttft_s, tpot_s = (point.scale * p95 if p95 else inf for p95 in targets[name])
        specs[name] = replace(spec, ttft_s=ttft_s, tpot_s=tpot_s)
    every = [SimulatedRequest(f"w{i}", name, WARM_GAP_S * i, 64, 16) for i, name in enumerate(sorted(specs))]
    begins_s = WARM_GAP_S * (len(specs) + 1)
    asked: list[SimulatedRequest] = []
    for number in range(times):
        if number:
            begins_s += given.seconds + PAUSE_S
        asked = [
            SimulatedRequest(
                f"{number}-{i}",
                r.model,
                begins_s + r.arrival,
                r.prompt_tokens,
                r.output_tokens,
                specs[r.model].ttft_s,
                specs[r.model].tpot_s,
            )
            for i, r in enumerate(given.requests)
        ]
        every += asked
    before: dict[str, int] = {}
    policy, settings = VARIANTS[point.variant]

    def build(world: World, finished: Callable[[SimulatedRequest], None], settings: dict[str, str]) -> System:
        system = SYSTEMS[policy](world, finished, settings)
        world.clock.at(begins_s - 1e-3, lambda: before.update(_counts(system)))
        return system

    try:
        outcome = _replay(
            Workload(every, begins_s + given.seconds),
            list(specs.values()),
            fleet.groups[point.gpus],
            build,
            settings,
        )
    except FleetError as error:
        return {"refused": str(error)}
    cpu_s = outcome.cpu_s
    outcome.trace.requests, outcome.trace.seconds = asked, given.seconds
    total = report.build(outcome)["all"]
    after = _counts(outcome.system)
    reasons = [request.failed for request in asked if request.failed]
    return {
        **{name: total[name] for name in KEPT},
        "counts": {name: after[name] - before.get(name, 0) for name in after},
        "models": [len(wanted), len(specs)],
        "parked": sum(request.parked for request in asked),
        "failed": {reason: reasons.count(reason) for reason in sorted(set(reasons))},
        "cpu_s": round(cpu_s, 2),
    }


def _replay(trace: Workload, specs: list[Spec], sizes: tuple[int, ...], build: Any, settings: dict[str, str]) -> Any:
    return Replay(trace, ModelSet(specs), sizes, build, settings, HARDWARE, progress=lambda line: None).run()


def _counts(system: System) -> dict[str, int]:
    groups = system.groups
    return {
        "activations": sum(group.counts.wakes + group.counts.cold_starts for group in groups),
        "cold_starts": sum(group.counts.cold_starts for group in groups),
        "weights_bytes": sum(group.counts.weights_bytes for group in groups),
        "reclaimed_bytes": sum(group.memory.reclaimed_bytes for group in groups),
        **system.figures,
    }


# --- all of them


def measure(out: Path, traces: Path, only: str, workers: int) -> dict[str, Any]:
    """Runs what `out` lacks, and writes it after each point."""
    kept: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    done: dict[str, Any] = kept.get("points", {})
    targets: dict[str, Any] = kept.get("alone", {})
    now = _series.commit(SOURCES)
    wanted = dict.fromkeys(point for sweep in SWEEPS if only in ("", sweep.fleet) for point in points(sweep))
    todo = [point for point in wanted if done.get(point.key, {}).get("commit") != now]
    with pool(workers) as processes:
        for point in todo:
            if targets.get(point.alone, {}).get("commit") != now:
                found = processes.submit(alone, FLEETS[point.fleet], point.workload, point.gpus, traces).result()
                targets[point.alone] = {"commit": now, "p95_s": found}
        running = {processes.submit(run, point, targets[point.alone]["p95_s"], traces): point for point in todo}
        for count, (point, found) in enumerate(results(processes, running), start=1):
            done[point.key] = {"arguments": asdict(point), "commit": now, **found}
            result = {"seed": SEED, "alone": targets, "points": dict(sorted(done.items()))}
            _series.keep(out, "comparison_sim", result)
            told = done[point.key].get("attainment", "refused")
            print(f"{count} of {len(running)}: {point.key}: {told}", flush=True)
    return done


def show(done: dict[str, Any], bias: Mapping[str, sim_bias.Row]) -> None:
    """A table for each sweep and workload. `bias`: real runs whose bias is taken off the figures of systems that have
    some."""
    for sweep in SWEEPS:
        fleet = FLEETS[sweep.fleet]
        for name in fleet.sources:
            columns: dict[str, dict[str, str]] = {}
            for point in points(sweep):
                if point.workload == name and point.key in done:
                    head = f"{point.gpus} GPUs, rate {point.rate:g}, scale {point.scale:g}"
                    columns.setdefault(head, {})[point.variant] = _cell(
                        done[point.key], VARIANTS[point.variant][0], bias
                    )
            if columns:
                print(f"\n{fleet.name}, {name}: % on time, of both targets (of TTFT, of TPOT)")
                heads = _what_varies(list(columns))
                rows = [[v, *(column.get(v, "") for column in columns.values())] for v in sweep.variants]
                _report.table(["", *heads], rows)


def _cell(point: dict[str, Any], system: str, bias: Mapping[str, sim_bias.Row]) -> str:
    if "refused" in point:
        return "refused"
    shares = {name: 100 * point[key] for name, key in sim_bias.MEASURES.items()}
    if any(row["system"] == system for row in bias.values()):
        shares = {name: sim_bias.corrected(share, system, bias, name) for name, share in shares.items()}
    elif bias:
        return "not measured"
    both, ttft, tpot = shares.values()
    return f"{both:.1f} ({ttft:.1f} {tpot:.1f})"


def _what_varies(heads: list[str]) -> list[str]:
    """Without the parts that all of them have, but for the first of them."""
    parts = [head.split(", ") for head in heads]
    same = [part for part in parts[0] if all(part in other for other in parts)]
    return [", ".join(p for p in part if i == 0 or p not in same) for i, part in enumerate(parts)]


def main() -> None:
    parser = _report.arguments("comparison_sim", __doc__ or "")
    parser.add_argument("--traces", type=Path, help="the folder with the trace files")
    parser.add_argument("--only", default="", choices=["", *FLEETS], help="one fleet")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="processes at a time")
    parser.add_argument("--show", action="store_true", help="runs nothing")
    parser.add_argument("--corrected", action="store_true", help="what is shown has each system's bias taken off")
    given: argparse.Namespace = parser.parse_args()
    if given.show:
        show(json.loads(given.out.read_text())["points"], sim_bias.kept() if given.corrected else {})
        return
    if given.traces is None:
        parser.error("--traces is needed")
    show(measure(given.out, given.traces, given.only, given.workers), {})


if __name__ == "__main__":
    main()
