"""What engines that decode on one GPU at the same time make of it together: for the cost model (`sim/fit.py`).

    python -m benchmarks.decode_sharing RESULT.json ... --out benchmarks/results/decode_sharing.json

Reads results of `benchmarks.gpu.compare` that still have their timelines, of systems whose engines know nothing of each
other (static partition, MuxServe++): under Prism decodes stand still for one another. A window between two rows counts
where two engines or more of a group decoded, nobody prefilled, and each had about as many requests at its end as at its
beginning. An engine's share is what its devices take for a step, by the cost model, over what a step took; the sum of
the shares is what engines made of the GPU together. Prints medians by who was beside whom.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby, pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.decode_steps import LEAST_S, LIKE, more
from benchmarks.gpu import report
from sim.catalogue import SHAPES
from sim.cost import Cost, Hardware


@dataclass(frozen=True)
class Engine:
    """In a window."""

    shape: str
    requests: float
    """Mean of both ends."""
    kv_bytes: float
    step_s: float


@dataclass(frozen=True)
class Window:
    run: str
    engines: tuple[Engine, ...]


def windows(run: str, timeline: Sequence[Mapping[str, Any]], shapes: Mapping[str, str]) -> Iterator[Window]:
    rows = sorted(timeline, key=lambda row: (row["group"], row["at_s"]))
    for _, of_group in groupby(rows, key=lambda row: row["group"]):
        for before, after in pairwise(of_group):
            engines = beside(before, after, shapes)
            if len(engines) > 1:
                yield Window(run, engines)


def beside(before: Mapping[str, Any], after: Mapping[str, Any], shapes: Mapping[str, str]) -> tuple[Engine, ...]:
    """Those that decoded from the one row to the other; nobody where that does not count."""
    seconds = after["at_s"] - before["at_s"]
    names = before["models"].keys() | after["models"].keys()
    if seconds < LEAST_S or any(more(before, after, name, "prefill_tokens") for name in names):
        return ()
    engines = []
    for name in sorted(names):
        at = [row["models"].get(name, {}) for row in (before, after)]
        running = [model.get("running", 0) for model in at]
        tokens = more(before, after, name, "decode_tokens")
        if not any(running) and not tokens:
            continue
        if tokens <= 0 or not all(running) or min(running) < LIKE * max(running):
            return ()
        kv_bytes = fmean(model.get("kv_used_bytes", 0) for model in at)
        engines.append(Engine(shapes[name], fmean(running), kv_bytes, seconds * fmean(running) / tokens))
    return tuple(engines)


def device_s(engine: Engine, hardware: Hardware) -> float:
    """What the devices take for one of its steps."""
    shape = SHAPES[engine.shape]
    context = int(engine.kv_bytes / shape.kv_bytes_per_token)
    return Cost(shape, hardware).decode_devices(1, max(1, round(engine.requests)), context)


def together(engines: Sequence[Engine], hardware: Hardware) -> float:
    """The sum of their shares."""
    return sum(device_s(each, hardware) / each.step_s for each in engines)


def show(found: Sequence[Window], hardware: Hardware) -> None:
    by_shapes: dict[tuple[str, ...], list[Window]] = defaultdict(list)
    for each in found:
        by_shapes[tuple(sorted(engine.shape for engine in each.engines))].append(each)
    rows = []
    for shapes, some in sorted(by_shapes.items()):
        sums = sorted(together(each.engines, hardware) for each in some)
        quarters = [f"{sums[int(part * (len(sums) - 1))]:.2f}" for part in (0.25, 0.5, 0.75)]
        steps = [
            f"{1e3 * median(engine.step_s for each in some for engine in each.engines if engine.shape == shape):.2f}"
            for shape in dict.fromkeys(shapes)
        ]
        rows.append(("+".join(shapes), len(some), *quarters, ", ".join(steps)))
    report.table("together", ("shapes", "windows", "p25", "p50", "p75", "step p50 of each shape, ms"), rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        "benchmarks.decode_sharing", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    found: list[Window] = []
    of = {}
    for path in given.results:
        result = json.loads(path.read_text())
        if not result.get("timeline"):
            parser.error(f"{path} has no timeline")
        of[path.stem] = result["circumstances"]
        found += windows(path.stem, result["timeline"], result["system"]["shapes"])
    show(found, Hardware())
    if given.out is not None:
        given.out.write_text(json.dumps({"of": of, "windows": [asdict(each) for each in found]}))


if __name__ == "__main__":
    main()
