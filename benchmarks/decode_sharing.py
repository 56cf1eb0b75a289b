"""What engines that decode on one GPU at the same time make of it together: for the cost model (`sim/fit.py`).

    python -m benchmarks.decode_sharing RESULT.json ... --out benchmarks/results/decode_sharing_compare.json

Reads results of `benchmarks.gpu.compare` that still have their timelines, of systems whose engines know nothing of each
other (static partition, MuxServe++): under Prism decodes stand still for one another. A window between two rows counts
where two engines or more of a group decoded, nobody prefilled, and each had about as many requests at its end as at its
beginning. An engine's share is what its devices take for a step, by the cost model, over what a step took; the sum of
the shares is what engines made of the GPU together. Prints medians by who was beside whom.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median

from benchmarks.decode_steps import LEAST_S, LIKE, Row, command, more, pairs
from benchmarks.gpu import report
from sim.engines.cost import H200
from sim.fit import together


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


def windows(run: str, timeline: Sequence[Row], shapes: Mapping[str, str]) -> Iterator[Window]:
    for before, after in pairs(timeline):
        engines = beside(before, after, shapes)
        if len(engines) > 1:
            yield Window(run, engines)


def beside(before: Row, after: Row, shapes: Mapping[str, str]) -> tuple[Engine, ...]:
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


def show(found: Sequence[Window]) -> None:
    by_shapes: dict[tuple[str, ...], list[Window]] = defaultdict(list)
    for each in found:
        by_shapes[tuple(sorted(engine.shape for engine in each.engines))].append(each)
    rows = []
    for shapes, some in sorted(by_shapes.items()):
        sums = sorted(together(asdict(each)["engines"], H200) for each in some)
        quarters = [f"{sums[int(part * (len(sums) - 1))]:.2f}" for part in (0.25, 0.5, 0.75)]
        steps = [
            f"{1e3 * median(engine.step_s for each in some for engine in each.engines if engine.shape == shape):.2f}"
            for shape in dict.fromkeys(shapes)
        ]
        rows.append(("+".join(shapes), len(some), *quarters, ", ".join(steps)))
    report.table("together", ("shapes", "windows", "p25", "p50", "p75", "step p50 of each shape, ms"), rows)


if __name__ == "__main__":
    command("benchmarks.decode_sharing", __doc__, windows, show)
