"""A day of a fleet: many models on few GPUs, the same minutes of every hour of servegen48.

An hour is its first RUN_IN_S seconds, which are replayed and not counted, and so many seconds after them, which are.
Each hour is a replay of its own, after every model was asked once; a plan ahead is made anew for each hour, at no cost,
from the tokens of the whole hour before it, or of the counted seconds themselves. What comes before the first hour is
the last of the day.

The trace has 48 models. Of fewer every n-th by its requests is taken; of more the same are taken a second time, as
tenants of their own that live SHIFT_HOURS later. Which model has which shape is drawn by a fixed seed, from the shapes
of `_fleets.py` that take one GPU, in the same proportions for every number of models. GPUs are those of `_fleets.py`,
H200s with 84 GB for models, unless the memory is another. Targets are the P95 of TTFT and TPOT of each model on GPUs of
its own at rate 1, times SCALE, and TTFT no less than is asked for: a small model alone has its first token in 20 ms,
and ten times that is less than many an operator would ask for, and less than a model takes to come up from host memory.
A partition that has no place for a model is refused, though nobody asks for it in the minutes that are replayed.
"""

from __future__ import annotations

import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import inf, isnan
from pathlib import Path
from typing import Any

from benchmarks._fleets import FLEETS, HARDWARE
from benchmarks._paper import CONTENDERS, PaperSystem
from sim import report
from sim.engines.cost import Shape
from sim.inputs import trace
from sim.inputs.catalogue import ModelSet, Spec
from sim.inputs.request import SimulatedRequest
from sim.inputs.trace import Workload
from sim.policies import SYSTEMS
from sim.replay import Replay
from sim.system import FleetError, System, World

FILE = "servegen48.csv.gz"
HOURS = 24
HOUR_S = 3600.0
SHIFT_HOURS = 6
RUN_IN_S = 60.0
SCALE = 10.0
SEED = 1
WARM_GAP_S = 4.0
WARM_TOKENS = (64, 16)
CONTEXT_TOKENS = 16_384
PATIENCE_S = 600.0
LEAST_REQUESTS = 20
"""A model with fewer requests over the day at rate 1 is not taken for the worst one: copies of one moment are late
together, so that they are no requests more."""
SHAPES_OF_ONE = tuple(shape for shape in FLEETS["fifty-eight"].shapes if shape.devices == 1)
SYSTEMS_OF_DAY = {
    "Prism": CONTENDERS["Prism"],
    "static, hour before": CONTENDERS["S-Partition, before"],
    "static that knows": CONTENDERS["S-Partition, slice"],
    "MuxServe++ FIFO, hour before": CONTENDERS["MuxServe++ FIFO, before"],
}
Marks = tuple[float, float, float]
"""Percent of first tokens on time, of times per token, and of both for the worst model."""


@dataclass(frozen=True, slots=True)
class DayRow:
    """A request; seconds count from the beginning of its hour's run-in."""

    arrival: float
    model: str
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class Day:
    """Models with their requests of each hour, run-in included, and the tokens per second of each model over the whole
    of the hour before. `counted_s`: seconds of each hour that count."""

    shapes: Mapping[str, Shape]
    rows: Mapping[int, Sequence[DayRow]]
    before: Mapping[int, Mapping[str, float]]
    counted_s: float

    @property
    def weights_bytes(self) -> int:
        return sum(shape.weights_bytes for shape in self.shapes.values())


@dataclass(frozen=True)
class _File:
    """The first seconds of each hour by hour and model, and tokens of the whole hour by hour and model."""

    rows: Mapping[tuple[int, str], Sequence[DayRow]]
    tokens: Mapping[tuple[int, str], int]
    ranked: Sequence[str]
    """Names, the one with the most requests first."""


@cache
def _read(path: Path, seconds: float) -> _File:
    rows, tokens, asked = defaultdict[tuple[int, str], list[DayRow]](list), Counter[tuple[int, str]](), Counter[str]()
    for _, arrival, name, prompt, output in trace.rows(path):
        hour, at = int(arrival // HOUR_S), arrival % HOUR_S
        prompt = min(prompt, CONTEXT_TOKENS - 1)
        output = min(output, CONTEXT_TOKENS - prompt)
        asked[name] += 1
        if hour < HOURS:
            tokens[hour, name] += prompt + output
            if at < seconds:
                rows[hour, name].append(DayRow(at, name, prompt, output))
    return _File(rows, tokens, sorted(asked, key=lambda name: (-asked[name], name)))


def day(traces: Path, models: int, every: int, counted_s: float) -> Day:
    """Every so many hours, so many seconds of each. Raises TraceError, OSError."""
    found = _read(traces / FILE, RUN_IN_S + counted_s)
    tenants = list(_tenants(found.ranked, models))
    names = [f"{name}{'+' * later}" for name, later in tenants]
    random.Random(SEED).shuffle(names)
    shapes = {name: SHAPES_OF_ONE[i * len(SHAPES_OF_ONE) // models] for i, name in enumerate(names)}
    rows, before = dict[int, list[DayRow]](), dict[int, dict[str, float]]()
    for hour in range(0, HOURS, every):
        rows[hour], before[hour] = [], {}
        for name, later in tenants:
            own, at = f"{name}{'+' * later}", (hour - later * SHIFT_HOURS) % HOURS
            rows[hour] += [replace(row, model=own) for row in found.rows.get((at, name), ())]
            earlier = found.tokens.get(((at - 1) % HOURS, name), 0)
            before[hour][own] = (earlier + sum(WARM_TOKENS)) / HOUR_S
        rows[hour].sort(key=lambda row: row.arrival)
    return Day(shapes, rows, before, counted_s)


def _tenants(ranked: Sequence[str], models: int) -> Iterator[tuple[str, int]]:
    """Names of the trace, with 1 for those that live later."""
    first = min(models, len(ranked))
    for later, count in ((0, first), (1, models - first)):
        yield from ((ranked[i * len(ranked) // count], later) for i in range(count))


# --- one point


Targets = Mapping[str, tuple[float, float]]


class _HopelessError(Exception):
    """So many requests are late that the day need not end."""


def targets(given: Day, least_ttft_s: float = 0.0) -> Targets:
    """Targets (TTFT, TPOT) in seconds by name of the model; +inf for a model that is not asked."""
    found = dict[str, tuple[float, float]]()
    for name, shape in given.shapes.items():
        mine = list[SimulatedRequest]()
        for i, hour in enumerate(given.rows.values()):
            began_s = i * (RUN_IN_S + given.counted_s + 60.0)
            for row in hour:
                if row.model == name:
                    at = began_s + row.arrival
                    mine.append(SimulatedRequest(str(len(mine)), name, at, row.prompt_tokens, row.output_tokens))
        if mine:
            _replay(mine, [Spec(name, shape, context_tokens=CONTEXT_TOKENS)], 1, SYSTEMS["static"], {})
        ttfts = sorted(request.ttft for request in mine)
        tpots = sorted(request.tpot for request in mine if not isnan(request.tpot))
        ttft_s, tpot_s = report.quantile(ttfts, 0.95), report.quantile(tpots, 0.95)
        found[name] = (max(least_ttft_s, SCALE * (ttft_s or inf)), SCALE * (tpot_s or inf))
    return found


def run(
    given: Day, slos: Targets, contender: PaperSystem, gpus: int, memory: float, rate: float, marks: Marks | None = None
) -> dict[str, Any]:
    """Percent of requests on time over the day (ttft, tpot, both; worst is both of the model with the least), tokens
    per second of requests on time, both of each hour, and the seconds of a core that it took. `memory`: GB of each GPU;
    `rate`: requests for each of the trace. `refused` with the reason where the system refuses the fleet; `given_up`
    where so many are late that a mark cannot be reached any more. The hours with the most requests are run first."""
    began_s = time.process_time()
    asked = {hour: _asked(given, slos, hour, rate) for hour in given.rows}
    begins_s = _begins_s(given)
    total = sum(request.arrival >= begins_s for hour in asked.values() for request in hour)
    spare = _Spare(*((1 - mark / 100) * total for mark in marks[:2])) if marks else _Spare(inf, inf)
    done, of_hour = list[SimulatedRequest](), dict[str, float]()
    found: dict[str, Any] = {}
    for hour in sorted(asked, key=lambda hour: (-len(asked[hour]), hour)):
        try:
            _hour(given, slos, contender, hour, asked[hour], gpus, memory, rate, spare)
        except FleetError as error:
            found = {"refused": str(error)[:100]}
            break
        except _HopelessError:
            found = {"given_up": hour}
            break
        counted = [request for request in asked[hour] if request.arrival >= begins_s]
        done += counted
        if counted:
            of_hour[str(hour)] = _percent(sum(map(_on_time, counted)), len(counted))
    if not found:
        found = {
            **_figures(done, given.counted_s * len(asked), rate),
            "hours": dict(sorted(of_hour.items(), key=_number)),
        }
    return {**found, "cpu_s": round(time.process_time() - began_s, 2)}


@dataclass(slots=True)
class _Spare:
    """How many first tokens, and how many times per token, may still be late."""

    ttft: float
    tpot: float

    def take(self, request: SimulatedRequest) -> None:
        self.ttft -= not report.ttft_met(request)
        self.tpot -= not report.tpot_met(request)
        if min(self.ttft, self.tpot) < 0:
            raise _HopelessError


def _begins_s(given: Day) -> float:
    """When requests begin to count, in seconds of an hour's replay."""
    return WARM_GAP_S * (len(given.shapes) + 3) + RUN_IN_S


def _asked(given: Day, slos: Targets, hour: int, rate: float) -> list[SimulatedRequest]:
    draw, asked = random.Random(f"{SEED} {hour}"), list[SimulatedRequest]()
    warm_s = _begins_s(given) - RUN_IN_S
    for row in given.rows[hour]:
        for _ in range(int(rate) + (draw.random() < rate % 1)):
            asked.append(
                SimulatedRequest(
                    str(len(asked)),
                    row.model,
                    warm_s + row.arrival,
                    row.prompt_tokens,
                    row.output_tokens,
                    *slos[row.model],
                )
            )
    return asked


def _hour(
    given: Day,
    slos: Targets,
    contender: PaperSystem,
    hour: int,
    asked: list[SimulatedRequest],
    gpus: int,
    memory: float,
    rate: float,
    spare: _Spare,
) -> None:
    """Replays the hour; what came of its requests stands in them. Models come up in an order drawn for the hour."""
    order = random.Random(f"{SEED} {hour}").sample(sorted(given.shapes), len(given.shapes))
    warm = [SimulatedRequest(f"w{i}", name, WARM_GAP_S * i, *WARM_TOKENS) for i, name in enumerate(order)]
    specs = [Spec(name, given.shapes[name], *slos[name], CONTEXT_TOKENS) for name in order]
    begins_s = _begins_s(given)
    rates = None
    if contender.plan == "before":
        rates = {name: rate * tokens_per_s for name, tokens_per_s in given.before[hour].items()}
    elif contender.plan:
        tokens = Counter[str](dict.fromkeys(given.shapes, 0))
        for request in asked:
            tokens[request.model] += request.prompt_tokens + request.output_tokens
        rates = {name: (count + sum(WARM_TOKENS)) / (RUN_IN_S + given.counted_s) for name, count in tokens.items()}

    def build(world: World, finished: Callable[[SimulatedRequest], None], settings: dict[str, str]) -> System:
        def counted(request: SimulatedRequest) -> None:
            finished(request)
            if request.arrival >= begins_s:
                spare.take(request)

        built = SYSTEMS[contender.system](world, counted, settings)
        if built.figures.get("models without a place"):
            raise FleetError(f"{built.figures['models without a place']} models without a place")
        return built

    _replay(warm + asked, specs, gpus, build, dict(contender.settings), memory, rates)


def _on_time(request: SimulatedRequest) -> bool:
    return report.ttft_met(request) and report.tpot_met(request)


def _figures(done: Sequence[SimulatedRequest], seconds: float, rate: float) -> dict[str, float]:
    of_model = defaultdict[str, list[bool]](list)
    for request in done:
        of_model[request.model].append(_on_time(request))
    shares = [sum(met) / len(met) for met in of_model.values() if len(met) >= rate * LEAST_REQUESTS]
    good = [request for request in done if _on_time(request)]
    return {
        "ttft": _percent(sum(map(report.ttft_met, done)), len(done)),
        "tpot": _percent(sum(map(report.tpot_met, done)), len(done)),
        "both": _percent(len(good), len(done)),
        "worst": round(100 * min(shares, default=1.0), 3),
        "tokens_per_s": round(sum(request.prompt_tokens + request.output_tokens for request in good) / seconds, 1),
    }


def _percent(count: int, of: int) -> float:
    return round(100 * count / of, 3)


def _number(item: tuple[str, float]) -> int:
    return int(item[0])


def _replay(
    requests: list[SimulatedRequest],
    specs: list[Spec],
    gpus: int,
    build: Any,
    settings: dict[str, str],
    memory: float = HARDWARE.capacity_bytes / 1e9,
    rates: Mapping[str, float] | None = None,
) -> None:
    Replay(
        Workload(requests, requests[-1].arrival + 1.0),
        ModelSet(specs),
        (1,) * gpus,
        build,
        settings,
        replace(HARDWARE, capacity_bytes=round(memory * 1e9)),
        rates=rates,
        patience_s=PATIENCE_S,
        progress=lambda line: None,
    ).run()
