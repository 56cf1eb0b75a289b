"""What whole prefill steps took in a running system: for the cost model (`sim/fit.py`).

    python -m benchmarks.prefill_steps RUN.logs.txz ... --out benchmarks/results/prefill_steps_compare.json

Reads logs that `benchmarks.gpu.compare --engine-log-level info` kept of runs under ServerlessLLM's rule: one model at a
time has a GPU, and the log says which. A step counts where all of it was waiting when the one before began, so that the
time between the two is what it took; one that was interrupted by decode steps or changes of the model does not. Models
are named by their shapes: 1b-2.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks import _engine_logs
from benchmarks.gpu import report

CHUNK_TOKENS = 2048
_NEARLY = 0.98
"""Of a chunk's tokens: pages are not split."""
_MOST_S = 0.2
"""Between two steps that follow one another."""
_PREFILL = re.compile(r"Prefill batch, #new-seq: \d+, #new-token: (\d+),.* #pending-token: (\d+)")


@dataclass(frozen=True)
class Step:
    shape: str
    seconds: float


def steps(lines: Iterable[str]) -> Iterator[Step]:
    """Of one group's log."""
    model = ""
    last: tuple[float, int] | None = None
    for said in _engine_logs.events(lines):
        event = said.get("event", "")
        if event == "model active":
            model, last = said["model"], None
        elif event == "residency" or "Decode batch" in event:
            last = None
        elif model and (found := _PREFILL.match(event)):
            at = _engine_logs.at(said)
            tokens, pending = (int(number) for number in found.groups())
            if last is not None and last[1] >= tokens >= _NEARLY * CHUNK_TOKENS and at - last[0] < _MOST_S:
                yield Step(model.partition("-")[0], at - last[0])
            last = at, pending


def main() -> None:
    parser = argparse.ArgumentParser(
        "benchmarks.prefill_steps", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("logs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    by_shape: dict[str, list[float]] = defaultdict(list)
    for path in given.logs:
        for lines in _engine_logs.of_groups(path):
            for step in steps(lines):
                by_shape[step.shape].append(step.seconds)
    if not by_shape:
        parser.error("no whole prefill step in these logs: they are of engines that say nothing of steps")
    found = {shape: _engine_logs.quartiles(took) for shape, took in sorted(by_shape.items())}
    rows = [(shape, *_engine_logs.shown(of)) for shape, of in found.items()]
    report.table(f"prefill steps of {CHUNK_TOKENS} tokens, ms", ("shape", "steps", "p25", "p50", "p75"), rows)
    if given.out is not None:
        runs = [path.name.partition(".")[0] for path in given.logs]
        given.out.write_text(json.dumps({"runs": runs, "chunk_tokens": CHUNK_TOKENS, "shapes": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
