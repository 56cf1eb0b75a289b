"""Prism beside the systems that it is compared with, on two GPUs: eight models, traces over HTTP.

    python -m benchmarks.gpu.compare cut --traces TRACES --to FOLDER        # the slices, from the whole traces; no GPU
    python -m benchmarks.gpu.compare calibrate --traces FOLDER --out DIR [SYSTEM:SLICE:RATE ...]
                                                            # DIR/alone-1.json; goes on where it ended
    python -m benchmarks.gpu.compare targets --out DIR      # DIR/slos.json, of all DIR/alone-*.json
    python -m benchmarks.gpu.compare run --traces FOLDER --out DIR [SYSTEM:SLICE:RATE ...]
    python -m benchmarks.gpu.compare show --out DIR

    --devices cuda:2,cuda:3     two of these may run at once on four GPUs, with cores of their own (`taskset`)
    --part 1/2                  every second system, for one of two that run at once with the same DIR; of `calibrate`
                                the whole, with prompts of its own, as DIR/alone-1.json
    --limit-s 560               nothing is begun that would not be done by then
    --seconds 120               of each slice, from its beginning: to look at something, in a DIR of its own
    --models 8b-1,3b-1          these alone, with their requests and targets: what one GPU can show
    --engine-log-level info     to see what engines did, in NAME.logs.txz beside the results (of a start's first run)
    --rehearse echo|sglang      on the CPU, small and short; the figures mean nothing

A run that has its result in DIR is skipped, so the same command goes on where it ended. Parts of a run's name may be
patterns ("prism:*:8"); without any all are done. What is set alike for several slices (where no plan is in it) is
started once for all of them. Each is replayed at each rate, the lowest first, with empty queues in between and prompts
of its own, the same for every system. Models are measured alone for the slices of those runs that have no targets yet.
A run that failed leaves nothing, one whose client did not keep the schedule NAME.invalid.json; they are named at the
end (exit status 1), and done again the next time.

What is compared was written down before any run: SLICES with their rates, MODELS, and how names of a trace are dealt to
them: sorted, round and round. Where a trace has more names than there are models, one model has the requests of
several, and is less often idle than each of them. Targets are the P95 of each model alone, with lengths and gaps of the
slice (gaps above a second cut to one), times TTFT_SCALE and TPOT_SCALE, which are those of the paper's large fleet. It
is best measured twice, on other devices at once, of which the smaller P95 counts: a host that stood still for a moment
once made a target of 94 ms one of 2.4 s.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import groupby
from math import inf
from pathlib import Path
from typing import Any

import services.ipc.forking  # noqa: F401  (before grpc: services are started)
from benchmarks import systems
from benchmarks.gpu import compared, report
from benchmarks.gpu.slices import (
    ALONE,
    ALONE_GAP_S,
    CAPACITY_BYTES,
    MODELS,
    SLICES,
    TPOT_SCALE,
    TTFT_SCALE,
    Cut,
    cut,
    load,
    only,
)
from benchmarks.gpu.stack import Site, keep_logs, stack
from benchmarks.systems import SYSTEMS, Model
from placement.policy.assignment.partition import Part
from services.runtime import process_limits
from services.telemetry import log
from sim.inputs.catalogue import SHAPES
from sim.inputs.request import SimulatedRequest
from sim.report import quantile
from testing.systems.local import World

_ALONE_CAPACITY = 1.5
"""Times the capacity, for them."""
_START_S, _END_S = 110.0, 45.0
"""What a start with all models takes at most, and what follows the last arrival of a slice."""
_SHORT_S, _SHORT_RATE, _FEW = 6.0, 1 / 4, 3
"""A rehearsal's slices, its part of the rates, and how many models it has with real engines."""


@dataclass(frozen=True)
class Run:
    system: str
    slice: str
    rate: float

    @property
    def name(self) -> str:
        return f"{self.system}-{self.slice}-{self.rate:g}"


def _every() -> list[Run]:
    return [Run(system, at, rate) for system in SYSTEMS for at, one in SLICES.items() for rate in sorted(one.rates)]


def runs(names: Sequence[str] = (), part: tuple[int, int] = (1, 1)) -> list[Run]:
    """Those that are named, or all. Raises ValueError for a name that matches none."""
    every = _every()
    for name in names:
        if not any(fnmatchcase(f"{run.system}:{run.slice}:{run.rate:g}", name) for run in every):
            raise ValueError(f"{name!r} is no run: SYSTEM:SLICE:RATE of {', '.join(SYSTEMS)}; {', '.join(SLICES)}")
    mine = [system for number, system in enumerate(SYSTEMS) if number % part[1] == part[0] - 1]
    wanted = names or ["*"]
    return [
        run
        for run in every
        if run.system in mine and any(fnmatchcase(f"{run.system}:{run.slice}:{run.rate:g}", name) for name in wanted)
    ]


# --- targets


class Alone:
    """What was measured of models alone, as the file `alone-<part>.json`: kept model by model, so that a calibration
    which was cut off goes on where it ended."""

    def __init__(self, out: Path, part: int, commit: str) -> None:
        self._out, self._name, self._commit = out, f"alone-{part}", commit
        self._path = out / f"{self._name}.json"
        found = json.loads(self._path.read_text()) if self._path.exists() else {}
        self._slos: dict[str, dict[str, dict[str, float]]] = found.get("slos", {})
        self._samples: dict[str, dict[str, list[Any]]] = found.get("samples", {})

    def has(self, at: str, model: str) -> bool:
        return model in self._slos.get(at, {})

    def put(self, at: str, model: str, rows: list[list[Any]]) -> dict[str, float]:
        """A slice's samples of a model. Returns their P95s, in ms."""
        found = p95(rows)
        self._slos.setdefault(at, {})[model] = found
        self._samples.setdefault(at, {})[model] = rows
        # Without circumstances, for which the GPUs are asked: others are being measured.
        half = self._path.with_suffix(".half")
        half.write_text(json.dumps({"slos": self._slos, "samples": self._samples, "whole": False}))
        half.replace(self._path)
        return found

    def whole(self) -> None:
        """There is nothing more to measure."""
        found = {"slos": self._slos, "samples": self._samples, "whole": True}
        compared.write(self._out, self._name, self._commit, found)


async def calibrate(given: argparse.Namespace, models: Sequence[Model], site: Site) -> None:
    """Each model alone on its device, all in planned places and with room enough."""
    site = replace(site, devices={device: int(_ALONE_CAPACITY * nbytes) for device, nbytes in site.devices.items()})
    known = targets_of(given.out)
    wanted = [name for name in dict.fromkeys(run.slice for run in runs(given.runs)) if name not in known]
    if not wanted:
        print(f"{given.out / 'slos.json'} has targets of all these slices", flush=True)
        return
    slices = {name: _load(given, name, models) for name in wanted}
    busy = _load(given, "busy", models)
    requests = busy.requests(models[0].context_tokens, {})
    parts = systems.plan(models, requests, busy.part.seconds, site.devices, site.sizes)
    measured = Alone(given.out, given.part[0], given.commit)
    async with stack(SYSTEMS["muxserve"], models, parts, site) as at:

        async def of_device(device: str) -> None:
            for name, one in slices.items():
                number = list(SLICES).index(name)
                for model in models:
                    own = [each for each in one.requests(model.context_tokens, {}) if each.model == model.name]
                    if own and parts[model.name].place.group == device and not measured.has(name, model.name):
                        # Prompts that another slice had would be found in the cache.
                        seed = 1000 * given.part[0] + 100 * number + models.index(model)
                        took = measured.put(name, model.name, await alone(at, own[:ALONE], seed))
                        print(f"{name}, {model.name}: {took}", flush=True)

        async with asyncio.TaskGroup() as group:
            for device in site.devices:
                group.create_task(of_device(device), name=device)
    measured.whole()


def targets_of(out: Path) -> dict[str, Any]:
    """By slice, of those that have some."""
    path = out / "slos.json"
    return dict(json.loads(path.read_text())["slos"]) if path.exists() else {}


def targets(out: Path, commit: str) -> None:
    """What holds of what was calibrated. Slices that have targets keep them."""
    found = [json.loads(path.read_text()) for path in sorted(out.glob("alone-*.json"))]
    found = [each for each in found if each.get("whole", True)]
    known = targets_of(out)
    if not found and not known:
        raise SystemExit(f"{out} has no alone-*.json that is whole: calibrate first, or again, which goes on")
    slos = smallest([each["slos"] for each in found]) if found else {}
    if new := {name: of for name, of in slos.items() if name not in known}:
        before = json.loads((out / "slos.json").read_text()).get("samples", []) if known else []
        samples = before + [each["samples"] for each in found]
        compared.write(out, "slos", commit, {"slos": known | new, "samples": samples})


P95s = Mapping[str, Mapping[str, Mapping[str, float]]]
"""Milliseconds by slice, model and what they are of."""


def smallest(times: Sequence[P95s]) -> dict[str, dict[str, dict[str, float]]]:
    """Of each figure."""
    return {
        name: {
            model: {key: min(each[name][model][key] for each in times) for key in figures}
            for model, figures in one.items()
        }
        for name, one in times[0].items()
    }


async def alone(at: World, requests: Sequence[SimulatedRequest], seed: int) -> list[list[Any]]:
    """Samples of these, the same gaps between them but none above a second, with prompts drawn by `seed`."""
    rows, due, before = list[list[str]](), 0.0, requests[0].arrival
    for request in requests:
        due += min(ALONE_GAP_S, request.arrival - before)
        before = request.arrival
        rows.append([str(due), request.model, str(request.prompt_tokens), str(request.output_tokens)])
    with tempfile.TemporaryDirectory() as folder:
        path = compared.write_trace(Path(folder) / "alone.csv", rows)
        found = await compared.replayed(at, path, "--prompt-seed", str(seed), slos={}, settle=False)
    (system,) = found["systems"]
    if system["failures"]:
        raise compared.ReplayFailed(f"{requests[0].model} alone: {system['failures']}")
    return list(system["samples"]["rows"])


def p95(rows: Sequence[Sequence[Any]]) -> dict[str, float]:
    """Of samples of a replay; no TPOT of answers of one token."""
    found = {}
    for name, column in (("ttft_ms", 4), ("tpot_ms", 5)):
        value = quantile(sorted(row[column] for row in rows if row[column] is not None), 0.95)
        if value:
            found[name] = 1e3 * value
    return found


def scaled(alone: Mapping[str, Mapping[str, float]], models: Sequence[Model]) -> dict[str, dict[str, float]]:
    """Targets of those of these models that were asked for anything in the slice: what they took `alone`, scaled."""
    scales = {"ttft_ms": TTFT_SCALE, "tpot_ms": TPOT_SCALE}
    return {
        model.name: {key: scales[key] * value for key, value in alone[model.name].items()}
        for model in models
        if model.name in alone
    }


# --- runs


async def run(given: argparse.Namespace, models: Sequence[Model], site: Site) -> list[str]:
    """What was not done, in words."""
    slos = targets_of(given.out)
    end, missing = time.monotonic() + given.limit_s, []
    wanted = [each for each in runs(given.runs, given.part) if not (given.out / f"{each.name}.json").exists()]
    if without := dict.fromkeys(each.slice for each in wanted if each.slice not in slos):
        raise SystemExit(f"{given.out / 'slos.json'} has no targets of {', '.join(without)}: calibrate first")
    tasks = [task_of(each, _load(given, each.slice, models), slos[each.slice], models, site) for each in wanted]
    for todo in starts(tasks):
        first = todo[0]
        if time.monotonic() + _START_S + first.takes_s > end:
            missing += [f"{task.run.name}: no time left" for task in todo]
            continue
        print(f"== {first.run.system}, {', '.join(dict.fromkeys(task.run.slice for task in todo))}", flush=True)
        try:
            await _after_one_start(given, models, site, todo, end)
        except Exception as error:  # of whatever part of a stack: the other systems are measured all the same
            print(f"{first.run.system} failed: {error!r}", flush=True)
        names = [task.run.name for task in todo]
        missing += [f"{name}: not done" for name in names if not (given.out / f"{name}.json").exists()]
    return missing


@dataclass(frozen=True)
class Task:
    """A run, and what it takes."""

    run: Run
    cut: Cut
    slos: Mapping[str, Mapping[str, float]]
    parts: Mapping[str, Part]
    entries: Mapping[str, Any]
    """Of the catalogue."""
    settings: Mapping[str, Any]

    @property
    def takes_s(self) -> float:
        return self.cut.part.seconds + _END_S


def task_of(each: Run, one: Cut, alone: Mapping[str, Mapping[str, float]], models: Sequence[Model], site: Site) -> Task:
    """With targets scaled from what each model took `alone`."""
    system, slos = SYSTEMS[each.system], scaled(alone, models)
    context_tokens = models[0].context_tokens if models else 0
    parts = systems.plan(models, one.requests(context_tokens, slos), one.part.seconds, site.devices, site.sizes)
    entries = systems.listed(system, models, parts, site.sizes)
    return Task(each, one, slos, parts, entries, systems.local(system, parts))


def starts(tasks: Iterable[Task]) -> list[list[Task]]:
    """Those in a row that one start does for."""
    alike = groupby(tasks, key=lambda task: (task.run.system, task.entries, task.settings))
    return [list(group) for _, group in alike]


async def _after_one_start(
    given: argparse.Namespace, models: Sequence[Model], site: Site, todo: Sequence[Task], end: float
) -> None:
    """A replay each, none begun that would not be done by `end` (time.monotonic's)."""
    began = time.monotonic()
    async with stack(SYSTEMS[todo[0].run.system], models, todo[0].parts, site) as at:
        start_s = time.monotonic() - began
        print(f"up and warm after {start_s:.1f} s", flush=True)
        try:
            for number, task in enumerate(todo):
                if time.monotonic() + task.takes_s > end:
                    break
                before = [other.run.name for other in todo[:number]]
                try:
                    await _replay(given, at, task, before, start_s, site)
                except (compared.ReplayFailed, TimeoutError) as error:
                    print(f"{task.run.name} failed: {error!r}", flush=True)
        finally:
            keep_logs(at, given.out / f"{todo[0].run.name}.logs.txz")


async def _replay(
    given: argparse.Namespace, at: World, task: Task, before: Sequence[str], start_s: float, site: Site
) -> None:
    each, one = task.run, task.cut
    rate = each.rate * (_SHORT_RATE if given.rehearse else 1.0)
    # Random ones that another replay of the same start has had would be found in the caches.
    own = ["--rate", str(rate), "--prompt-seed", str(_prompts(each))]
    found = await compared.replayed(at, one.path, *one.arguments, *own, slos=task.slos, names=one.names)
    found["run"] = {
        "system": each.system,
        "slice": each.slice,
        "rate": each.rate,
        "start_s": start_s,
        "after": list(before),
    }
    found["system"] = {
        "catalogue": task.entries,
        "settings": task.settings,
        "plan": {name: {"group": part.place.group, "kv_bytes": part.kv_bytes} for name, part in task.parts.items()},
        "devices": dict(site.devices),
        "shapes": {name: MODELS[name] for name in task.entries},
    }
    found["slos"] = task.slos
    compared.write(given.out, each.name, given.commit, found)


def _prompts(each: Run) -> int:
    """Another number for every slice and rate, the same for all systems."""
    return [(one.slice, one.rate) for one in _every() if one.system == each.system].index((each.slice, each.rate))


def _weights_gb(found: Mapping[str, Any]) -> str:
    """To the GPUs, by `compared.came_up`."""
    shapes = found["system"]["shapes"]
    brought = sum(times * SHAPES[shapes[name]].weights_bytes for name, times in found["came_up"].items())
    return f"{brought / 1e9:.0f}"


def show(out: Path) -> None:
    """What there is, a line for each run."""
    rows = []
    for each in sorted(runs(), key=lambda each: (each.slice, each.rate)):
        path = out / f"{each.name}.json"
        if path.exists():
            found = json.loads(path.read_text())
            (of,) = found["systems"]
            every = of["all"]
            shares = [f"{every[key]:.3f}" for key in ("attainment", "ttft_attainment", "tpot_attainment")]
            times = [every[at][key] for at in ("ttft_s", "tpot_s") for key in ("p50", "p99")]
            shown = ["-" if value is None else f"{1e3 * value:.1f}" for value in times]
            did = ", ".join(f"{count} {what}" for what, count in found["decisions"].items())
            failed = sum(of["failures"].values())
            # Of runs from before this was counted it is not known.
            brought = _weights_gb(found) if "came_up" in found else "-"
            host = found.get("host", {}).get("work_ms", {}).get("p50")
            more = [f"{every['output_tokens_per_s']:.0f}", did, brought, "-" if host is None else f"{host:.2f}"]
            rows.append([each.slice, f"{each.rate:g}", each.system, every["requests"], failed, *shares, *shown, *more])
    header = ["slice", "rate", "system", "requests", "failed", "both", "TTFT", "TPOT"]
    header += ["TTFT p50 ms", "p99", "TPOT p50 ms", "p99", "tokens/s", "placement", "weights brought, GB", "host ms"]
    report.table("attainment", header, rows)


# --- the command line


def _load(given: argparse.Namespace, name: str, models: Sequence[Model]) -> Cut:
    names = [model.name for model in models]
    seconds = _SHORT_S if given.rehearse else given.seconds
    if not given.models:
        return load(given.traces, name, names, seconds)
    given.out.mkdir(parents=True, exist_ok=True)
    return only(load(given.traces, name, list(MODELS), seconds), names, given.out / f"{name}.csv")


def part_of(text: str) -> tuple[int, int]:
    number, _, of = text.partition("/")
    if not (number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)):
        raise argparse.ArgumentTypeError(f"{text!r} is not K/N")
    return int(number), int(of)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "benchmarks.gpu.compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("cut", "calibrate", "targets", "run", "show"))
    parser.add_argument("runs", nargs="*", metavar="SYSTEM:SLICE:RATE")
    parser.add_argument("--out", type=Path, help="folder of results, and of slos.json")
    parser.add_argument("--traces", type=Path, help="folder of slices; for `cut` of the whole traces")
    parser.add_argument("--to", type=Path, help="of `cut`: where the slices go")
    parser.add_argument("--devices", type=lambda text: text.split(","), help="two of them")
    parser.add_argument("--models", type=lambda text: text.split(","), default=[], help=f"of {', '.join(MODELS)} (all)")
    parser.add_argument("--part", type=part_of, default=(1, 1), metavar="K/N")
    parser.add_argument("--limit-s", type=float, default=inf)
    parser.add_argument("--seconds", type=float, help="of each slice (all of it)")
    parser.add_argument("--engine-log-level", default="warning")
    parser.add_argument("--rehearse", default="", choices=compared.REHEARSALS)
    parser.add_argument("--commit", default="unknown")
    given = parser.parse_intermixed_args(arguments)
    needed = {"cut": ("traces", "to"), "show": ("out",), "targets": ("out",)}.get(given.what, ("traces", "out"))
    if missing := [name for name in needed if getattr(given, name) is None]:
        parser.error(f"{given.what} needs {', '.join('--' + name for name in missing)}")
    try:
        runs(given.runs)
    except ValueError as error:
        parser.error(str(error))
    if unknown := set(given.models) - set(MODELS):
        parser.error(f"no such model: {', '.join(sorted(unknown))}")
    kind = "cpu" if given.rehearse else "cuda"
    given.devices = given.devices or [f"{kind}:0", f"{kind}:1"]
    return given


def main(arguments: Sequence[str] | None = None) -> int:
    given = parse(arguments)
    if given.what == "cut":
        cut(given.traces, given.to, list(MODELS))
        return 0
    if given.what == "show":
        show(given.out)
        return 0
    if given.what == "targets":
        targets(given.out, given.commit)
        return 0
    log.configure("compare", "warning")
    process_limits.allow_descriptors()
    wanted = {name: shape for name, shape in MODELS.items() if name in (given.models or MODELS)}
    if given.rehearse == "sglang":
        wanted = dict(list(wanted.items())[:_FEW])
    with tempfile.TemporaryDirectory() as folder:
        models = compared.make(Path(folder), wanted, given.rehearse)
        site = compared.site(given.devices, len(models), CAPACITY_BYTES, given.rehearse)
        site = replace(site, engine_log_level=given.engine_log_level)
        if given.what == "calibrate":
            asyncio.run(calibrate(given, models, site))
            return 0
        missing = asyncio.run(run(given, models, site))
    show(given.out)
    for line in missing:
        print(line)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
