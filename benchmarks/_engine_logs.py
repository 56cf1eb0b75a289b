"""What engines said of their steps in the logs that `benchmarks.gpu.compare --engine-log-level info` kept."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from statistics import quantiles
from typing import Any


def of_groups(archive: Path) -> Iterator[Iterator[str]]:
    """The lines of each gpu_scheduler's log, to be read before the next one's."""
    with tarfile.open(archive) as members:
        for member in members:
            if "gpu_scheduler" in member.name and (file := members.extractfile(member)) is not None:
                yield (line.decode(errors="replace") for line in file)


def events(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """What is ours of them: not all that a process writes is."""
    for line in lines:
        try:
            yield json.loads(line)
        except ValueError:
            continue


def at(event: dict[str, Any]) -> float:
    """When, by the clock. Seconds since the epoch."""
    return datetime.fromisoformat(event["timestamp"]).timestamp()


QUARTILES = ("p25_s", "p50_s", "p75_s")


def quartiles(seconds: Sequence[float]) -> dict[str, float]:
    """With their number, as "steps". Of two at least."""
    return dict(zip(QUARTILES, quantiles(seconds, n=4), strict=True)) | {"steps": len(seconds)}


def shown(found: dict[str, float]) -> list[str]:
    """The same, in milliseconds."""
    return [f"{found['steps']:.0f}", *(f"{1e3 * found[key]:.1f}" for key in QUARTILES)]
