"""A staircase of rates on two GPUs: at which rate do Prism, static partition and MuxServe++ fall under 99 % on time?

    python -m benchmarks.gpu.stairs cut --traces TRACES --to FOLDER     # the slice and the hour before; no GPU
    python -m benchmarks.gpu.stairs check --traces FOLDER               # whether all that is needed is there
    python -m benchmarks.gpu.stairs plan --out DIR --limit-s 1500       # how long steps may be; DIR/plan.json
    python -m benchmarks.gpu.stairs run --traces FOLDER --out DIR --limit-s 1500 [SYSTEM ...]
    python -m benchmarks.gpu.stairs collect --out DIR --to FILE         # what is kept: percentages by step
    python -m benchmarks.gpu.stairs show --out FILE                     # of `collect` or of stairs_sim

    --devices cuda:2,cuda:3  --part 2/2     two of these may run at once on four GPUs, with cores and a folder of their
                                            own (DIR/half2): replays begin at the same second on both halves
    --rehearse echo|sglang                  on the CPU, with steps of --step-s; the figures mean nothing

One run is one replay over HTTP of nine steps, from half as many to six times as many requests as the trace has
(`benchmarks/_stairs.py`), after a start with empty queues; systems come one after the other on the same GPUs, and
`host_pulse` measures the host beside each. A system that is named twice is run twice (prism, prism-2). A run that has
its result is skipped. Models and traffic: `stairs_load.py`. Targets are the P95 of each model alone, measured in the
first start of the same host before anything else, times 5; of two halves the smaller counts, and both have it.

Where the time is not enough for steps of 55 s and all systems, steps are shorter, not below 30 s; then the last systems
are left out. A start that took longer than planned costs the last steps of its own run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

import services.ipc.forking  # noqa: F401  (before grpc: services are started)
from benchmarks._stairs import HEADER, RATES, STEP_S, StairSample, falls_under, steps, table
from benchmarks.gpu import compare, compared, http_needed, report
from benchmarks.gpu.http_needed import Check
from benchmarks.gpu.stack import Site, first_answer, keep_logs, stack
from benchmarks.gpu.stairs_load import (
    CAPACITY_BYTES,
    ENGINE_HOST_BYTES,
    IMAGE_BYTES,
    MODELS,
    QUOTA_BYTES,
    TPOT_SCALE,
    TTFT_SCALE,
    StairLoad,
    cut,
    load,
    system,
)
from benchmarks.systems import Model
from services.runtime import process_limits
from services.telemetry import log
from testing.systems.local import World

ORDER = ("prism", "static", "muxserve", "prism")
NAMES = {"prism": "Prism", "static": "static partition", "muxserve": "MuxServe++, a queue for each engine"}
LEAST_STEP_S, LEAST_STEPS = 30.0, 5
START_S, ALONE_S, END_S = 130.0, 75.0, 70.0
"""Seconds of a start with all eight models and their images, of measuring models alone, and from the last arrival until
nothing of the system is left: 60 of them a request may take. The first start of a host that compiles kernels takes some
100 more."""
_ALONE_REHEARSED = 3
_BESIDE_S = 150.0
"""That one half of a host waits for the other at most."""
_GIB = 1 << 30


# --- the plan


@dataclass(frozen=True)
class StairPlan:
    """How long a step is, and which systems there is time for."""

    step_s: float
    systems: tuple[str, ...]

    @property
    def run_s(self) -> float:
        return START_S + self.step_s * len(RATES) + END_S

    @property
    def takes_s(self) -> float:
        return ALONE_S + self.run_s * len(self.systems)


def planned(limit_s: float, wanted: Sequence[str], step_s: float = STEP_S, least_s: float = LEAST_STEP_S) -> StairPlan:
    """The longest steps, `step_s` at most and `least_s` at least, with which all `wanted` systems fit; a repeated one
    is only taken at full length. Raises ValueError where not even the first fits."""
    fit = list(wanted)
    while fit:
        fits_s = min(step_s, ((limit_s - ALONE_S) / len(fit) - START_S - END_S) / len(RATES))
        if fits_s >= (step_s if fit[-1] in fit[:-1] else least_s):
            return StairPlan(float(int(fits_s)), tuple(fit))
        fit.pop()
    raise ValueError(
        f"{limit_s:.0f} s are not enough for one system, which takes {ALONE_S + START_S + END_S:.0f} s and "
        f"{len(RATES)} steps of {least_s:g} s"
    )


def plan(given: argparse.Namespace) -> StairPlan:
    """What DIR/plan.json has, or the plan for the time that is left, written there: all runs of a folder have steps
    of one length."""
    path = given.out / "plan.json"
    if path.exists():
        found = json.loads(path.read_text())
        made = StairPlan(found["step_s"], tuple(given.systems or found["systems"]))
    else:
        least_s = given.step_s if given.rehearse else min(LEAST_STEP_S, given.step_s)
        made = planned(given.limit_s, given.systems or ORDER, given.step_s, least_s)
        given.out.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"step_s": made.step_s, "systems": made.systems}))
    left = given.limit_s
    print(f"plan: {len(RATES)} steps of {made.step_s:g} s, {left:.0f} s left", flush=True)
    print(f"  models alone, in the first start: {ALONE_S:.0f} s, {(left := left - ALONE_S):.0f} s left then")
    for name in made.systems:
        left -= made.run_s
        what = f"start {START_S:.0f} s, steps {made.step_s * len(RATES):.0f} s, end {END_S:.0f} s"
        print(f"  {name}: {what}; {left:.0f} s left then", flush=True)
    return made


# --- what is needed


def check(given: argparse.Namespace, models: Sequence[Model], site: Site, halves: int) -> bool:
    """Whether all that is needed is there; nothing is started. Checkpoints are configurations alone, since engines draw
    their weights, so there is nothing to write."""
    if given.rehearse:
        checks = [asyncio.run(http_needed.prism())]
    else:
        checks = asyncio.run(http_needed.imports("cuda:0", 1024))[:2]
    try:
        stairs = load(given.traces)
        parts = stairs.plan(models, site.devices, site.sizes)
        of_group = Counter(part.place.group for part in parts.values())
        told = ", ".join(f"{count} models on {group}" for group, count in sorted(of_group.items()))
        checks.append(Check("plan from the hour before", True, told))
    except (OSError, ValueError) as error:
        checks.append(Check("plan from the hour before", False, str(error)))
    if not given.rehearse:
        needed = halves * (IMAGE_BYTES + (len(models) + 2 * site.warm) * ENGINE_HOST_BYTES)
        free, limited = host_free()
        told = f"{free / _GIB:.0f} GiB free, {needed / _GIB:.0f} needed"
        checks.append(Check("host memory", free >= needed or not limited, told))
        free = int(report.smi("memory.free") or 0) << 20
        checks.append(Check("GPU memory", free >= CAPACITY_BYTES, f"{free / _GIB:.0f} GiB free on the first"))
    return http_needed.show(checks)


def host_free(root: Path = Path("/")) -> tuple[int, bool]:
    """Bytes of host memory that are free, and whether a control group limits them. What the kernel has free says little
    alone: on some machines memory grows as it is used."""
    found = (line.split() for line in (root / "proc/meminfo").read_text().splitlines())
    free = next(int(words[1]) << 10 for words in found if words[0] == "MemAvailable:")
    with suppress(OSError, ValueError):  # there is no limit, or another kind of control groups
        group = root / "sys/fs/cgroup"
        return int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()), True
    return free, False


# --- runs


class Halves:
    """What two of these on one host wait for each other by: files in their common folder."""

    def __init__(self, folder: Path, part: tuple[int, int]) -> None:
        self._folder = folder / "halves"
        self._number, self._count = part

    async def meet(self, what: str, told: Any = None) -> list[Any]:
        """What all halves told of it; of those that came within `_BESIDE_S`."""
        self._folder.mkdir(parents=True, exist_ok=True)
        half = self._folder / f"{what}.{self._number}.half"
        half.write_text(json.dumps(told))
        half.replace(half.with_suffix(".json"))
        until = time.monotonic() + _BESIDE_S
        paths = [self._folder / f"{what}.{number}.json" for number in range(1, self._count + 1)]
        while not all(path.exists() for path in paths) and time.monotonic() < until:
            await asyncio.sleep(0.1)
        return [json.loads(path.read_text()) for path in paths if path.exists()]


def named(wanted: Sequence[str]) -> list[tuple[str, str]]:
    """(name of the run, system); a repeated system has a number."""
    seen: Counter[str] = Counter()
    found = []
    for name in wanted:
        seen[name] += 1
        found.append((name if seen[name] == 1 else f"{name}-{seen[name]}", name))
    return found


async def run(given: argparse.Namespace, made: StairPlan, models: Sequence[Model], site: Site) -> list[str]:
    """What was not done, in words."""
    end, missing = time.monotonic() + given.limit_s, []
    halves = Halves(given.out, given.part)
    out = given.out / f"half{given.part[0]}" if given.part[1] > 1 else given.out
    stairs = load(given.traces)
    for slot, (name, of) in enumerate(named(made.systems)):
        if (out / f"{name}.json").exists():
            continue
        left = end - time.monotonic()
        print(f"== {name}: {left:.0f} s left, {made.run_s:.0f} planned", flush=True)
        if left < START_S + made.step_s * LEAST_STEPS + END_S:
            missing.append(f"{name}: no time left")
            continue
        try:
            async with asyncio.timeout(left):
                await _one(given, out, f"{slot}", name, of, made, stairs, models, site, halves, end)
        except Exception as error:  # of whatever part of a stack: the other systems are measured all the same
            print(f"{name} failed: {error!r}", flush=True)
            missing.append(f"{name}: {type(error).__name__}")
    return missing


async def _one(
    given: argparse.Namespace,
    out: Path,
    slot: str,
    name: str,
    of: str,
    made: StairPlan,
    stairs: StairLoad,
    models: Sequence[Model],
    site: Site,
    halves: Halves,
    end: float,
) -> None:
    """A start, models alone if they have no targets yet, and the staircase."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        traffic = Path(folder) / "traffic.json"
        stairs.write_traffic(traffic)
        trace = stairs.write_stairs(Path(folder) / "stairs.csv", made.step_s)
        chosen = system(of, traffic)
        known = json.loads(path.read_text()) if (path := given.out / "alone.json").exists() else {}
        parts = stairs.plan(models, site.devices, site.sizes, scaled(known))
        async with stack(chosen, models, parts, site) as at:
            start_s = time.monotonic() - began
            print(f"{name}: up and warm after {start_s:.1f} s, {end - time.monotonic():.0f} s left", flush=True)
            try:
                alone = await _alone(given, at, stairs, halves)
                await halves.meet(f"begin-{slot}")
                count = int(min(len(RATES), (end - time.monotonic() - END_S) / made.step_s))
                if count < LEAST_STEPS:
                    raise TimeoutError(f"time is left for {count} steps only")
                slos = scaled(alone)
                seconds = ["--seconds", str(count * made.step_s)]
                began_at = time.time()
                found = await compared.replayed(at, trace, *seconds, slos=slos, settle=False)
            finally:
                out.mkdir(parents=True, exist_ok=True)
                keep_logs(at, out / f"{name}.logs.txz")
    (asked,) = found["systems"]
    found["run"] = {"system": of, "name": name, "half": given.part[0], "start_s": start_s, "began_at": began_at}
    found["system"] = {
        "plan": {each: {"group": part.place.group, "kv_bytes": part.kv_bytes} for each, part in parts.items()},
        "devices": dict(site.devices),
        "kv_extent_bytes": site.sizes.kv_extent_bytes,
    }
    found["slos"], found["step_s"] = slos, made.step_s
    samples = [StairSample(row[0], row[1], row[4], row[5], bool(row[6])) for row in asked["samples"]["rows"]]
    found["steps"] = steps(samples, slos, made.step_s, count, found["host"].get("by_time", ()))
    compared.write(out, name, given.commit, found)
    report.table(name, HEADER, table([told(found)]))


async def _alone(given: argparse.Namespace, at: World, stairs: StairLoad, halves: Halves) -> dict[str, Any]:
    """P95s of each model alone in ms, measured on each GPU by itself, or those that were measured before."""
    path = given.out / "alone.json"
    if path.exists():
        return dict(json.loads(path.read_text()))
    began = time.monotonic()
    places: dict[str, list[str]] = {}
    for name in MODELS:
        if stairs.alone(name, 1):
            await first_answer(at, name)
            place = await at.resident(name)
            places.setdefault(place[0] if place else "", []).append(name)
    found: dict[str, Any] = {}

    async def on_one(names: Sequence[str]) -> None:
        for name in names:
            await first_answer(at, name)
            asked = stairs.alone(name, _ALONE_REHEARSED) if given.rehearse else stairs.alone(name)
            # Prompts that the staircase has too would be found in the cache.
            rows = await compare.alone(at, asked, 1000 * given.part[0] + 1 + list(MODELS).index(name))
            found[name] = compare.p95(rows)
            print(f"{name} alone: {found[name]}", flush=True)

    async with asyncio.TaskGroup() as group:
        for place, names in places.items():
            group.create_task(on_one(names), name=place)
    measured = await halves.meet("alone", found)
    both = [{"": each} for each in measured if set(each) == set(found)]
    smallest = compare.smallest(both)[""]
    if not path.exists():  # else the other half waited in vain, and has begun with its own
        half = path.with_suffix(f".half{given.part[0]}")
        half.write_text(json.dumps(smallest))
        half.replace(path)
    print(f"models alone: {time.monotonic() - began:.0f} s", flush=True)
    return dict(json.loads(path.read_text()))


def scaled(alone: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Milliseconds by model."""
    scales = {"ttft_ms": TTFT_SCALE, "tpot_ms": TPOT_SCALE}
    return {name: {key: scales[key] * value for key, value in of.items()} for name, of in alone.items()}


# --- what is kept


def told(found: Mapping[str, Any]) -> dict[str, Any]:
    """Of a run's result what is kept for good."""
    of, valid = found["run"], found.get("valid", True)
    name = of["name"] if found.get("halves", 1) == 1 else f"{of['name']}, half {of['half']}"
    return {
        "name": name if valid else f"{name}, sent late",
        "system": of["system"],
        "what": "measured",
        "half": of["half"],
        "start_s": round(of["start_s"], 1),
        "began_at": round(of["began_at"]),
        "valid": valid,
        "step_s": found["step_s"],
        "slos": found["slos"],
        "host": {key: found["host"].get(key) for key in ("late_ms", "work_ms", "cpu_ms")},
        "failures": found["systems"][0]["failures"],
        "decisions": found["decisions"],
        "steps": found["steps"],
        "falls_under": falls_under(found["steps"]),
    }


def collected(out: Path) -> dict[str, Any]:
    """All results of a folder and of its halves, in the order in which they began. Raises ValueError for none."""
    paths = sorted([*out.glob("*.json"), *out.glob("half?/*.json")])
    found = [json.loads(path.read_text()) for path in paths]
    found = sorted((each for each in found if "steps" in each), key=lambda each: each["run"]["began_at"])
    if not found:
        raise ValueError(f"no result in {out}")
    halves = len({each["run"]["half"] for each in found})
    runs = [told({**each, "halves": halves}) for each in found]
    return {"circumstances": found[0].get("circumstances", {}), "rates": RATES, "runs": runs}


def show(found: Mapping[str, Any]) -> None:
    report.table("% on time by step", HEADER, table(found["runs"]))


# --- the command line


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "benchmarks.gpu.stairs", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("cut", "check", "plan", "run", "collect", "show"))
    parser.add_argument("systems", nargs="*", metavar="SYSTEM", help=f"{', '.join(NAMES)} ({' '.join(ORDER)})")
    parser.add_argument("--traces", type=Path, help="what `cut` wrote; for `cut` the whole traces")
    parser.add_argument("--to", type=Path, help="of `cut` a folder, of `collect` a file")
    parser.add_argument("--out", type=Path, help="folder of results; of `show` a file")
    parser.add_argument("--devices", type=lambda text: text.split(","), help="two of them")
    parser.add_argument("--part", type=compare.part_of, default=(1, 1), metavar="K/N")
    parser.add_argument("--limit-s", type=float, default=inf)
    parser.add_argument("--step-s", type=float, default=STEP_S, help="of a step, at most (default: %(default)s)")
    parser.add_argument("--engine-log-level", default="warning")
    parser.add_argument("--rehearse", default="", choices=compared.REHEARSALS)
    parser.add_argument("--commit", default="unknown")
    given = parser.parse_intermixed_args(arguments)
    needed = {"cut": ("traces", "to"), "check": ("traces",), "run": ("traces", "out"), "collect": ("out", "to")}
    if missing := [name for name in needed.get(given.what, ("out",)) if getattr(given, name) is None]:
        parser.error(f"{given.what} needs {', '.join('--' + name for name in missing)}")
    if unknown := set(given.systems) - set(NAMES):
        parser.error(f"no such system: {', '.join(sorted(unknown))}")
    kind = "cpu" if given.rehearse else "cuda"
    given.devices = given.devices or [f"{kind}:0", f"{kind}:1"]
    if not given.step_s >= 1 or given.step_s > STEP_S:
        parser.error(f"a step has 1 to {STEP_S:g} s")
    return given


def site_of(given: argparse.Namespace) -> Site:
    site = compared.site(given.devices, len(MODELS), CAPACITY_BYTES, given.rehearse)
    site = replace(site, engine_log_level=given.engine_log_level)
    if given.rehearse:
        return site
    return replace(site, sizes=replace(site.sizes, quota_bytes=QUOTA_BYTES), host_bytes=IMAGE_BYTES)


def main(arguments: Sequence[str] | None = None) -> int:
    given = parse(arguments)
    if given.what == "cut":
        cut(given.traces, given.to)
        return 0
    if given.what == "show":
        show(json.loads(given.out.read_text()))
        return 0
    try:
        if given.what == "collect":
            found = collected(given.out)
            given.to.write_text(json.dumps(found, separators=(",", ":")) + "\n")
            show(found)
            return 0
        if given.what == "plan":
            plan(given)
            return 0
        log.configure("stairs", "warning")
        process_limits.allow_descriptors()
        with tempfile.TemporaryDirectory() as folder:
            models = compared.make(Path(folder), MODELS, given.rehearse)
            site = site_of(given)
            if given.what == "check":
                return 0 if check(given, models, site, given.part[1]) else 1
            missing = asyncio.run(run(given, plan(given), models, site))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    for line in missing:
        print(line)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
