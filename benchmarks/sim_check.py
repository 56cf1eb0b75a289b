"""The simulator beside runs of real systems: what it says of the same requests, and by how much it is off.

    python benchmarks/sim_check.py DIR --traces FOLDER [--starts 4] [--all] [--set joint_s=0.1 ...]

DIR has results of `benchmarks.gpu.compare run`, and FOLDER the traces that these replayed: results that are kept for
good have summaries of their requests, which are made again from the trace. Each run's requests, targets, shapes and
devices go through the simulator's policy of the same name. Before them each model is asked once, and come the requests
of the runs that the same start had before, if DIR has their results: where they left the models is where this one
begins. That may be worth ten points, and so may where models came up at first, and in which order. The places are the
run's, under Prism and where it says them (`began`), the order is taken in several ways: figures are the means, with the
least and the most of requests on time. When an idle model leaves under ServerlessLLM's rule is the run's. Ablations are
left out that the simulator has no setting for, and, without `--all`, runs of policies that are no more, or further ones
(NAME.WHAT.json). `sim_bias.py` has all runs in one table, by system.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from math import inf
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import systems
from benchmarks.gpu.slices import SLICES, deal
from sim import report
from sim.engines.cost import GPUS, H200, GpuModel, on_host
from sim.inputs import trace
from sim.inputs.catalogue import SHAPES, ModelSet, Spec
from sim.inputs.request import SimulatedRequest
from sim.inputs.trace import Workload
from sim.policies import SYSTEMS
from sim.replay import Replay
from sim.system import FleetError

POLICIES: dict[str, tuple[str, dict[str, str]]] = {
    "static": ("static", {}),
    "muxserve": ("muxserve", {"rounds": "false"}),
    "serverlessllm": ("serverlessllm", {}),
    "prism": ("prism", {}),
    "no-placement": ("prism", {"rebalance": "false"}),
    "no-arbitration": (
        "prism",
        systems.flat(systems.SYSTEMS["no-arbitration"].arbitration),
    ),
    "no-decode-turn": ("prism", {"decode_arbitration_ms": "0"}),
    "no-hibernation": ("prism", {"hibernate": "false"}),
}
WARM_GAP_S = 60.0
HEADER = ("run", "", "both %", "TTFT", "TPOT", "TTFT p50 ms", "p99", "TPOT p50 ms", "p99", "both, from to")
WIDTHS = (52, 22, 8, 8, 8, 13, 10, 13, 8, 14)
BETWEEN_S = 15.0
"""From the end of a run to the next one of the same start: queues are emptied."""
SHARES = ("attainment", "ttft_attainment", "tpot_attainment")
Found = dict[str, Any]
"""A run's result."""


def simulated(
    runs: Sequence[Found], settings: Mapping[str, str], start: int, traces: Path | None = None, host: float = 1.0
) -> dict[str, Any]:
    """What the simulator's report says of all requests of the last of these runs, which one start had in this order.
    `start`: in which order models come up. `traces`: the folder of the traces, for runs whose requests are summaries.
    `host`: how many times as long as usual its host's cores take. Raises FleetError, ValueError."""
    found = runs[-1]
    policy, own = POLICIES[found["run"]["system"]]
    if policy == "serverlessllm":
        own = {name: str(found["system"]["settings"]["placement"][name]) for name in ("idle_s", "patience_s")}
    targets = _targets(found)  # placement hears of them from requests
    began = _began(runs[0])
    if policy == "prism" and systems.SYSTEMS[found["run"]["system"]].planned:
        own = own | {"places": json.dumps(_planned(found))}
    specs = [
        replace(
            Spec(name, SHAPES[shape], context_tokens=found["system"]["catalogue"][name]["context_tokens"]),
            ttft_s=targets[name][0],
            tpot_s=targets[name][1],
            begins_on=began.get(name, ""),
        )
        for name, shape in found["system"]["shapes"].items()
    ]
    order = random.Random(start).sample(specs, len(specs)) if start else specs
    every = [SimulatedRequest(f"w{i}", spec.name, WARM_GAP_S * i, 64, 16) for i, spec in enumerate(order)]
    begins_s = WARM_GAP_S * (len(specs) + 1)
    asked: list[SimulatedRequest] = []
    for number, run in enumerate(runs):
        asked = requests(run, f"{number}-", begins_s, traces)
        every += asked
        begins_s += run["seconds"] + BETWEEN_S
    devices = found["system"]["devices"]
    kind = on_host(hardware_of(found), host)
    # Engines may have been given more for themselves than they need.
    quotas = [entry.get("quota_bytes", 0) for entry in found["system"]["catalogue"].values()]
    hardware = replace(
        kind, capacity_bytes=min(devices.values()), quota_bytes=max(quotas, default=0) or kind.quota_bytes
    )
    outcome = Replay(
        Workload(every, begins_s - BETWEEN_S),
        ModelSet(specs),
        (1,) * len(devices),
        SYSTEMS[policy],
        {**own, **settings},
        hardware,
        progress=lambda line: None,
    ).run()
    outcome.trace.requests, outcome.trace.seconds = asked, found["seconds"]
    total: dict[str, Any] = report.build(outcome)["all"]
    return total


def hardware_of(run: Found) -> GpuModel:
    """What it ran on; an H200 where that has no name here."""
    gpu = str(run.get("circumstances", {}).get("gpu", "")).lower()
    return next((hardware for name, hardware in GPUS.items() if name in gpu), H200)


def requests(run: Found, prefix: str, begins_s: float, traces: Path | None = None) -> list[SimulatedRequest]:
    """Those of a run, with their targets, from `begins_s` on. Raises ValueError where the result has a summary of them
    and the trace does not have these requests."""
    (system,) = run["systems"]
    targets = _targets(run)
    kept = system["samples"]["rows"]
    rows = kept if isinstance(kept, list) else _replayed(run, traces)
    return [
        SimulatedRequest(f"{prefix}{i}", name, begins_s + at, prompt, output, *targets[name])
        for i, (at, name, prompt, output, *_) in enumerate(rows)
    ]


Row = tuple[float, str, int, int]
"""Second of arrival, model, prompt and output tokens."""


def _replayed(run: Found, traces: Path | None) -> list[Row]:
    if traces is None:
        raise ValueError("this result has a summary of its requests: --traces has to say where the traces are")
    part, arguments = SLICES[run["run"]["slice"]], run["arguments"]
    (context,) = {entry["context_tokens"] for entry in run["system"]["catalogue"].values()}
    cut = trace.Slice(part.from_s, run["seconds"], float(arguments["rate"]), int(arguments["seed"]))
    names = deal(list({row.model for row in _read(traces / part.trace, context)}), tuple(run["system"]["shapes"]))
    rows = [
        (row.arrival, names[row.model], row.prompt_tokens, row.output_tokens)
        for row in _read(traces / part.trace, context, cut)
    ]
    (system,) = run["systems"]
    counts = system["samples"]["rows"]["columns"][1]
    if Counter(name for _, name, *_ in rows) != counts:
        raise ValueError(f"{traces / part.trace} does not have the requests of this run, by model: {counts}")
    return rows


@cache
def _read(path: Path, context_tokens: int, part: trace.Slice | None = None) -> list[SimulatedRequest]:
    every = ModelSet([Spec("*", SHAPES["1b"], context_tokens=context_tokens)])
    return trace.read(path, every, part or trace.Slice()).requests


def _began(run: Found) -> dict[str, str]:
    """Where each model was as the first run of a start began, as the simulator names groups; of results that say it."""
    groups = _groups(run)
    return {model: groups[group] for model, group in run.get("began", {}).items()}


def _planned(run: Found) -> dict[str, str]:
    """Where each model is to be for good, by the plan that was made of the run's requests."""
    groups = _groups(run)
    return {model: groups[part["group"]] for model, part in run["system"]["plan"].items()}


def _groups(run: Found) -> dict[str, str]:
    """As the simulator names them."""
    return {name: f"g{number}" for number, name in enumerate(run["system"]["devices"])}


def _targets(run: Found) -> dict[str, tuple[float, float]]:
    """Seconds to the first token and for each further one, of every model; +inf where none was asked for."""
    slos = {name: run["slos"].get(name, {}) for name in run["system"]["shapes"]}
    return {name: (slo.get("ttft_ms", inf) / 1e3, slo.get("tpot_ms", inf) / 1e3) for name, slo in slos.items()}


def one_start(path: Path) -> list[Found]:
    """The run of this file, behind those that its start had before, where their files are beside it under names with
    the same ending."""
    found: Found = json.loads(path.read_text())
    run = found["run"]
    ending = path.name.removeprefix(f"{run['system']}-{run['slice']}-{run['rate']:g}")
    before = [path.with_name(f"{name}{ending}") for name in run.get("after", ())]
    return [*(json.loads(each.read_text()) for each in before if each.exists()), found]


def lines(
    name: str, runs: Sequence[Found], settings: Mapping[str, str], starts: int, traces: Path | None = None
) -> list[list[str]]:
    (system,) = runs[-1]["systems"]
    try:
        modelled = [simulated(runs, settings, start, traces) for start in range(starts)]
    except FleetError as error:
        return [[name, str(error)]]
    both = [100 * each["attainment"] for each in modelled]
    what = f"simulated, {len(runs) - 1} before" if len(runs) > 1 else "simulated"
    return [
        [name, "measured", *_figures([system["all"]])],
        ["", what, *_figures(modelled), f"{min(both):.1f} to {max(both):.1f}"],
    ]


def _figures(reports: Sequence[Mapping[str, Any]]) -> list[str]:
    """Means of them."""
    shares = [f"{100 * fmean(each[key] for each in reports):.1f}" for key in SHARES]
    times = [
        [each[at][key] for each in reports if each[at][key] is not None]
        for at in ("ttft_s", "tpot_s")
        for key in ("p50", "p99")
    ]
    return [*shares, *(f"{1e3 * fmean(each):.1f}" if each else "-" for each in times)]


def main() -> None:
    parser = argparse.ArgumentParser(
        "sim_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--traces", type=Path, help="where the traces' files are")
    parser.add_argument("--starts", type=int, default=4, help="orders in which models come up (default: %(default)s)")
    parser.add_argument("--all", action="store_true", help="also NAME.WHAT.json")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="of Prism's policies")
    given = parser.parse_args()
    settings = dict(each.split("=", 1) for each in given.set)
    print("".join(f"{cell:<{width}}" for cell, width in zip(HEADER, WIDTHS, strict=True)))
    for path in sorted(given.folder.glob("*.json")):
        found = json.loads(path.read_text())
        if found.get("run", {}).get("system") not in POLICIES or ("." in path.stem and not given.all):
            continue
        own = settings if found["run"]["system"] == "prism" else {}
        for row in lines(path.stem, one_start(path), own, given.starts, given.traces):
            print("".join(f"{cell:<{width}}" for cell, width in zip(row, WIDTHS, strict=False)).rstrip(), flush=True)


if __name__ == "__main__":
    main()
