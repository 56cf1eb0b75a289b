"""The simulator's bias: what it says of every real run of `benchmarks/results`, less what was measured, by system.

    python benchmarks/sim_bias.py --traces FOLDER            # simulates all runs, and keeps what came out
    python benchmarks/sim_bias.py --show                     # the tables of what is kept

`sim_check.py` says how a run is simulated. A mean of zero does not make a single figure right: a run is one draw, and
neighbouring starts of one slice differ by several points. `corrected` takes a system's mean bias off a figure of it;
`slices_sim.py --corrected` and `comparison_sim.py --show --corrected` do so for all of theirs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import exp, log
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import _report, sim_check
from benchmarks._pool import pool, results

FOLDERS = ("compare_h200", "compare_h100", "compare_2gib", "compare_2gib_h100")
OUT = _report.RESULTS / "sim_bias.json"
MEASURES = dict(zip(("both", "ttft", "tpot"), sim_check.SHARES, strict=True))
OF_OTHER_RULES = {
    "pace": "one lead for all requests of a model",
    "shared": "before precedence",
    "precedence": "before the decode turn",
    "turn": "strict turns",
    "counters": "two faults of then",
    "retracts": "engines gave back more than was asked",
    "130s": "another length, before the decode turn",
    "cold": "every start cold",
    "two_at_once": "two models awake where one was meant",
    "graphs512": "floors a page short, smaller graphs",
    "pauses": "prefills paused although a prompt was late by it",
    "late_notice": "idleness was told late",
    "slow_probe": "engines believed in slow steps",
    "evening_disturbed": "others were busy on the host",
    "one_step_evening_disturbed": "others were busy on the host",
}
"""Endings of results that say nothing of the simulator, and why."""
SLOW_HOSTS = {("27T15:", "prism"): 1.3, ("27T15:", ""): 1.12, ("27T21:05", ""): 1.3}
"""Times in November 2026 at which runs (of one system, or of any) were on hosts that were slower than those that the
cost model was fitted to, and how many times as long they took. In the afternoon a 1B model's decode step of six
requests took 2.1 ms on the half of the host that Prism had and 1.8 on the other, instead of 1.6; at night
`host_pulse` took 1.29 ms instead of 1.00 (docs/lab/gpu-runs.md, "Hosts differ")."""
FAULTY = {"compare_2gib/prism-quiet-6": "27 moves failed", "compare_2gib/static-busy-2": "floors a page short"}
LEAST_SHARE = 1e-4
"""Shares nearer to 0 or 1 count as so near when odds are taken of them."""
PRESENT = "what engines need"
"""Quotas of engines since 26 November 2026; before they were 2 GiB."""
AS_THEN = {"most_replicas": "1"}
"""Settings of Prism with which it does nothing that it did not do in these runs."""
Row = dict[str, Any]
"""One run: system, slice, rate, gpu, quotas of its engines, host (`host_of`), and percents by measure: measured,
simulated, and simulated on such a host (`on_host`)."""


def runs(results: Path) -> Iterable[Path]:
    """Files of the runs that are compared."""
    for folder in FOLDERS:
        for path in sorted((results / folder).glob("*.json")):
            ending = path.stem.partition(".")[2]
            if ending in OF_OTHER_RULES or f"{folder}/{path.stem}" in FAULTY:
                continue
            if json.loads(path.read_text()).get("run", {}).get("system") in sim_check.POLICIES:
                yield path


def compared(path: Path, traces: Path, starts: int) -> Row:
    """Raises FleetError, ValueError."""
    of_start = sim_check.one_start(path)
    found = of_start[-1]
    (system,) = found["systems"]

    settings = AS_THEN if sim_check.POLICIES[found["run"]["system"]][0] == "prism" else {}

    def simulated(host: float) -> dict[str, float]:
        modelled = [sim_check.simulated(of_start, settings, start, traces, host) for start in range(starts)]
        return {name: 100 * fmean(each[key] for each in modelled) for name, key in MEASURES.items()}

    usual, host = simulated(1.0), host_of(found)
    return {
        **{key: found["run"][key] for key in ("system", "slice", "rate")},
        "gpu": "H100" if "h100" in path.parent.name else "H200",
        "quotas": "2 GiB" if "2gib" in path.parent.name else PRESENT,
        "measured": {name: 100 * system["all"][key] for name, key in MEASURES.items()},
        "simulated": usual,
        "host": host,
        "on_host": simulated(host) if host != 1.0 else usual,
    }


def host_of(found: sim_check.Found) -> float:
    """How many times as long as usual the run's host took, as far as that was measured."""
    began = found.get("circumstances", {}).get("date", "")[8:]
    factors = [
        factor
        for (date, system), factor in SLOW_HOSTS.items()
        if began.startswith(date) and system in ("", found["run"]["system"])
    ]
    return factors[0] if factors else 1.0


def difference(row: Row, measure: str, said: str = "simulated") -> float:
    """Points by which what the simulator said is too good."""
    return float(row[said][measure] - row["measured"][measure])


def odds(row: Row, measure: str) -> float:
    """Logarithm of the odds of being on time, measured less simulated: below 0 where the simulator is too good."""
    return _logit(row["measured"][measure]) - _logit(row["simulated"][measure])


def _logit(percent: float) -> float:
    share = min(1 - LEAST_SHARE, max(LEAST_SHARE, percent / 100))
    return log(share / (1 - share))


def corrected(percent: float, system: str, rows: Mapping[str, Row], measure: str = "both") -> float:
    """A simulated percentage of requests on time with the system's mean bias taken off its odds, which leaves less of
    it near 0 and 100 % than in the middle, as the runs have it. Runs of engines with quotas of 2 GiB do not count: they
    are older, of a fleet that nobody has any more. Raises KeyError for a system without runs."""
    shifts = [odds(row, measure) for row in rows.values() if row["system"] == system and row["quotas"] == PRESENT]
    if not shifts:
        raise KeyError(f"no run of {system}")
    if not 0 < percent < 100:
        return percent
    return 100 / (1 + exp(-(_logit(percent) + fmean(shifts))))


def kept(path: Path = OUT) -> dict[str, Row]:
    """The runs as they were compared last. Raises OSError."""
    rows: dict[str, Row] = json.loads(path.read_text())["runs"]
    return rows


# --- tables


def by(rows: Iterable[Row], key: Callable[[Row], Any]) -> dict[Any, list[Row]]:
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return dict(sorted(groups.items()))


def line(name: str, rows: Sequence[Row]) -> list[str]:
    each = {measure: [difference(row, measure) for row in rows] for measure in MEASURES}
    both = each["both"]
    means = [f"{fmean(each[measure]):+.1f}" for measure in MEASURES]
    on_host = fmean(difference(row, "both", "on_host") for row in rows)
    absolute, worst = fmean(map(abs, both)), max(both, key=abs)
    shift = fmean(odds(row, "both") for row in rows)
    return [name, str(len(rows)), *means, f"{absolute:.1f}", f"{worst:+.1f}", f"{on_host:+.1f}", f"{shift:+.2f}"]


def show(rows: Mapping[str, Row]) -> None:
    for name, row in rows.items():
        shares = [f"{row['measured'][m]:.1f} -> {row['simulated'][m]:.1f}" for m in MEASURES]
        print(f"{name:60} {difference(row, 'both'):+6.1f}   {', '.join(shares)}")
    print("\nsimulated - measured, points of requests on time")
    header = ["", "runs", "mean, both", "TTFT", "TPOT", "mean absolute", "worst", "mean on such hosts", "odds"]
    _report.table(header, table(rows))


def table(rows: Mapping[str, Row]) -> list[list[str]]:
    """A line for each system, the same of runs with present quotas, and for Prism's slices and rates of those."""
    systems = by(rows.values(), lambda row: row["system"])
    lines = [line(system, of) for system, of in systems.items()]
    present = {system: [row for row in of if row["quotas"] == PRESENT] for system, of in systems.items()}
    lines += [line(f"{name}, present quotas", of) for name, of in present.items() if 0 < len(of) < len(systems[name])]
    prism = present.get("prism", [])
    lines += [line(f"prism, {name}", of) for name, of in by(prism, lambda row: row["slice"]).items()]
    lines += [line(f"prism, rate {rate:g}", of) for rate, of in by(prism, lambda row: row["rate"]).items()]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        "sim_bias", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--traces", type=Path, help="where the traces' files are")
    parser.add_argument("--starts", type=int, default=2, help="orders in which models come up (default: %(default)s)")
    parser.add_argument("--only", default="", help="runs whose names have this in them; nothing is kept")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=OUT, help="(default: %(default)s)")
    parser.add_argument("--show", action="store_true", help="runs nothing")
    given = parser.parse_args()
    if given.show:
        show(kept(given.out))
        return
    if given.traces is None:
        parser.error("--traces is needed")
    paths = [path for path in runs(_report.RESULTS) if given.only in f"{path.parent.name}/{path.stem}"]
    with pool(given.workers) as processes:
        running = {
            processes.submit(compared, path, given.traces, given.starts): f"{path.parent.name}/{path.stem}"
            for path in paths
        }
        rows: dict[str, Row] = {}
        for name, row in results(processes, running):
            rows[name] = row
            print(f"{len(rows)} of {len(paths)}: {name} {difference(row, 'both'):+.1f}", flush=True)
    rows = dict(sorted(rows.items()))
    show(rows)
    if not given.only:
        rounded = json.loads(json.dumps(rows), parse_float=lambda text: round(float(text), 2))
        _report.write(given.out, "sim_bias", {"starts": given.starts, "runs": rounded})


if __name__ == "__main__":
    main()
