"""What the first prefill step of a prompt takes beside engines that decode, in a running system: for the cost model.

    python -m benchmarks.first_steps RESULT.json:LOGS.txz ... --out benchmarks/results/first_steps_compare.json

Reads results of `benchmarks.gpu.compare` and the logs that `--engine-log-level info` kept of the same start (those of
its first run have them all). Of small prompts that come to an engine which has nothing to do the time counts from their
arrival until their first step is through: by what other engines of that GPU decode then ("alone", up to 16 requests,
which is what stands still for one prompt by `engines/sharing/prefill_priority.py`, and more). Models are named by their
shapes: 1b-2.

A log says when by the clock and a result since the replay began. The beginning is where most first tokens come just
when a prefill step of their model ends.
"""

from __future__ import annotations

import argparse
import json
import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import _engine_logs
from benchmarks.gpu import report

STANDS_STILL = 16
"""Requests that decode for whom one prompt goes first: the default of `prefill_priority_batch`."""
SMALL_TOKENS = 512
_LEAST = 4
"""Steps of a kind that are worth a line."""
_SOON_S, _BEFORE_S = 0.2, 0.35
"""Steps of neighbours until so long after an arrival, and before it, are said to be beside it: an engine tells of every
fortieth."""
_IDLE_S = 0.5
_PREFILL = re.compile(r"Prefill batch, #new-seq: \d+, #new-token: (\d+)")
_DECODE = re.compile(r"Decode batch, #running-req: (\d+)")
Step = tuple[float, int]
"""(when its end was said, by the clock; tokens of a prefill step or requests of a decode step)."""


@dataclass
class Log:
    """What one group's engines said."""

    prefills: dict[str, list[Step]] = field(default_factory=lambda: defaultdict(list))
    decodes: dict[str, list[Step]] = field(default_factory=lambda: defaultdict(list))

    def next_prefill(self, model: str, at: float) -> Step | None:
        own = self.prefills.get(model, [])
        here = bisect_left(own, (at, 0))
        return own[here] if here < len(own) else None

    def busy(self, model: str, at: float) -> bool:
        """Whether it made steps shortly before."""
        own = (*self.prefills.get(model, ()), *self.decodes.get(model, ()))
        return any(at - _IDLE_S < said_at <= at for said_at, _ in own)

    def beside(self, model: str, at: float) -> int:
        """The most requests that one other model decodes for about then."""
        others = (steps for name, steps in self.decodes.items() if name != model)
        soon = (n for steps in others for said_at, n in steps if at - _BEFORE_S < said_at < at + _SOON_S)
        return max(soon, default=0)


@dataclass(frozen=True)
class First:
    """Of prompts that came at one moment."""

    shape: str
    beside: int
    """Requests that one neighbour decodes for, at most."""
    seconds: float


def read(lines: Iterable[str]) -> Log:
    log = Log()
    for said in _engine_logs.events(lines):
        for pattern, steps in ((_PREFILL, log.prefills), (_DECODE, log.decodes)):
            if "model" in said and (found := pattern.match(said.get("event", ""))):
                steps[said["model"]].append((_engine_logs.at(said), int(found[1])))
    return log


def arrivals(result: Mapping[str, Any]) -> dict[tuple[float, str], float]:
    """(when it came, model) -> when the first token of what came at that moment was there; since the beginning."""
    (system,) = result["systems"]
    firsts: dict[tuple[float, str], float] = {}
    for at, model, _, _, ttft_s, *_ in system["samples"]["rows"]:
        if ttft_s is not None:
            firsts[at, model] = min(firsts.get((at, model), at + ttft_s), at + ttft_s)
    return firsts


def beginning(firsts: Mapping[tuple[float, str], float], ends: Mapping[str, Sequence[float]], around: float) -> float:
    """When time 0 was, by the clock: at most 60 s from `around`."""

    def met(begun: float, within_s: float) -> int:
        def one(model: str, at: float) -> bool:
            own = ends.get(model, ())
            next_one = bisect_left(own, begun + at - within_s)
            return next_one < len(own) and own[next_one] <= begun + at + within_s

        return sum(one(model, at) for (_, model), at in firsts.items())

    for within_s, step_s, to_s in ((0.02, 0.03, 60.0), (0.003, 0.002, 0.06)):
        tries = [around + number * step_s for number in range(-round(to_s / step_s), round(to_s / step_s) + 1)]
        scores = [met(at, within_s) for at in tries]
        most = max(scores)
        # The middle of those that are as good.
        around = median(at for at, score in zip(tries, scores, strict=True) if score == most)
    return around


def firsts_of(result: Mapping[str, Any], logs: Iterable[Log]) -> Iterator[First]:
    logs = list(logs)
    firsts = arrivals(result)
    models = {model for log in logs for model in log.prefills}
    ends = {model: sorted(at for log in logs for at, _ in log.prefills.get(model, ())) for model in models}
    # A result is written when the last request has ended, soon after its last second.
    written = datetime.fromisoformat(result["circumstances"]["date"]).timestamp()
    begun = beginning(firsts, ends, written - result["seconds"])
    for at, model in firsts:
        # Where the model is then: it may move.
        found = [(step, log) for log in logs if (step := log.next_prefill(model, begun + at)) is not None]
        if not found:
            continue
        (end, tokens), log = min(found, key=itemgetter(0))
        if tokens <= SMALL_TOKENS and not log.busy(model, begun + at):
            yield First(model.partition("-")[0], log.beside(model, begun + at), end - begun - at)


def kind(beside: int) -> str:
    return "alone" if beside == 0 else "few" if beside <= STANDS_STILL else "many"


def main() -> None:
    parser = argparse.ArgumentParser(
        "benchmarks.first_steps", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", metavar="RESULT.json:LOGS.txz", type=lambda text: text.split(":"))
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    took: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for result, logs in given.runs:
        for first in firsts_of(json.loads(Path(result).read_text()), map(read, _engine_logs.of_groups(Path(logs)))):
            took[first.shape][kind(first.beside)].append(first.seconds)
    found = {
        shape: {name: _engine_logs.quartiles(of) for name, of in sorted(kinds.items()) if len(of) >= _LEAST}
        for shape, kinds in sorted(took.items())
    }
    rows = [(shape, name, *_engine_logs.shown(of)) for shape, kinds in found.items() for name, of in kinds.items()]
    title = "from arrival to the end of the first prefill step of an idle engine, ms"
    report.table(title, ("shape", "beside", "steps", "p25", "p50", "p75"), rows)
    if given.out is not None:
        runs = [Path(result).stem for result, _ in given.runs]
        given.out.write_text(json.dumps({"runs": runs, "shapes": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
