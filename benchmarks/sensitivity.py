"""What each setting of placement and arbitration does, in the simulator: one at a time away from its default.

    python benchmarks/sensitivity.py --traces FOLDER       # all that the file does not have yet
    python benchmarks/sensitivity.py --show                # the table of what it has

SETTINGS has every setting with its values, WORKLOADS the fleets and slices of `_fleets.py` that each is tried on:
eighteen models on one GPU, where they do not all fit, the second time overloaded and short of KV, and on two, where
they fit. Targets are made as in `comparison_sim.py`. Points of the same commit are not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import _report, _series, comparison_sim
from benchmarks._fleets import FLEETS
from benchmarks._pool import pool, results
from gpu_scheduler.config import Arbitration
from placement.config import PlacementConfig

WORKLOADS = (
    ("eighteen", "arena27", 1, 4.0),
    ("eighteen", "servegen48", 1, 8.0),
    ("eighteen", "servegen48", 2, 4.0),
)
"""Fleet, slice, GPUs, rate."""
SCALE = 10.0
SETTINGS: dict[str, tuple[str, ...]] = {
    "idle_s": ("0", "0.2", "1", "5", "15", "45"),
    "stay": ("0", "1", "4", "16"),
    "patience_s": ("0.5", "1", "2", "5", "inf"),
    "quantum_s": ("1", "2", "4", "8", "16"),
    "relieve": ("false", "true"),
    "headroom": ("0", "0.2", "0.4", "0.6", "0.8"),
    "kv_idle_s": ("0.2", "1", "5", "15", "45"),
    "home": ("0.2", "0.5", "0.75", "1"),
    "rebalance": ("false", "true"),
    "tau": ("0", "0.1", "0.2", "0.3", "0.5"),
    "first_do_no_harm": ("false", "true"),
    "cool_down_s": ("0", "30", "60", "120", "240"),
    "window_s": ("20", "30", "60", "120"),
    "short_window_s": ("1", "5", "10", "20", "60"),
    "load_weight": ("0", "4", "20", "100", "400"),
    "chunk_tokens": ("256", "1024", "2048", "4096", "8192"),
    "joint_s": ("0", "0.05", "0.1", "0.2", "0.5"),
    "prefill_priority_ms": ("0", "10", "20", "50", "200"),
    "prefill_priority_batch": ("0", "4", "8", "16", "32"),
    "decode_arbitration_ms": ("0", "10", "20", "50", "200"),
    "late_share": ("0", "0.02", "0.05", "0.1", "0.2"),
    "forecast_tokens": ("0", "16", "128", "512", "2048"),
    "forecast_weight": ("0", "0.02", "0.1", "0.5", "1"),
    "hibernate": ("false", "true"),
}
KEPT = ("attainment", "ttft_attainment", "tpot_attainment", "ttft_s", "counts", "parked", "requests")
Workload = tuple[str, str, int, float]


def default(setting: str) -> str:
    """As a value of the table."""
    fields = PlacementConfig.model_fields | Arbitration.model_fields
    value = fields[setting].default
    return str(value).lower() if isinstance(value, bool) else f"{value:g}"


def key(workload: Workload, setting: str, value: str) -> str:
    return "/".join((*map(str, workload), setting, value))


def run(workload: Workload, settings: dict[str, str], targets: Any, traces: Path) -> dict[str, Any]:
    """One replay."""
    fleet, name, gpus, rate = workload
    label = f"prism {settings}"
    comparison_sim.VARIANTS[label] = ("prism", settings)
    point = comparison_sim.Point(fleet, name, gpus, label, rate, SCALE)
    outcome = comparison_sim.run(point, targets, traces, times=1)
    return {each: outcome[each] for each in KEPT}


def measure(out: Path, traces: Path, workers: int) -> dict[str, Any]:
    """Runs what `out` lacks, and writes it after each point. Defaults are run once for each workload."""
    kept: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    now = _series.commit(comparison_sim.SOURCES)
    done: dict[str, Any] = {k: v for k, v in kept.get("points", {}).items() if v["commit"] == now}
    wanted: dict[str, tuple[Workload, dict[str, str]]] = {}
    for workload in WORKLOADS:
        wanted[key(workload, "", "")] = (workload, {})
        for setting, values in SETTINGS.items():
            for value in values:
                if value != default(setting):
                    wanted[key(workload, setting, value)] = (workload, {setting: value})
    todo = {name: given for name, given in wanted.items() if name not in done}
    with pool(workers) as processes:
        alone = {
            w: processes.submit(comparison_sim.alone, FLEETS[w[0]], w[1], w[2], traces)
            for w in {workload for workload, _ in todo.values()}
        }
        targets = {workload: future.result() for workload, future in alone.items()}
        running = {processes.submit(run, w, s, targets[w], traces): (name, w, s) for name, (w, s) in todo.items()}
        for (name, workload, settings), found in results(processes, running):
            done[name] = {"workload": workload, "settings": settings, "commit": now, **found}
            _series.keep(out, "sensitivity", {"seed": comparison_sim.SEED, "points": dict(sorted(done.items()))})
            print(f"{len(done)} of {len(wanted)}: {name}: {done[name]['attainment']:.4f}", flush=True)
    return done


def show(done: dict[str, Any]) -> None:
    """On time of both targets, p99 of TTFT, activations, moves; defaults with a star."""
    heads = ["", *(f"{name}, {gpus} GPUs, rate {rate:g}" for _, name, gpus, rate in WORKLOADS)]
    rows = []
    for setting, values in SETTINGS.items():
        for value in values:
            plain = value == default(setting)
            names = [key(w, "", "") if plain else key(w, setting, value) for w in WORKLOADS]
            cells = [_cell(done[name]) if name in done else "" for name in names]
            rows.append([f"{setting} {value}{' *' if plain else ''}", *cells])
    _report.table(heads, rows)


def _cell(point: dict[str, Any]) -> str:
    counts = point["counts"]
    p99 = point["ttft_s"]["p99"]
    return f"{100 * point['attainment']:.1f}, {p99:.2f}, {counts['activations']}, {counts['migrations']}"


def main() -> None:
    parser = _report.arguments("sensitivity", __doc__ or "")
    parser.add_argument("--traces", type=Path, help="the folder with the trace files")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="processes at a time")
    parser.add_argument("--show", action="store_true", help="runs nothing")
    given: argparse.Namespace = parser.parse_args()
    if given.show:
        show(json.loads(given.out.read_text())["points"])
        return
    if given.traces is None:
        parser.error("--traces is needed")
    show(measure(given.out, given.traces, given.workers))


if __name__ == "__main__":
    main()
