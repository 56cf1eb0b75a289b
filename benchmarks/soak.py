"""A long run: does anything grow? Echo engines on two groups of CPU pages, two gateways, ten models and one more that
the catalogue's file keeps changing; ten streams all the time, and everything of testing/chaos/bustle.py beside them.
Before that models of new names come and go, so that what is kept of the last so many is full.

    python -m benchmarks.soak --minutes 60 --out benchmarks/results/soak.json

Every 15 s of each process: resident, own and shared memory, descriptors, threads, processor time; of the node: what the
ledger counts, what the kernel counts of extents and images, files and bytes of the state folder, lines of metrics, and
what Python's allocator has given out: that a leak makes grow, and holes in memory do not. At the end a line through
each curve without its first ten minutes. docs/lab/reliability.md has the results.
"""

from __future__ import annotations

import asyncio
import dataclasses
import sys
import time
import tomllib
from collections import defaultdict
from pathlib import Path
from typing import Any

import services.ipc.forking  # noqa: F401  (before grpc: this starts processes)

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import aiohttp  # noqa: E402

from benchmarks import _report  # noqa: E402
from services.errors import PrismError  # noqa: E402
from testing.chaos import curves  # noqa: E402
from testing.chaos.bustle import Bustle  # noqa: E402
from testing.chaos.ledger_audit import LedgerAudit, held  # noqa: E402
from testing.chaos.load import steady  # noqa: E402
from testing.chaos.world import Chaos, KeyFile, chaos, watched  # noqa: E402
from testing.systems.local import FOLDER, MODELS  # noqa: E402

STREAMS = 10
STEP_MS = 200
COUNT = 10
SAMPLE_S = 15.0
METRICS_PORT = 18_600
"""And the next ones: below those that the kernel gives to clients."""
HOST_BYTES = 48 << 20
"""Of weight images: less than all of them, so that some come back from disk."""
Curves = dict[str, list[float]]


def models() -> dict[str, dict[str, Any]]:
    """The catalogue's entries, by name: the examples, some of them under several names."""
    return {
        name if i < len(MODELS) else f"{name}-{i}": {"path": str(FOLDER / name)}
        for i, name in ((i, MODELS[i % len(MODELS)]) for i in range(COUNT))
    }


def metrics_bases(it: Chaos) -> dict[str, str]:
    """Where services that have no gateway's page tell their metrics."""
    found = {}
    for process in it.local.processes():
        if "--config" in process.arguments:
            config = tomllib.loads(Path(process.arguments[process.arguments.index("--config") + 1]).read_text())
            if "metrics" in config:
                found[process.name] = "http://" + config["metrics"]
    return found


class Sampler:
    """Curves of everything that is there."""

    def __init__(self, it: Chaos) -> None:
        self._it = it
        self._metrics = metrics_bases(it)
        self._began = time.monotonic()
        self.times_s: list[float] = []
        self.curves: Curves = defaultdict(list)

    async def look(self) -> None:
        """One sample of all. Raises PrismError when balloond does not answer."""
        state = await self._it.balloond.inspect()
        found = {f"{name}.{key}": value for name, values in self._processes().items() for key, value in values.items()}
        for key in ("leased_bytes", "free_bytes", "booked_bytes", "stranded_bytes"):
            found[f"ledger.{key}"] = sum(getattr(device, key) for device in state.devices)
        found["ledger.leases"] = sum(len(device.leases) for device in state.devices)
        found["ledger.bookings"] = sum(len(device.bookings) for device in state.devices)
        found["kernel.extents_and_images_bytes"] = held(self._it.pids())
        files = [path.stat().st_size for path in self._it.local.state.rglob("*") if path.is_file()]
        found["state.files"], found["state.bytes"] = len(files), sum(files)
        for name, base in {**self._metrics, **self._it.bases}.items():
            async with self._it.http.get(base + "/metrics") as answer:
                text = await answer.text()
            found[f"{name}.metrics_lines"] = text.count("\n")
            found[f"{name}.python_blocks"] = float(text.partition("\nprism_python_blocks ")[2].partition("\n")[0])
        self.times_s.append(time.monotonic() - self._began)
        for key, value in found.items():
            self.curves[key].append(value)

    def _processes(self) -> dict[str, dict[str, float]]:
        """Services by name. Of engines, which come and go, how many and the mean of each figure."""
        found = {name: curves.sample(running.pid) for name, running in self._it.system.running.items()}
        engines = []
        for pid in self._it.engine_pids():
            try:
                engines.append(curves.sample(pid))
            except (FileNotFoundError, ProcessLookupError):
                continue  # it ended meanwhile
        found["engines"] = {"count": len(engines)} | {
            key: sum(each[key] for each in engines) / len(engines) for each in engines[:1] for key in each
        }
        return found


async def measure(minutes: float, warm_up_minutes: float, names: int) -> dict[str, Any]:
    keys, entries = KeyFile(), models()
    async with chaos(
        STREAMS,
        step_ms=STEP_MS,
        models=entries,
        keys=keys,
        images_on_disk=True,
        host_capacity_bytes=HOST_BYTES,
        metrics_port=METRICS_PORT,
    ) as it:
        sampler = Sampler(it)
        bustle = Bustle(it, keys, entries)
        async with watched(it) as books, steady(it.load) as load:
            await bustle.names(names)
            print(f"{names} models came and went", flush=True)
            async with bustle.going_on():
                end = time.monotonic() + 60 * minutes
                while time.monotonic() < end:
                    try:
                        await sampler.look()
                    except (PrismError, OSError, aiohttp.ClientError) as error:
                        bustle.failed.append(f"a sample: {type(error).__name__}: {error}")
                    _say(sampler, it, bustle, books)
                    await asyncio.sleep(SAMPLE_S)
        try:
            ledger, kernel = await it.left_behind()
        except TimeoutError as error:  # an hour's curves are worth more than its end
            bustle.failed.append(f"what is left behind: {error}")
            ledger = kernel = -1
        restarts = {name: running.restarts for name, running in it.system.running.items()}
        return {
            "streams_ended": load.ended,
            "streams_failed": [dataclasses.asdict(failure) for failure in load.failures],
            "streams_wrong": load.wrong,
            "streams_taken_up_again": it.taken_up_again(),
            "connections_refused": load.refused,
            "longest_pause_s": load.longest_gap_s,
            "restarts": restarts,
            "ledger_looks": books.looks,
            "ledger_unequal": books.unequal,
            "left_behind": {"ledger_bytes": ledger, "kernel_bytes": kernel},
            "events": dict(bustle.done),
            "events_refused": dict(bustle.refused),
            "events_failed": bustle.failed,
            "cpu_cores": _cores(sampler),
            "fits": fits(sampler.times_s, sampler.curves, 60 * warm_up_minutes),
            "times_s": [round(at, 1) for at in sampler.times_s],
            "curves": sampler.curves,
        }


def fits(times_s: list[float], found: Curves, warm_up_s: float) -> dict[str, dict[str, float]]:
    """Of each curve, after the warm-up."""
    skipped = sum(at < warm_up_s for at in times_s)
    return {
        name: dataclasses.asdict(curves.fit(times_s[skipped:], values[skipped:]))
        for name, values in found.items()
        if len(values) == len(times_s) >= skipped + 3
    }


def _cores(sampler: Sampler) -> dict[str, float]:
    """Of each service, on average."""
    lasted = sampler.times_s[-1] - sampler.times_s[0]
    return {
        name.removesuffix(".cpu_s"): (values[-1] - values[0]) / lasted
        for name, values in sampler.curves.items()
        if name.endswith(".cpu_s") and not name.startswith("engines")
    }


def _say(sampler: Sampler, it: Chaos, bustle: Bustle, books: LedgerAudit) -> None:
    load = it.load
    latest = {name: values[-1] for name, values in sampler.curves.items()}
    own = {name.split(".")[0]: round(v / 2**20, 1) for name, v in latest.items() if name.endswith(".own_bytes")}
    counted = f"ended {load.ended}, failed {len(load.failures)}, wrong {len(load.wrong)}, unequal {len(books.unequal)}"
    events = f"events {bustle.done.total()}, refused {bustle.refused.total()}, failed {len(bustle.failed)}"
    print(f"{sampler.times_s[-1] if sampler.times_s else 0:.0f} s: {counted}; {events}; own MiB {own}", flush=True)
    for why in (*load.failures[-2:], *bustle.failed[-2:]):
        print(f"    {why}", flush=True)


def main() -> None:
    parser = _report.arguments("soak", __doc__ or "")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--warm-up-minutes", type=float, default=10.0, help="left out of the lines (%(default)s)")
    parser.add_argument("--names", type=int, default=150, help="models that come and go before (%(default)s)")
    arguments = parser.parse_args()
    found = asyncio.run(measure(arguments.minutes, arguments.warm_up_minutes, arguments.names))
    rows = [
        (name, *(each[key] for key in ("slope_per_hour", "error_per_hour", "first", "last", "most")))
        for name, each in found["fits"].items()
        if not name.endswith("cpu_s")
    ]
    _report.table(("curve", "slope per hour", "its error", "first", "last", "most"), rows)
    circumstances = {"minutes": arguments.minutes, "streams": STREAMS, "step_ms": STEP_MS, "models": COUNT}
    _report.write(arguments.out, "soak", {**circumstances, **found})


if __name__ == "__main__":
    main()
