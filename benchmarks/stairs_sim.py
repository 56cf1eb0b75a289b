"""A staircase of rates in the simulator: the line beside the one that is measured on GPUs.

    python -m benchmarks.stairs_sim --slice FOLDER --out FILE [--measured FILE] [SYSTEM ...]

FOLDER is what `benchmarks.gpu.stairs cut` wrote, and `--measured` what its `collect` wrote: its steps and its targets
are taken then, and its runs are in FILE too. Without it targets are the simulator's own, of each model alone on an
H200, and steps have 55 s. The same models, requests, seconds and knowledge of the hour before; each model is asked once
before, as by the measured start.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf, isnan
from pathlib import Path
from typing import Any

from benchmarks import _report
from benchmarks._stairs import HEADER, RATES, STEP_S, StairSample, climb, falls_under, steps, table
from benchmarks.gpu.stairs_load import (
    CAPACITY_BYTES,
    CONTEXT_TOKENS,
    MODELS,
    QUOTA_BYTES,
    SIMULATED,
    TPOT_SCALE,
    TTFT_SCALE,
    StairLoad,
    load,
)
from sim.engines.cost import H200
from sim.inputs.catalogue import ModelSet, Spec
from sim.inputs.request import SimulatedRequest
from sim.inputs.trace import Workload
from sim.policies import SYSTEMS
from sim.replay import Replay
from sim.report import quantile

POLICIES: dict[str, dict[str, str]] = {"prism": {}, "static": {}, "muxserve": {"rounds": "false"}}
HARDWARE = replace(H200, capacity_bytes=CAPACITY_BYTES, quota_bytes=QUOTA_BYTES)
GPUS = 2
WARM_GAP_S, WARM_TOKENS = 20.0, (32, 4)
Targets = Mapping[str, Mapping[str, float]]
"""Milliseconds by model."""


def alone(stairs: StairLoad) -> dict[str, dict[str, float]]:
    """Targets from the P95 of each model alone, by the requests that measure it on GPUs."""
    found = {}
    for name, shape in MODELS.items():
        if asked := stairs.alone(name):
            spec = Spec(name, SIMULATED[shape], context_tokens=CONTEXT_TOKENS)
            _replay(asked, asked[-1].arrival + 1.0, [spec], 1, "static", stairs)
            ttft = quantile(sorted(request.ttft for request in asked), 0.95)
            tpot = quantile(sorted(request.tpot for request in asked if not isnan(request.tpot)), 0.95)
            found[name] = {"ttft_ms": 1e3 * TTFT_SCALE * ttft} if ttft else {}
            found[name] |= {"tpot_ms": 1e3 * TPOT_SCALE * tpot} if tpot else {}
    return found


def run(stairs: StairLoad, system: str, slos: Targets, step_s: float) -> dict[str, Any]:
    """What a collected run says, of a simulated one. Raises FleetError."""
    targets = {
        name: (slos.get(name, {}).get("ttft_ms", inf) / 1e3, slos.get(name, {}).get("tpot_ms", inf) / 1e3)
        for name in MODELS
    }
    specs = [
        Spec(name, SIMULATED[shape], *targets[name], context_tokens=CONTEXT_TOKENS) for name, shape in MODELS.items()
    ]
    begins_s = WARM_GAP_S * (len(specs) + 1)
    warm = [SimulatedRequest(f"w{i}", spec.name, WARM_GAP_S * i, *WARM_TOKENS) for i, spec in enumerate(specs)]
    asked = [
        SimulatedRequest(
            str(i), row.model, begins_s + row.arrival, row.prompt_tokens, row.output_tokens, *targets[row.model]
        )
        for i, row in enumerate(climb(stairs.rows, step_s))
    ]
    _replay(warm + asked, begins_s + step_s * len(RATES), specs, GPUS, system, stairs)
    samples = [
        StairSample(
            request.arrival - begins_s,
            request.model,
            _known(request.ttft),
            _known(request.tpot),
            not request.served,
        )
        for request in asked
    ]
    found = steps(samples, slos, step_s)
    return {
        "name": f"{system}, simulated",
        "system": system,
        "what": "simulated",
        "step_s": step_s,
        "slos": slos,
        "steps": found,
        "falls_under": falls_under(found),
    }


def _known(seconds: float) -> float | None:
    return None if isnan(seconds) else seconds


def _replay(
    asked: list[SimulatedRequest], seconds: float, specs: list[Spec], gpus: int, system: str, stairs: StairLoad
) -> None:
    Replay(
        Workload(asked, seconds),
        ModelSet(specs),
        (1,) * gpus,
        SYSTEMS[system],
        dict(POLICIES[system]),
        HARDWARE,
        rates={name: of.tokens_per_s for name, of in stairs.before.items()},
        expected=stairs.before,
        progress=lambda line: None,
    ).run()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "stairs_sim", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("systems", nargs="*", choices=(*POLICIES, []), metavar="SYSTEM")
    parser.add_argument("--slice", type=Path, required=True)
    parser.add_argument("--measured", type=Path)
    parser.add_argument("--step-s", type=float, default=STEP_S)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args(arguments)
    stairs = load(given.slice)
    kept: dict[str, Any] = json.loads(given.measured.read_text()) if given.measured else {"rates": RATES, "runs": []}
    measured = [each for each in kept["runs"] if each["what"] == "measured"]
    slos = measured[0]["slos"] if measured else alone(stairs)
    step_s = measured[0]["step_s"] if measured else given.step_s
    runs = list(measured)
    for system in given.systems or POLICIES:
        runs.append(run(stairs, system, slos, step_s))
        _report.table(HEADER, table(runs[-1:]))
    kept["runs"] = runs
    if measured:  # with the circumstances of what was measured
        given.out.write_text(json.dumps(kept, separators=(",", ":")) + "\n")
    else:
        _report.write(given.out, "stairs_sim", kept)
    return 0


if __name__ == "__main__":
    sys.exit(main())
