"""What the simulator says of the comparison on GPUs before it is run.

    python benchmarks/foretell.py DIR --traces FOLDER [--starts 4] [--quota-mib 1664] [--targets SLOS]

DIR has results of `benchmarks.gpu.compare run`, a run of each slice and rate, of whatever system: its requests,
targets, shapes and devices go through every system, as `sim_check.py` has them, with engines' quotas as
`benchmarks/systems.py` states them now, and with the targets and on the GPU of SLOS (`slos.json` of `compare targets`),
of the slices that it has, where that is given. A system that is started once for all slices has those before in front
of each.
% of requests with both targets met (TTFT, TPOT), means of several starts.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import sim_check, systems
from benchmarks.gpu.compare import scaled
from benchmarks.gpu.slices import SLICES
from benchmarks.sim_check import Found
from benchmarks.systems import Model
from sim.system import FleetError

FORETOLD = ("static", "muxserve", "serverlessllm", "prism", "no-placement", "no-arbitration")
"""The other ablations are none in the simulator."""


def as_system(run: Found, system: str, quota_bytes: int) -> Found:
    """The same requests under another system."""
    run = copy.deepcopy(run)
    run["run"]["system"] = system
    for entry in run["system"]["catalogue"].values():
        entry["quota_bytes"] = quota_bytes
    run["system"]["settings"] = {"placement": dict(systems.SYSTEMS[system].placement)}
    run.pop("began", None)  # that is where the other system had them
    return run


def with_targets(run: Found, alone: Found) -> Found:
    """The same requests with targets scaled from what models took `alone`, on the GPU that they were alone on."""
    models = [Model(name, Path(), 0) for name in run["system"]["shapes"]]
    slos = scaled(alone["slos"][run["run"]["slice"]], models)
    return {**run, "slos": slos, "circumstances": alone["circumstances"]}


def one_of_each(folder: Path) -> list[Found]:
    """In the order in which they are replayed."""
    found = []
    for name, one in SLICES.items():
        for rate in sorted(one.rates):
            paths = sorted(folder.glob(f"*-{name}-{rate:g}.json"))
            if not paths:
                raise SystemExit(f"{folder} has no run of {name} at {rate:g}")
            found.append(json.loads(paths[0].read_text()))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        "foretell", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--traces", type=Path, help="where the traces' files are, for results with summaries")
    parser.add_argument("--starts", type=int, default=4, help="orders in which models come up (default: %(default)s)")
    parser.add_argument("--quota-mib", type=int, default=systems.GPU.quota_bytes >> 20, help="(default: %(default)s)")
    parser.add_argument("--systems", type=lambda text: text.split(","), default=list(FORETOLD))
    parser.add_argument("--targets", type=Path, metavar="SLOS", help="others than the runs'")
    given = parser.parse_args()
    runs = one_of_each(given.folder)
    if given.targets:
        alone = json.loads(given.targets.read_text())
        runs = [with_targets(run, alone) for run in runs if run["run"]["slice"] in alone["slos"]]
    print(f"{'':<16}" + "".join(f"{system:<22}" for system in given.systems))
    for number, run in enumerate(runs):
        cells = []
        for system in given.systems:
            begins = number if systems.SYSTEMS[system].planned else 0
            before = [as_system(each, system, given.quota_mib << 20) for each in runs[begins : number + 1]]
            try:
                said = [sim_check.simulated(before, {}, start, given.traces) for start in range(given.starts)]
                both, ttft, tpot = (100 * fmean(each[key] for each in said) for key in sim_check.SHARES)
                cells.append(f"{both:.1f} ({ttft:.1f} {tpot:.1f})")
            except FleetError as error:
                cells.append(str(error)[:20])
        name = f"{run['run']['slice']}, {run['run']['rate']:g}"
        print(f"{name:<16}" + "".join(f"{cell:<22}" for cell in cells).rstrip(), flush=True)


if __name__ == "__main__":
    main()
