"""What decode steps took in a running system, by how many requests were in them: for the cost model (`sim/fit.py`).

    python -m benchmarks.decode_steps RESULT.json ... --out benchmarks/results/decode_steps.json

Reads results of `benchmarks.gpu.compare` that still have their timelines: what every engine says of itself, twice a
second. A window between two such rows counts where one engine of a group decoded, nobody prefilled, and about as many
requests ran at its end as at its beginning: then a step took the window's time, divided by the tokens that each of its
requests got. KV is the mean of what was in use at both ends. Prints medians by shape and number of requests.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby, pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.gpu import report

LEAST_S = 0.2
"""Of a window: what an engine says is some steps old."""
LIKE = 2 / 3
"""Of the requests at one end of a window, how many there are at least at the other."""
_BIN = 16
Row = Mapping[str, Any]
"""Of a timeline."""


@dataclass(frozen=True)
class Window:
    run: str
    shape: str
    requests: float
    """Mean of both ends."""
    kv_bytes: float
    step_s: float


def pairs(timeline: Sequence[Row]) -> Iterator[tuple[Row, Row]]:
    """Rows of one group that follow one another."""
    rows = sorted(timeline, key=lambda row: (row["group"], row["at_s"]))
    for _, of_group in groupby(rows, key=lambda row: row["group"]):
        yield from pairwise(of_group)


def windows(run: str, timeline: Sequence[Row], shapes: Mapping[str, str]) -> Iterator[Window]:
    for before, after in pairs(timeline):
        found = window(run, before, after, shapes)
        if found is not None:
            yield found


def window(run: str, before: Mapping[str, Any], after: Mapping[str, Any], shapes: Mapping[str, str]) -> Window | None:
    """None where it does not count."""
    seconds = after["at_s"] - before["at_s"]
    busy = {name for row in (before, after) for name, model in row["models"].items() if model.get("running", 0)}
    names = before["models"].keys() | after["models"].keys()
    if seconds < LEAST_S or len(busy) != 1 or any(more(before, after, name, "prefill_tokens") for name in names):
        return None
    (name,) = busy
    at = [row["models"].get(name, {}) for row in (before, after)]
    running = [model.get("running", 0) for model in at]
    tokens = more(before, after, name, "decode_tokens")
    others = any(more(before, after, other, "decode_tokens") for other in names if other != name)
    if others or tokens <= 0 or min(running) < LIKE * max(running):
        return None
    kv_bytes = fmean(model.get("kv_used_bytes", 0) for model in at)
    return Window(run, shapes[name], fmean(running), kv_bytes, seconds * fmean(running) / tokens)


def more(before: Mapping[str, Any], after: Mapping[str, Any], name: str, what: str) -> int:
    first, second = (row["models"].get(name, {}).get(what, 0) for row in (before, after))
    return int(second - first)


def show(found: Sequence[Window]) -> None:
    bins: dict[tuple[str, int], list[Window]] = defaultdict(list)
    for each in found:
        bins[each.shape, int(each.requests) // _BIN].append(each)
    rows = [
        (
            shape,
            f"{fmean(each.requests for each in some):.0f}",
            len(some),
            f"{1e3 * median(each.step_s for each in some):.2f}",
            f"{fmean(each.kv_bytes for each in some) / 1e9:.2f}",
        )
        for (shape, _), some in sorted(bins.items())
    ]
    report.table("decode steps", ("shape", "requests", "windows", "step p50, ms", "KV, GB"), rows)


def command(
    name: str,
    text: str | None,
    windows: Callable[[str, Sequence[Row], Mapping[str, str]], Iterator[Any]],
    show: Callable[[list[Any]], None],
) -> None:
    """Looks for `windows` in the results that are named on the command line, shows them and writes them down."""
    parser = argparse.ArgumentParser(name, description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    found: list[Any] = []
    of = {}
    for path in given.results:
        result = json.loads(path.read_text())
        if not result.get("timeline"):
            parser.error(f"{path} has no timeline")
        of[path.stem] = result["circumstances"]
        found += windows(path.stem, result["timeline"], result["system"]["shapes"])
    show(found)
    if given.out is not None:
        given.out.write_text(json.dumps({"of": of, "windows": [asdict(each) for each in found]}))


if __name__ == "__main__":
    command("benchmarks.decode_steps", __doc__, windows, show)
