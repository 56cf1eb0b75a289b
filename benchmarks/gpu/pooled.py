"""Several runs of `overhead` as one: their windows together, so that the intervals are narrower.

    python -m benchmarks.gpu.pooled RUN.json RUN.json ... --out DIR

The runs have to be of one part and one commit; on a machine with several GPUs they may have been taken at once, each
with cores and a `--seed` of its own.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import pairs, report


def pooled(runs: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each load and measure, in the order of the first run. Raises ValueError for runs that differ."""
    runs = list(runs)
    if len({(run["part"], run["circumstances"]["commit"]) for run in runs}) != 1:
        raise ValueError("the runs are not of one part and one commit")
    together: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for run in runs:
        for row in run["summary"]:
            together.setdefault((row["load"], row["measure"]), []).append(row)
    found = []
    for (load, measure), rows in together.items():
        ratios = [ratio for row in rows for ratio in row["ratios"]]
        interval = pairs.interval(ratios)
        found.append(
            {
                "part": rows[0]["part"],
                "load": load,
                "measure": measure,
                "runs": len(rows),
                "ratio": interval.mean,
                "half": interval.half,
                "ratios": ratios,
                "failed": sum(row["failed"] for row in rows),
            }
        )
    return found


def show(rows: Sequence[dict[str, Any]]) -> None:
    cells = [
        (row["load"], row["measure"], row["runs"], len(row["ratios"]), pairs.Interval(row["ratio"], row["half"], 0))
        for row in rows
    ]
    report.table("ours over SGLang's", ("load", "measure", "runs", "windows", "ratio, 95 %"), cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    runs = [json.loads(path.read_text()) for path in given.runs]
    rows = pooled(runs)
    show(rows)
    body = {"circumstances": [run["circumstances"] for run in runs], "summary": rows}
    given.out.mkdir(parents=True, exist_ok=True)
    path = given.out / f"gpu_overhead_{rows[0]['part']}_pooled.json"
    path.write_text(json.dumps(body, separators=(",", ":")) + "\n")
    print(f"wrote {path.name}")


if __name__ == "__main__":
    main()
