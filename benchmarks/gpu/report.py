"""What every GPU benchmark writes: one JSON file with raw samples and the circumstances, and a short table."""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import pathlib
import platform
import subprocess
import sys
from collections.abc import Iterable, Sequence
from typing import Any


def arguments(description: str) -> argparse.ArgumentParser:
    """A parser with what all of them take."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder for the JSON file")
    parser.add_argument(
        "--commit", default="unknown", help="commit of the code; a machine that runs this may have no repository"
    )
    parser.add_argument("--device", type=int, default=0)
    return parser


def smi(query: str) -> str:
    """One line of `nvidia-smi` about the first GPU that this process may use; an empty string where there is none."""
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0] or "0"
    try:
        done = subprocess.run(
            ["nvidia-smi", "-i", gpu, f"--query-gpu={query}", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError:
        return ""
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout.strip() else ""


def circumstances(commit: str) -> dict[str, Any]:
    """Date, hardware, versions, command and commit of this run."""
    import torch

    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none"
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit,
        # Names of files, not the paths of the machine that it ran on.
        "command": " ".join(pathlib.Path(argument).name for argument in sys.argv),
        "gpu": gpu,
        "driver": smi("driver_version"),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
    }


def quantile(samples: Iterable[float], q: float) -> float:
    """The q-quantile (0..1) by nearest rank; NaN for no samples."""
    ordered = sorted(samples)
    if not ordered:
        return float("nan")
    return ordered[min(len(ordered) - 1, max(0, round(q * (len(ordered) - 1))))]


def spread(samples: Sequence[float]) -> dict[str, float]:
    """p50, p90, p99, maximum and count, for tables; the raw samples are written beside it."""
    return {
        "p50": quantile(samples, 0.5),
        "p90": quantile(samples, 0.9),
        "p99": quantile(samples, 0.99),
        "max": max(samples, default=float("nan")),
        "n": len(samples),
    }


def table(title: str, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a plain table."""
    cells = [[str(c) for c in header], *[[f"{c:.2f}" if isinstance(c, float) else str(c) for c in row] for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    print(f"\n== {title}")
    for row in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    sys.stdout.flush()


def _without_nan(value: Any) -> Any:
    """The value with null in place of NaN, which is no JSON."""
    if isinstance(value, dict):
        return {key: _without_nan(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(each) for each in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def write(out: pathlib.Path, name: str, commit: str, result: dict[str, Any]) -> pathlib.Path:
    """Write `<out>/<name>.json`, with null for a mean or a median of nothing."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{name}.json"
    body = _without_nan({"circumstances": circumstances(commit), **result})
    path.write_text(json.dumps(body, separators=(",", ":")) + "\n")
    print(f"wrote {path.name}, {path.stat().st_size >> 10} KiB", flush=True)
    return path
