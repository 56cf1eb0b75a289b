"""The simulator beside runs of real systems: what it says of the same requests, and by how much it is off.

    python benchmarks/sim_check.py DIR [--set joint_s=0.1 ...]

DIR has results of `benchmarks.gpu.compare run`. Each run's requests, targets, shapes and devices go through the
simulator's policy of the same name; before them each model is asked once, as it was there. Ablations are left out that
the simulator has no setting for.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from sim import report
from sim.catalogue import SHAPES, Catalogue, Spec
from sim.cost import H200
from sim.policies import SYSTEMS
from sim.replay import Replay
from sim.request import Request
from sim.system import FleetError
from sim.trace import Trace

POLICIES: dict[str, tuple[str, dict[str, str]]] = {
    "static": ("static", {}),
    "muxserve": ("muxserve", {}),
    "serverlessllm": ("serverlessllm", {}),
    "prism": ("prism", {}),
    "no-placement": ("prism", {"rebalance": "false"}),
    "no-decode-turn": ("prism", {"decode_turn_ms": "0"}),
}
WARM_GAP_S = 60.0


def simulated(found: dict[str, Any], settings: dict[str, str]) -> dict[str, Any]:
    """What the simulator's report says of all requests of a run. Raises FleetError."""
    policy, own = POLICIES[found["run"]["system"]]
    (system,) = found["systems"]
    slos = found["slos"]
    specs = []
    for name, shape in found["system"]["shapes"].items():
        slo = slos.get(name, {})
        spec = Spec(name, SHAPES[shape], context_tokens=found["system"]["catalogue"][name]["context_tokens"])
        specs.append(replace(spec, ttft_s=slo.get("ttft_ms", inf) / 1e3, tpot_s=slo.get("tpot_ms", inf) / 1e3))
    by_name = {spec.name: spec for spec in specs}
    warm_s = WARM_GAP_S * (len(specs) + 1)
    warm = [Request(f"w{i}", spec.name, WARM_GAP_S * i, 64, 16) for i, spec in enumerate(specs)]
    asked = [
        Request(str(i), name, warm_s + at, prompt, output, by_name[name].ttft_s, by_name[name].tpot_s)
        for i, (at, name, prompt, output, *_) in enumerate(system["samples"]["rows"])
    ]
    devices = found["system"]["devices"]
    hardware = replace(H200, capacity_bytes=min(devices.values()))
    trace = Trace(warm + asked, warm_s + found["seconds"])
    outcome = Replay(
        trace, Catalogue(specs), (1,) * len(devices), SYSTEMS[policy], own | settings, hardware, progress=print
    ).run()
    outcome.trace.requests, outcome.trace.seconds = asked, found["seconds"]
    total: dict[str, Any] = report.build(outcome)["all"]
    return total


def lines(name: str, found: dict[str, Any], settings: dict[str, str]) -> list[list[str]]:
    (system,) = found["systems"]
    try:
        modelled = simulated(found, settings)
    except FleetError as error:
        return [[name, str(error)]]
    rows = []
    for what, each in (("measured", system["all"]), ("simulated", modelled)):
        shares = [f"{100 * each[key]:.1f}" for key in ("attainment", "ttft_attainment", "tpot_attainment")]
        times = [each[at][key] for at in ("ttft_s", "tpot_s") for key in ("p50", "p99")]
        rows.append([name, what, *shares, *("-" if value is None else f"{1e3 * value:.1f}" for value in times)])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        "sim_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="of Prism's policies")
    given = parser.parse_args()
    settings = dict(each.split("=", 1) for each in given.set)
    header = ["run", "", "both %", "TTFT", "TPOT", "TTFT p50 ms", "p99", "TPOT p50 ms", "p99"]
    rows = []
    for path in sorted(given.folder.glob("*.json")):
        found = json.loads(path.read_text())
        if found.get("run", {}).get("system") in POLICIES:
            rows += lines(path.stem, found, settings if found["run"]["system"] == "prism" else {})
    for row in [header, *rows]:
        print("  ".join(f"{cell:>12}" for cell in row))


if __name__ == "__main__":
    main()
