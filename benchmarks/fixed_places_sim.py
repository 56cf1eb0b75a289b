"""What placement could have come to: the slices of `slices_sim.py` with every way of dividing the models among the two
GPUs, from which none moves, beside Prism with all its moves from several starts. Models still sleep and wake.

    python benchmarks/fixed_places_sim.py --traces FOLDER --only "busy, 6" [--only "8 h"]       # some 5 min each

Where the best division is far above Prism there is something to be gained by choosing places; the best one is found
with the slice known, so not all of it can be.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import _report, slices_sim
from benchmarks._pool import pool
from benchmarks._slices import EIGHTEEN, Part
from benchmarks.slices_sim import SPECS

STARTS = 4
SHOWN = 5
GROUPS = ("g0", "g1")


def divisions() -> list[dict[str, str]]:
    """Model -> group. The GPUs are alike, so the last model is always on the second; all on one is none of them."""
    names = list(SPECS)
    return [
        {name: GROUPS[1 - (chosen >> i & 1)] for i, name in enumerate(names)}
        for chosen in range(1, 1 << (len(names) - 1))
    ]


def attained(part: Part, places: dict[str, str] | None, traces: Path) -> float:
    """Requests on time, %."""
    settings = {} if places is None else {"rebalance": "false", "places": json.dumps(places)}
    return 100.0 * float(slices_sim.run(part, "prism", settings, traces)["attainment"])


def compared(part: Part, traces: Path, workers: int) -> dict[str, Any]:
    with pool(workers) as processes:
        starts = [processes.submit(attained, replace(part, start=n), None, traces) for n in range(STARTS)]
        fixed = [(places, processes.submit(attained, part, places, traces)) for places in divisions()]
        prism = [each.result() for each in starts]
        found = [{"first": _on_first(places), "attainment": each.result()} for places, each in fixed]
    return {"slice": part.name, "prism": prism, "fixed": sorted(found, key=lambda row: -row["attainment"])}


def _on_first(places: dict[str, str]) -> list[str]:
    return [name for name, group in places.items() if group == GROUPS[0]]


def main() -> None:
    parser = argparse.ArgumentParser(
        "fixed_places_sim", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--traces", type=Path, required=True, help="where the traces' files are")
    parser.add_argument(
        "--only", action="append", required=True, choices=[part.name for part in EIGHTEEN], help="a slice"
    )
    parser.add_argument("--out", type=Path, default=_report.RESULTS / "fixed_places_sim.json")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes (default: %(default)s)")
    given = parser.parse_args()
    rows, results = [], []
    for part in (part for part in EIGHTEEN if part.name in given.only):
        found = compared(part, given.traces, given.workers)
        results.append(found)
        fixed = [row["attainment"] for row in found["fixed"]]
        rows.append([part.name, fmean(found["prism"]), min(found["prism"]), max(found["prism"]), *_spread(fixed)])
        print(f"{part.name}: the best divisions have on one GPU", flush=True)
        for row in found["fixed"][:SHOWN]:
            print(f"  {row['attainment']:.1f} {', '.join(row['first'])}", flush=True)
    _report.table(["slice", "Prism", "least", "most", "best fixed", "median", "worst"], rows)
    _report.write(given.out, "fixed_places_sim", {"results": results})


def _spread(values: list[float]) -> tuple[float, float, float]:
    return max(values), median(values), min(values)


if __name__ == "__main__":
    main()
