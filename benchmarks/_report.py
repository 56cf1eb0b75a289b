"""What the benchmarks of this folder write: one JSON file with raw samples and the circumstances they were taken in.

    {"benchmark": ..., "circumstances": {date, commit, command, python, hardware, load}, ...the benchmark's own}

Shared by programs that run as `python benchmarks/<name>.py`; those under `gpu/` have one of their own, because the
machine that runs them may have no repository.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def arguments(name: str, description: str) -> argparse.ArgumentParser:
    """A parser with `--out`, by default `benchmarks/results/<name>.json`."""
    parser = argparse.ArgumentParser(
        prog=f"benchmarks/{name}.py", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=RESULTS / f"{name}.json", help="the JSON file (default: %(default)s)"
    )
    return parser


def quantile(samples: Sequence[float], q: float) -> float:
    """The q-quantile (0..1) by nearest rank; NaN for no samples."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, round(q * (len(ordered) - 1)))] if ordered else float("nan")


def spread(samples: Sequence[float]) -> dict[str, float]:
    """p50, p99, least, most and count of some samples, in their unit."""
    return {
        "p50": quantile(samples, 0.5),
        "p99": quantile(samples, 0.99),
        "min": min(samples, default=float("nan")),
        "max": max(samples, default=float("nan")),
        "n": len(samples),
    }


def circumstances() -> dict[str, Any]:
    """Date, commit, command line, Python, hardware; and the load average, because other work on the machine shows in
    the samples."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "command": " ".join(["python", _relative(sys.argv[0]), *map(_relative, sys.argv[1:])]),
        "python": platform.python_version(),
        "hardware": {
            "cpu": _field("/proc/cpuinfo", "model name") or platform.processor(),
            "cpu_family_model": f"{_field('/proc/cpuinfo', 'cpu family')}/{_field('/proc/cpuinfo', 'model')}",
            "cores": len(os.sched_getaffinity(0)),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        },
        "load_average": list(os.getloadavg()),
    }


def write(path: Path, benchmark: str, result: dict[str, Any]) -> None:
    """Write the file, with the circumstances of now."""
    path.parent.mkdir(parents=True, exist_ok=True)
    body = {"benchmark": benchmark, "circumstances": circumstances(), **result}
    path.write_text(json.dumps(body, separators=(",", ":")) + "\n")
    print(f"wrote {_relative(str(path))}", flush=True)


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a plain table; floats with two decimals."""
    cells = [list(header), *([f"{c:.2f}" if isinstance(c, float) else str(c) for c in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    for row in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip(), flush=True)


def _relative(text: str) -> str:
    """Paths inside the repository without the place where it lies; of others the last part."""
    path = Path(text)
    if not path.is_absolute():
        return text
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name


def _commit() -> str:
    """The commit, with "+changes" if tracked files differ from it. Outside a repository what a file COMMIT says, as
    gpu/offline/pack.sh writes it, or "unknown"."""
    written = ROOT / "COMMIT"
    if written.exists():
        return written.read_text().strip()
    commit = git("rev-parse", "HEAD")
    return (
        commit + ("+changes" if git("status", "--porcelain", "--untracked-files=no") else "") if commit else "unknown"
    )


def git(*command: str) -> str:
    """What git says of this repository; empty where it fails or is not there."""
    try:
        done = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _field(path: str, name: str) -> str:
    """The first "name : value" of a file under /proc; empty where there is none."""
    try:
        lines = Path(path).read_text().splitlines()
    except FileNotFoundError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in lines if line.split(":")[0].strip() == name), "")
