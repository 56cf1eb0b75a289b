"""The fewest GPUs that a fleet needs over a day, by system, in the simulator: where Prism pays, and where it does not.

    python benchmarks/fleet_sim.py --traces FOLDER                   # every second hour, 240 s of each
    python benchmarks/fleet_sim.py --traces FOLDER --quick           # every fourth, 120 s; under half an hour of a core
    python benchmarks/fleet_sim.py --traces FOLDER --every 1 --seconds 3540      # the whole day
    python benchmarks/fleet_sim.py --show [--dollars 2.5]            # the tables of what the file has, as Markdown
    python benchmarks/fleet_sim.py --figure                          # its figure, into docs/lab/figures

`_day.py` has the fleet and its day. Enough are GPUs on which 99 % of first tokens and 99 % of times per token are on
time over the day, and 95 % of the requests of each model on both. Numbers of GPUs are searched by halves; one that is
enough only by luck, so that one more is not, is passed over.

Each number is searched a second time with the simulator's bias taken off (`sim_bias.py`): it is too kind to Prism, so
that Prism has to reach more than 99 % there. Settings vary the number of models, and for a fixed fleet the requests and
the memory of a GPU: either changes how full of weights the GPUs are that a static partition needs.

A series is one system in one setting; those that the file has from the same commit are not run again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from math import ceil
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import _command_line, _day, _series, paper_sim, sim_bias
from benchmarks._day import SYSTEMS_OF_DAY, Day, Targets
from benchmarks._fleet_tables import ALL, OVERALL, DaySeries, enough, marks_to_reach, read, show
from benchmarks._fleets import HARDWARE
from benchmarks._search import fewest
from benchmarks._series import Done

SOURCES = (*paper_sim.SOURCES, "benchmarks/_day.py")
"""Files and folders whose last commit a series is valid for."""
GB = HARDWARE.capacity_bytes / 1e9
MODELS = (48, 96, 16, 32, 64)
LEAST_TTFT_S = 1.0
SETTINGS = (
    *((models, 1.0, GB, ttft_s) for models in MODELS for ttft_s in (LEAST_TTFT_S, 0.0)),
    *((48, rate, GB, LEAST_TTFT_S) for rate in (2.0, 4.0, 8.0, 16.0)),
    *((48, 4.0, memory, LEAST_TTFT_S) for memory in (141.0, 282.0)),
    *((16, rate, 141.0, LEAST_TTFT_S) for rate in (4.0, 16.0)),
)
"""Models, requests for each of the trace, GB of a GPU, and the least TTFT target in seconds."""
QUICK = (
    (48, 1.0, GB, LEAST_TTFT_S),
    (96, 1.0, GB, LEAST_TTFT_S),
    (48, 4.0, GB, LEAST_TTFT_S),
    (48, 1.0, GB, 0.0),
    (16, 4.0, 141.0, LEAST_TTFT_S),
    (48, 4.0, 282.0, LEAST_TTFT_S),
    (48, 4.0, 141.0, LEAST_TTFT_S),
    (48, 8.0, GB, LEAST_TTFT_S),
    (48, 16.0, GB, LEAST_TTFT_S),
    (16, 16.0, 141.0, LEAST_TTFT_S),
)
SPREAD, SLACK = 2.0, 4
"""No more GPUs are tried than so many times those that would hold the weights, and so many more; with more traffic, as
many times more."""
FIRST = {"prism": 0.7, "static": 1.3, "muxserve": 1.3}
"""The first number of GPUs that is tried, over the number that would hold the weights and nothing else."""


def series(settings: Iterable[tuple[int, float, float, float]], every: int, seconds: float) -> Iterator[DaySeries]:
    for models, rate, memory, ttft_s in settings:
        for name in SYSTEMS_OF_DAY:
            yield DaySeries(models, rate, memory, ttft_s, every, seconds, name)


@cache
def _load(traces: Path, models: int, every: int, seconds: float, ttft_s: float) -> tuple[Day, Targets]:
    given = _day.day(traces, models, every, seconds)
    return given, _day.targets(given, ttft_s)


def searched(one: DaySeries, traces: Path, bias: Mapping[str, sim_bias.Row]) -> dict[str, Any]:
    """Points by number of GPUs, as `_day.run` returns them."""
    given, slos = _load(traces, one.models, one.every, one.seconds, one.ttft_s)
    contender = SYSTEMS_OF_DAY[one.system]
    plain, corrected = marks_to_reach(one.system, {}), marks_to_reach(one.system, bias)
    lower = (min(plain[0], corrected[0]), min(plain[1], corrected[1]), min(plain[2], corrected[2]))
    tried: dict[int, dict[str, Any]] = {}

    def point(gpus: int) -> dict[str, Any]:
        if gpus not in tried:
            tried[gpus] = _day.run(given, slos, contender, gpus, one.memory, one.rate, lower)
        return tried[gpus]

    least = given.weights_bytes / one.memory / 1e9
    begin, most = ceil(FIRST[contender.system] * least), ceil(SPREAD * max(1.0, one.rate / 4) * least) + SLACK
    for count in (OVERALL, ALL):
        for marks in (plain[:count], corrected[:count]):
            found = fewest(partial(_holds, point, marks), begin, most)
            begin = found or most
    weights = round(given.weights_bytes / 1e9, 1)
    return {"weights_gb": weights, "points": {str(gpus): of for gpus, of in sorted(tried.items())}}


def _holds(point: Callable[[int], dict[str, Any]], marks: Sequence[float], gpus: int) -> bool:
    return enough(point(gpus), marks)


def measure(out: Path, traces: Path, wanted: Iterable[DaySeries], workers: int) -> Done:
    """Runs what `out` lacks, in the order that is wanted, and writes it after each series."""
    done, now = read(out), _series.commit(SOURCES)
    todo = [one for one in wanted if done.get(one.key, {}).get("commit") != now]
    search = partial(searched, traces=traces, bias=sim_bias.kept())

    def load(one: DaySeries) -> None:
        _load(traces, one.models, one.every, one.seconds, one.ttft_s)

    return _series.measure(out, "fleet_sim", _day.SEED, done, todo, now, search, load, workers)


def main() -> None:
    traces, quick = f"the folder with {_day.FILE}", "every fourth hour, 120 s of each, ten settings"
    parser = _command_line.arguments("fleet_sim", __doc__ or "", traces, quick)
    parser.add_argument("--every", type=int, default=2, help="one hour of so many (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=240.0, help="of each hour that count (default: %(default)g)")
    parser.add_argument("--models", type=int, default=0, help="only settings with so many models")
    given = parser.parse_args()

    def lacking() -> Done:
        every, seconds = (4, 120.0) if given.quick else (given.every, given.seconds)
        settings = [one for one in (QUICK if given.quick else SETTINGS) if given.models in (0, one[0])]
        return measure(given.out, given.traces, series(settings, every, seconds), given.workers)

    _command_line.carry_out(parser, given, read, lacking, lambda done: show(done, sim_bias.kept(), given.dollars))


if __name__ == "__main__":
    main()
