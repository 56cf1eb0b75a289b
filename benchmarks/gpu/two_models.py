"""Two models on one GPU: what shared memory brings, and what the order of the shared queue does.

    python -m benchmarks.gpu.two_models --out DIR [memory] [order] [joint] [--device cuda:0] [--limit-s 560]
        [--rehearse echo]

memory    one model is busy, then the other is, twice as much. Prism beside a static partition in halves: KV bytes and
          tokens a second over time (memory-SYSTEM.json)
order     prompts of 2,000 tokens and a loose target beside short ones and a target that is varied: the first's is
          always LOOSE times its P95 alone, the second's SCALES times. Prism beside order of arrival: the second's
          attainment, and queues over time (order-SYSTEM-SCALE.json, order-slos.json)
joint     prompts of 256 tokens for both, answers of 128: what it costs that prefills wait for each other, by how long
          those may be that go side by side (`joint_s`; 0: one engine at a time, inf: they never wait). Mean TTFT and
          TPOT (joint-JOINT_S-RATE.json)

Requests are drawn by a seed, the same for all. What has its result is skipped, and nothing is begun that would not be
done by --limit-s; exit status 1 if something is missing then.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from math import inf
from pathlib import Path
from typing import Any

import services.ipc.forking  # noqa: F401  (before grpc: services are started)
from benchmarks import systems
from benchmarks.gpu import compared, report
from benchmarks.gpu.compare import alone, p95
from benchmarks.gpu.stack import Site, stack
from benchmarks.systems import SYSTEMS, Model, System
from services.runtime import process_limits
from services.telemetry import log
from sim.inputs.request import SimulatedRequest
from testing.systems.local import World

NAMES = ("first", "second")
MODELS = dict.fromkeys(NAMES, "8b")
CAPACITY_BYTES = 48 * compared.GIB
"""Weights, engines and graphs take 37 GB: 14 are left for KV."""
SYSTEMS_OF = {"static": ("memory",), "prism": ("memory", "order"), "no-arbitration": ("order",)}
SCALES = (1.0, 2.0, 4.0, 8.0, 16.0)
LOOSE = 8.0
JOINT_S = (0.0, 0.1, inf)
JOINT_RATES = (28.0, 32.0)
"""Requests a second of both models together, as in `overhead`."""
_START_S, _END_S = 90.0, 20.0
_ALONE = 24

Row = tuple[float, str, int, int]


def poisson(
    seed: int, model: str, rate: float, begin_s: float, end_s: float, prompt: int, output: int
) -> Iterator[Row]:
    """Requests of about these lengths: each between half and one and a half times as long."""
    draw = random.Random(f"{seed}/{model}/{begin_s}")
    at = begin_s
    while (at := at + draw.expovariate(rate)) < end_s:
        yield at, model, int(prompt * draw.uniform(0.5, 1.5)), max(1, int(output * draw.uniform(0.5, 1.5)))


def memory_trace(seconds: float, rate: float, prompt: int = 1024, output: int = 512) -> list[Row]:
    """A third of the time the first model is busy, then the second, twice as much."""
    first, second = NAMES
    turn = seconds / 3
    return sorted(
        [
            *poisson(1, first, rate, 0.0, turn, prompt, output),
            *poisson(1, first, rate / 10, turn, seconds, prompt, output),
            *poisson(2, second, rate / 10, 0.0, turn, prompt, output),
            *poisson(2, second, 2 * rate, turn, seconds, prompt, output),
        ]
    )


def order_trace(seconds: float, rate: float, long: int = 2000, short: int = 128, output: int = 64) -> list[Row]:
    """Long prompts for one model, short ones, as often, for the other."""
    first, second = NAMES
    rows = [
        *poisson(3, first, rate, 0.0, seconds, long, output),
        *poisson(4, second, rate, 0.0, seconds, short, output),
    ]
    return sorted(rows)


def joint_trace(seconds: float, rate: float, prompt: int = 256, output: int = 128) -> list[Row]:
    """The same for both models, all of the same lengths."""
    draw = random.Random(f"joint/{rate}")
    rows, at = list[Row](), 0.0
    while (at := at + draw.expovariate(rate)) < seconds:
        rows.append((at, draw.choice(NAMES), prompt, output))
    return rows


class Bench:
    """One sitting."""

    def __init__(self, given: argparse.Namespace, models: Sequence[Model], site: Site) -> None:
        self._given = given
        self._models = models
        self._site = site
        self._end = time.monotonic() + given.limit_s
        self.missing: list[str] = []
        self._replays = 0
        small = bool(given.rehearse)
        self._seconds = {"memory": 9.0 if small else 60.0, "order": 4.0 if small else 30.0}
        self._seconds["joint"] = self._seconds["order"]
        rates = {"memory": 2.0, "order": 2.0} if small else {"memory": 8.0, "order": 8.0}
        self.traces = {
            "memory": memory_trace(self._seconds["memory"], rates["memory"]),
            "order": order_trace(self._seconds["order"], rates["order"], *((500, 60) if small else ())),
            **{_joint(rate): joint_trace(self._seconds["joint"], rate / 10 if small else rate) for rate in JOINT_RATES},
        }

    def _there(self, name: str) -> bool:
        return (self._given.out / f"{name}.json").exists()

    def _time_for(self, seconds: float, names: Sequence[str]) -> bool:
        if time.monotonic() + seconds <= self._end:
            return True
        self.missing += [f"{name}: no time left" for name in names]
        return False

    @asynccontextmanager
    async def _stack(self, system: System) -> AsyncIterator[World]:
        """Halves, where memory is divided."""
        requests = [SimulatedRequest(model, model, 0.0, 1, 1) for model in NAMES]
        parts = systems.plan(self._models, requests, 1.0, self._site.devices, self._site.sizes)
        async with stack(system, self._models, parts, self._site) as at:
            yield at

    async def _replayed(self, at: World, what: str, name: str, slos: Mapping[str, Any], run: Mapping[str, Any]) -> None:
        self._replays += 1
        with tempfile.TemporaryDirectory() as folder:
            path = compared.write_trace(Path(folder) / "trace.csv", self.traces[what])
            # Prompts that another replay of the same start has had would be found in the caches.
            own = ["--prompt-seed", str(self._replays)]
            found = await compared.replayed(at, path, *own, slos=slos, watch_s=0.25)
        found |= {"run": dict(run), "slos": slos, "devices": dict(self._site.devices)}
        compared.write(self._given.out, name, self._given.commit, found)
        if not self._there(name):
            self.missing.append(f"{name}: the client did not keep the schedule")

    async def compare(self, what: Sequence[str]) -> None:
        """`memory` and `order`, each system started once for what is wanted of it."""
        for name, parts in SYSTEMS_OF.items():
            todo = {part: names for part in parts if part in what and (names := self._todo(part, name))}
            if not todo:
                continue
            first_s = min(self._seconds[part] for part in todo) + _END_S
            if not self._time_for(_START_S + first_s, [run for names in todo.values() for run in names]):
                continue
            async with self._stack(SYSTEMS[name]) as at:
                for part, names in todo.items():
                    await (self._memory if part == "memory" else self._order)(at, name, names)

    def _todo(self, part: str, system: str) -> list[str]:
        """Runs without their result."""
        names = [f"order-{system}-{scale:g}" for scale in SCALES] if part == "order" else [f"memory-{system}"]
        return [name for name in names if not self._there(name)]

    async def _memory(self, at: World, system: str, names: Sequence[str]) -> None:
        if self._time_for(self._seconds["memory"] + _END_S, names):
            await self._replayed(at, "memory", names[0], {}, {"system": system})

    async def _order(self, at: World, system: str, names: Sequence[str]) -> None:
        each_s = self._seconds["order"] + _END_S
        if not self._there("order-slos") and self._time_for(2 * each_s, names):
            await self._calibrate(at)
        if not self._there("order-slos"):
            return
        slos = json.loads((self._given.out / "order-slos.json").read_text())["slos"]
        for name in names:
            scale = float(name.rpartition("-")[2])
            if self._time_for(each_s, [name]):
                scaled = {
                    model: {"ttft_ms": factor * slos[model]["ttft_ms"]}
                    for model, factor in zip(NAMES, (LOOSE, scale), strict=True)
                }
                await self._replayed(at, "order", name, scaled, {"system": system, "scale": scale})

    async def joint(self) -> None:
        each_s = self._seconds["joint"] + _END_S
        for joint_s in JOINT_S:
            todo = {rate: f"joint-{joint_s:g}-{rate:g}" for rate in JOINT_RATES}
            todo = {rate: name for rate, name in todo.items() if not self._there(name)}
            if not todo or not self._time_for(_START_S + each_s, list(todo.values())):
                continue
            async with self._stack(System(arbitration={"joint_s": joint_s})) as at:
                for rate, name in todo.items():
                    if self._time_for(each_s, [name]):
                        run = {"system": "prism", "joint_s": str(joint_s), "rate": rate}
                        await self._replayed(at, _joint(rate), name, {}, run)

    async def _calibrate(self, at: World) -> None:
        found = {}
        for number, model in enumerate(NAMES):
            own = [row for row in self.traces["order"] if row[1] == model][:_ALONE]
            requests = [SimulatedRequest("", model, at_s, prompt, output) for at_s, _, prompt, output in own]
            found[model] = p95(await alone(at, requests, seed=number))
        compared.write(self._given.out, "order-slos", self._given.commit, {"slos": found})


def _joint(rate: float) -> str:
    return f"joint-{rate:g}"


def _mean_ms(samples: Sequence[Sequence[Any]], column: int) -> float:
    """Of a column of samples of a replay, those without one left out."""
    values = [row[column] for row in samples if row[column] is not None]
    return 1e3 * sum(values) / len(values) if values else 0.0


def show(out: Path) -> None:
    rows = []
    for path in sorted(out.glob("*.json")):
        found = json.loads(path.read_text())
        if "run" in found:
            models = found["systems"][0]["models"]
            shares = [f"{models[name]['ttft_attainment']:.3f}" for name in NAMES if name in models]
            most = max((_kv(row) for row in found["timeline"]), default=0.0)
            means = [f"{_mean_ms(found['systems'][0]['samples']['rows'], column):.1f}" for column in (4, 5)]
            rows.append([path.stem, *shares, *means, most, found["systems"][0]["all"]["output_tokens_per_s"]])
    header = ["run", "TTFT first", "TTFT second", "mean TTFT, ms", "mean TPOT, ms", "most KV used, GB", "tokens/s"]
    report.table("two models", header, rows)


def _kv(row: Mapping[str, Any]) -> float:
    """GB in use by both."""
    return sum(model.get("kv_used_bytes", 0) for model in row["models"].values()) / 1e9


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "benchmarks.gpu.two_models", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="*", choices=("memory", "order", "joint", []), default=[])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="")
    parser.add_argument("--limit-s", type=float, default=inf)
    parser.add_argument("--rehearse", default="", choices=compared.REHEARSALS)
    parser.add_argument("--commit", default="unknown")
    given = parser.parse_intermixed_args(arguments)
    log.configure("two_models", "warning")
    process_limits.allow_descriptors()
    device = given.device or ("cpu:0" if given.rehearse else "cuda:0")

    async def run() -> list[str]:
        with tempfile.TemporaryDirectory() as folder:
            models = compared.make(Path(folder), MODELS, given.rehearse)
            bench = Bench(given, models, compared.site([device], len(models), CAPACITY_BYTES, given.rehearse))
            what = given.what or ("memory", "order", "joint")
            await bench.compare(what)
            if "joint" in what:
                await bench.joint()
            return bench.missing

    missing = asyncio.run(run())
    show(given.out)
    for line in missing:
        print(line)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
