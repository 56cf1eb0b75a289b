"""The set-up of the Prism paper's experiments, as its public artifact has it: models, GPUs, engines, load and rivals.

GPUs are H100s with 84 GB for models. Engines have no CUDA graphs, as the artifact's scripts start theirs, and decode
bound by their hosts, at a speed that was fitted by hand to the artifact's TPOT of models alone. Traces run at 0.4 of
their time, so that their 600 s take 240, and a rate of N makes N requests, at the same moment, of each of the trace.
Targets are the P95 of TTFT and TPOT of each model alone at rate 1, times the SLO scale.

`light` and `tight` are the artifact's two sets of eight models on two GPUs: of `trace.py`, whose weights take 38 % of
the memory, and of `swap_8_2gpus.json`, 78 %. `eighteen` has the models of the artifact's larger run, with the sizes
that its TPOT says they have. Of the paper's fifty-eight neither models nor load are public: that fleet is the one of
`_fleets.py` with its mixed load, at the speed that the traces have.
"""

from __future__ import annotations

import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import inf, isnan
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks._fleets import FLEETS, chosen, workload
from sim import report
from sim.engines.cost import H100, Shape
from sim.inputs import trace
from sim.inputs.catalogue import SHAPES, ModelSet, Spec
from sim.inputs.request import SimulatedRequest
from sim.inputs.trace import Workload
from sim.policies import SYSTEMS
from sim.replay import Replay
from sim.system import FleetError, System, World

HARDWARE = replace(
    H100,
    capacity_bytes=84_000_000_000,
    decode_host_s=0.0003,
    decode_host_layer_s=0.00033,
    prefill_graph_tokens=1,
    graph_bytes=0,
    prefill_graph_bytes=0,
    cold_base_s=0.35,
    cold_layer_s=0.0,
)
"""An H100 of 80 GB with engines without CUDA graphs."""
NEMO_12B = Shape(24_495_564_800, 163_840, layers=40)
MISTRAL_7B = Shape(14_483_464_192, 131_072, layers=32)
SQUEEZE = 0.4
CONTEXT_TOKENS = 4096
WARM_GAP_S = 20.0
WARM_TOKENS = (64, 16)
SEED = 1
DRAWS = 3
LEAST_REQUESTS = 20
"""A model with fewer requests at rate 1 is not taken for the worst one: copies of one moment are late together, so that
they are no requests more."""
_HOUR_S = 3600.0

_EIGHT_RANKS = (2, 14, 3, 10, 5, 19, 23, 24)
_SEVEN = (4, 3, 5, 1, 2, 7, 6)
"""Hyperbolic's names for models 1 to 7: the trace has no more."""
_EIGHTEEN_RANKS = (5, 10, 4, 17, 2, 10, 23, 2, 10, 14, 19, 14, 18, 14, 21, 2, 6, 19)
_EARLIER, _LATER, _APART_S = (14, 19), (2, 10), 10.0
"""Names that ask several of the eighteen models, and by how much each of these models is before or after the last."""
_EIGHTEEN_LARGE = {4: "8b", 7: "8b", 11: "8b", 15: "3b", 18: "3b", 9: "3b", 13: "3b"}
_LIGHT = tuple(SHAPES[name] for name in ("8b", "3b", "1b", "8b", "8b", "1b", "1b", "1b"))
_TIGHT = (NEMO_12B, NEMO_12B, SHAPES["8b"], NEMO_12B, MISTRAL_7B, MISTRAL_7B, SHAPES["3b"], SHAPES["3b"])


class PaperRow(NamedTuple):
    """A request at rate 1; seconds count from the beginning of the load."""

    arrival: float
    model: str
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class PaperLoad:
    """Models with the requests for them at rate 1, and the tokens per second of each model that a plan may be made of
    which does not know the load."""

    shapes: Mapping[str, Shape]
    rows: Sequence[PaperRow]
    seconds: float
    before: Mapping[str, float]
    context_tokens: int = CONTEXT_TOKENS

    def at(self, rate: float) -> list[PaperRow]:
        """So many requests for each; a part of one by a seeded draw, which has all requests of a lower rate in it that
        rounds down to the same number."""
        draw = random.Random(SEED)
        return [row for row in self.rows for _ in range(int(rate) + (draw.random() < rate % 1))]


@cache
def load(fleet: str, source: str, traces: Path) -> PaperLoad:
    """Raises TraceError, OSError."""
    if fleet == "fifty-eight":
        return _fifty_eight(traces)
    if fleet == "eighteen":
        return _eighteen(traces / "arena27.csv.gz")
    names = {
        "arena27": [f"arena-{rank:02}" for rank in _EIGHT_RANKS],
        "hyperbolic7": [f"hyperbolic-{number}" for number in _SEVEN],
    }[source]
    models = {name: f"m{number}" for number, name in enumerate(names, start=1)}
    rows = [
        PaperRow(SQUEEZE * row.arrival, models[row.model], row.prompt_tokens, row.output_tokens)
        for row in _read(traces / f"{source}.csv.gz")
        if row.model in models
    ]
    shapes = {"light": _LIGHT, "tight": _TIGHT}[fleet]
    return _whole(dict(zip(models.values(), shapes, strict=False)), rows, 240.0)


def _whole(shapes: Mapping[str, Shape], rows: Sequence[PaperRow], seconds: float) -> PaperLoad:
    """A load that takes all that the trace has, so that a plan can only be made of its first half."""
    early = [row for row in rows if row.arrival < seconds / 2]
    return PaperLoad(shapes, rows, seconds, _rates(early, shapes, seconds / 2))


def _eighteen(path: Path) -> PaperLoad:
    asked = defaultdict(list)
    for row in _read(path):
        asked[row.model].append(row)
    rows, seen = list[PaperRow](), dict[int, int]()
    for number, rank in enumerate(_EIGHTEEN_RANKS, start=1):
        turn = seen[rank] = seen.get(rank, -1) + 1
        shift_s = _APART_S * turn * ((rank in _LATER) - (rank in _EARLIER))
        rows += [
            PaperRow(max(0.0, SQUEEZE * row.arrival + shift_s), f"m{number}", row.prompt_tokens, row.output_tokens)
            for row in asked[f"arena-{rank:02}"]
        ]
    shapes = {f"m{number}": SHAPES[_EIGHTEEN_LARGE.get(number, "1b")] for number in range(1, 19)}
    return _whole(shapes, sorted(rows), 270.0)


def _fifty_eight(traces: Path) -> PaperLoad:
    """Traffic that plans "before" are made of: for models of servegen48 the hour before the slice; for those of the
    short traces the part after it, since these have nothing before."""
    fleet = FLEETS["fifty-eight"]
    given = workload(fleet, "mixed", 16, 1.0, traces, SEED)
    shapes = {name: spec.shape for name, spec in given.specs.items()}
    rows = [_row(request) for request in given.requests]
    before = dict[str, float]()
    for source in fleet.sources["mixed"]:
        path = traces / source.file
        from_s = max(0.0, source.from_s - _HOUR_S) if source.from_s else source.seconds
        part = trace.Slice(from_s, source.from_s - from_s if source.from_s else inf)
        mine = {name: shapes[name] for name in chosen(path, source.models)}
        found = trace.read(path, _any(16_384), part)
        earlier = [row for row in map(_row, found.requests) if row.model in mine]
        before |= _rates(earlier, mine, found.seconds)
    return PaperLoad(shapes, rows, given.seconds, before, 16_384)


def _row(request: SimulatedRequest) -> PaperRow:
    return PaperRow(request.arrival, request.model, request.prompt_tokens, request.output_tokens)


def _rates(rows: Sequence[PaperRow], models: Mapping[str, Shape], seconds: float) -> dict[str, float]:
    """Tokens per second of each model, with what warms it up."""
    tokens = dict.fromkeys(models, sum(WARM_TOKENS))
    for row in rows:
        tokens[row.model] += row.prompt_tokens + row.output_tokens
    return {name: count / seconds for name, count in tokens.items()}


@cache
def _read(path: Path) -> list[SimulatedRequest]:
    return trace.read(path, _any(CONTEXT_TOKENS), trace.Slice()).requests


def _any(context_tokens: int) -> ModelSet:
    return ModelSet([Spec("*", SHAPES["1b"], context_tokens=context_tokens)])


# --- systems


@dataclass(frozen=True)
class PaperSystem:
    """A system, with what it is planned from: nothing but sizes (blind), other traffic (before) or the load itself
    (slice); "": it plans nothing ahead."""

    system: str
    plan: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)


_RIVALS = {
    "S-Partition": ("static", {}),
    "MuxServe++ FIFO": ("muxserve", {"rounds": "false"}),
    "MuxServe++ rounds": ("muxserve", {}),
}
PLANS = ("blind", "before", "slice")
CONTENDERS = {
    **{
        f"{name}, {plan}": PaperSystem(system, plan, settings)
        for name, (system, settings) in _RIVALS.items()
        for plan in PLANS
    },
    "Prism, paper's rules": PaperSystem("prism", settings={"rules": "paper"}),
    "Prism": PaperSystem("prism"),
}


# --- one point


Targets = Mapping[str, tuple[float, float]]


class _HopelessError(Exception):
    """So many requests are late that a run need not end."""


def alone(given: PaperLoad) -> Targets:
    """P95 of TTFT and TPOT of each model with GPUs of its own at rate 1, seconds; +inf where no request says."""
    found = dict[str, tuple[float, float]]()
    for name, shape in given.shapes.items():
        rows = [row for row in given.rows if row.model == name]
        mine = [SimulatedRequest(str(i), name, r.arrival, r.prompt_tokens, r.output_tokens) for i, r in enumerate(rows)]
        if mine:
            specs = [Spec(name, shape, context_tokens=given.context_tokens)]
            _replay(Workload(mine, given.seconds), specs, (shape.devices,), SYSTEMS["static"], {}, None)
        ttfts = sorted(request.ttft for request in mine)
        tpots = sorted(request.tpot for request in mine if not isnan(request.tpot))
        found[name] = (report.quantile(ttfts, 0.95) or inf, report.quantile(tpots, 0.95) or inf)
    return found


def run(
    given: PaperLoad,
    targets: Targets,
    scale: float,
    contender: PaperSystem,
    rate: float,
    sizes: Sequence[int],
    starts: int,
    spare: float = inf,
) -> dict[str, Any]:
    """Percent of requests on time (ttft, tpot, both; worst is both of the model with the least), tokens per second of
    requests on time, the seconds of a core that it took, and, where it is a mean of several runs, the least ttft of
    them: of blind places DRAWS draws, of a system that plans nothing ahead `starts` orders in which its models come up.
    `refused` with the reason where the system refuses the fleet; `given_up` where a larger share of first tokens than
    `spare` was late, so that the run, or the rest of them, was left out."""
    began_s = time.process_time()
    count = DRAWS if contender.plan == "blind" else 1 if contender.plan else starts
    spare *= count
    runs = list[dict[str, Any]]()
    for number in range(count):
        settings = {**contender.settings, **({"blind": str(number)} if contender.plan == "blind" else {})}
        order = list(given.shapes)
        if number and not contender.plan:
            random.Random(number).shuffle(order)
        runs.append(_run(given, targets, scale, contender, settings, order, rate, sizes, spare))
        if "ttft" not in runs[-1]:
            break
        spare -= 1 - runs[-1]["ttft"] / 100
    cpu_s = {"cpu_s": round(time.process_time() - began_s, 2)}
    if "ttft" not in runs[-1]:
        return {**runs[-1], **cpu_s}
    mean = {name: round(sum(each[name] for each in runs) / count, 3) for name in runs[0]}
    least = {"least": round(min(each["ttft"] for each in runs), 3)} if count > 1 else {}
    return {**mean, **least, **cpu_s}


def _run(
    given: PaperLoad,
    targets: Targets,
    scale: float,
    contender: PaperSystem,
    settings: dict[str, str],
    order: Sequence[str],
    rate: float,
    sizes: Sequence[int],
    spare: float,
) -> dict[str, Any]:
    """One run, after every model was asked once, in this order."""
    specs = {
        name: Spec(name, given.shapes[name], scale * ttft_s, scale * tpot_s, given.context_tokens)
        for name, (ttft_s, tpot_s) in ((name, targets[name]) for name in order)
    }
    warm = [SimulatedRequest(f"w{i}", name, WARM_GAP_S * i, *WARM_TOKENS) for i, name in enumerate(order)]
    begins_s = WARM_GAP_S * (len(order) + 3)
    asked = [
        SimulatedRequest(
            str(i),
            row.model,
            begins_s + row.arrival,
            row.prompt_tokens,
            row.output_tokens,
            specs[row.model].ttft_s,
            specs[row.model].tpot_s,
        )
        for i, row in enumerate(given.at(rate))
    ]
    late, may_be_late = 0, spare * len(asked)

    def build(world: World, finished: Callable[[SimulatedRequest], None], settings: dict[str, str]) -> System:
        def counted(request: SimulatedRequest) -> None:
            nonlocal late
            finished(request)
            late += request.arrival >= begins_s and not report.ttft_met(request)
            if late > may_be_late:
                raise _HopelessError

        return SYSTEMS[contender.system](world, counted, settings)

    try:
        _replay(
            Workload(warm + asked, begins_s + given.seconds),
            list(specs.values()),
            sizes,
            build,
            settings,
            given.before if contender.plan == "before" else None,
        )
    except FleetError as error:
        return {"refused": str(error)[:100]}
    except _HopelessError:
        return {"given_up": True}
    return _figures(asked, given)


def _figures(asked: Sequence[SimulatedRequest], given: PaperLoad) -> dict[str, float]:
    of_model = defaultdict[str, list[bool]](list)
    ttft = tpot = both = tokens = 0
    for request in asked:
        first, rest = report.ttft_met(request), report.tpot_met(request)
        ttft, tpot, both = ttft + first, tpot + rest, both + (first and rest)
        tokens += (first and rest) * (request.prompt_tokens + request.output_tokens)
        of_model[request.model].append(first and rest)
    often = Counter(row.model for row in given.rows)
    shares = [sum(met) / len(met) for model, met in of_model.items() if often[model] >= LEAST_REQUESTS]
    percents = {"ttft": ttft, "tpot": tpot, "both": both, "worst": min(shares, default=1.0) * len(asked)}
    return {
        **{name: round(100 * count / len(asked), 3) for name, count in percents.items()},
        "tokens_per_s": round(tokens / given.seconds, 1),
    }


def _replay(
    given: Workload,
    specs: list[Spec],
    sizes: Sequence[int],
    build: Any,
    settings: dict[str, str],
    rates: Mapping[str, float] | None,
) -> None:
    Replay(
        given,
        ModelSet(specs),
        sizes,
        build,
        settings,
        HARDWARE,
        rates=rates,
        patience_s=1200.0,
        progress=lambda line: None,
    ).run()
