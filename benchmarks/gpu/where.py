"""Where the time of a step goes: our engine and unmodified SGLang, each recorded under the same loads.

    python -m benchmarks.gpu.where --out DIR --commit HASH [--loads 28,full] [--recorders stages,python]

The engines and loads of `overhead`, one side after the other, each recorded several times (`profiled`). The KV of
both is full of cached prefixes when it begins, as after an hour of work. Shown is what differs between the two, per
turn of the loop that did the like (stages) or per forward step.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu import fleet, overhead, profiled, recording, report, turns, windows
from benchmarks.gpu.fleet import say
from benchmarks.gpu.windows import Load, Side

_MOST = 30
"""Rows of a table."""


class Where(overhead.Part):
    def __init__(self, given: argparse.Namespace, name: str, folder: Path) -> None:
        super().__init__(given, name, folder)
        self._found: list[dict[str, Any]] = []

    def _environment(self, name: str, kind: str) -> Mapping[str, str]:
        return recording.environment(kind, self._folder / name, self._given.recorders.split(","))

    async def _measure(self, ours: Side, theirs: Side) -> None:
        await self._warm_up([*ours.clients, *theirs.clients])
        for side in (ours, theirs):
            await self._fill(side)
        for load in self._given.loads.split(","):
            sides = [await self._record(*pair, load) for pair in ((ours, theirs), (theirs, ours))]
            self._found.append({"load": load, "elastic": sides[0], "reference": sides[1]})
            for recorder in self._given.recorders.split(","):
                (show_stages if recorder == "stages" else show)(load, recorder, *sides)

    async def _record(self, side: Side, other: Side, load: str) -> dict[str, Any]:
        """Findings and number of steps under a load, by recorder, while the `other` side stands: a scheduler that looks
        for requests all the time would slow down the core beside its own."""
        processes = turns.Processes(other.pids())
        processes.stop()
        try:
            return await self._record_alone(side, load)
        finally:
            processes.go_on()

    async def _record_alone(self, side: Side, load: str) -> dict[str, Any]:
        """Findings and number of steps under a load, by recorder."""
        clock = turns.Clock()
        clock.start()
        running = Load(side, clock, self._shape, self._given.seed)
        running.begin_steady(float(load)) if load != "full" else running.begin_full(self._given.in_flight)
        found: dict[str, Any] = {}
        with windows.no_collector():
            for recorder in self._given.recorders.split(","):
                await asyncio.sleep(self._given.lead_in)
                found[recorder] = await self._recorded(side, recorder)
                say(f"{side.name}, {load}, {recorder}: {found[recorder]['steps']} steps")
            await running.end()
        return found

    async def _recorded(self, side: Side, recorder: str) -> dict[str, Any]:
        client = side.clients[0]
        before = client.stats.forward_steps
        async with recording.recorded([client], self._folder, recorder) as found:
            await asyncio.sleep(self._given.window)
            steps = client.stats.forward_steps - before
        return {"steps": steps, "found": found[client.name]}

    def write(self) -> None:
        report.write(self._given.out, "gpu_where", self._given.commit, {"loads": self._found})


def show(load: str, recorder: str, ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    a, b = ours[recorder], theirs[recorder]
    rows = []
    for name in {*a["found"], *b["found"]}:
        per_step = []
        for side in (a, b):
            times, seconds = side["found"].get(name, (0, 0.0))
            per_step += [times / max(1, side["steps"]), 1e6 * seconds / max(1, side["steps"])]
        rows.append((per_step[1] - per_step[3], name, *per_step))
    rows.sort(key=lambda row: -abs(row[0]))
    total = [sum(row[column] for row in rows) for column in (3, 5)]
    cells = [(row[1][:90], *(f"{value:.1f}" for value in (*row[2:], row[0]))) for row in rows[:_MOST]]
    header = (f"{recorder}, per step", "times", "us", "reference: times", "us", "difference")
    report.table(f"{load}: {total[0]:.0f} us of ours, {total[1]:.0f} us of theirs", header, cells)


def show_stages(load: str, recorder: str, ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    found = [side[recorder]["found"] for side in (ours, theirs)]
    cells = []
    for name in sorted({*found[0], *found[1]}):
        turns_of = [side.get(f"{name.partition(':')[0]}: turn", (1, 0.0))[0] for side in found]
        times = [side.get(name, (0, 0.0))[0] / count for side, count in zip(found, turns_of, strict=True)]
        each = [1e6 * side.get(name, (0, 0.0))[1] / count for side, count in zip(found, turns_of, strict=True)]
        values = (times[0], each[0], times[1], each[1], each[0] - each[1])
        cells.append(
            (name, *(f"{value:.2f}" if number in (0, 2) else f"{value:.0f}" for number, value in enumerate(values)))
        )
    report.table(f"{load}: a turn", ("stage", "times", "us", "reference: times", "us", "difference"), cells)


def parse() -> argparse.Namespace:
    parser = overhead.arguments(__doc__ or "")
    parser.add_argument("--recorders", default="stages", help=f"of {', '.join(profiled.RECORDERS)}")
    parser.set_defaults(loads="28,full", window=2.0, lead_in=3.0)
    return parser.parse_args()


async def main() -> None:
    fleet.begin()
    given = parse()
    recording.possible()
    with tempfile.TemporaryDirectory() as folder:
        part = Where(given, "one", Path(folder))
        await part.run()
        part.write()


if __name__ == "__main__":
    asyncio.run(main())
