"""What it costs two busy engines to share the memory of a device that is full, beside the same memory in halves.

    python -m benchmarks.gpu.full_device --out DIR --commit HASH [--rounds 6]

Two elastic engines on one GPU, each with as many requests as `--in-flight` at all times, which want more memory than
there is. In turns (A B, B A, ...) each may have half of the KV memory and no more, so that nobody asks anybody for
any; and both may have all. As much memory is there in both, and as much is asked: whatever tokens a second are fewer
when it is shared goes into passing it back and forth. With 95 % intervals over the rounds. `--skew 0.2`: the second
engine has so many of the requests in flight, relative to the first; then sharing is to be the better of the two.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.gpu import fleet, pairs, report, shapes, turns, windows
from benchmarks.gpu.fleet import Client, Model, say
from benchmarks.gpu.windows import Load, Shape, Side
from testing.engines import harness

NAMES = ("first", "second")
MODES = ("halves", "shared")
SLACK_BYTES = 1 << 30
COUNTERS = ("evicted_tokens", "retractions", "evicting_s", "forward_steps", "prefill_tokens", "decode_tokens")


class FullDevice:
    def __init__(self, given: argparse.Namespace, folder: Path) -> None:
        self._given = given
        self._path = shapes.write(folder / given.shape, given.shape)
        config = json.loads((self._path / "config.json").read_text())
        on_host = given.device.startswith("cpu")
        self._kv_bytes = int(given.kv_gib * 2**30) >> 23 << 23
        self._weights = -(-shapes.weights_bytes(config) // (64 << 20)) * (64 << 20)
        self._model = Model(self._path, given.device, given.context, {"random_weights": 1, **json.loads(given.options)})
        self._shape = Shape(given.prompt, given.output, config["vocab_size"])
        self._folder = folder
        self._floor = int(shapes.kv_bytes_per_token(config, 4 if on_host else 2) * given.context * 1.1)
        self.found: list[dict[str, Any]] = []
        """Of each window, in their order."""

    async def run(self) -> None:
        capacity = 2 * self._weights + self._kv_bytes + SLACK_BYTES
        async with harness.node(self._folder, capacity, self._given.device) as at:
            for name in NAMES:
                await at.book(name, floor_bytes=self._floor, weights_bytes=self._weights)
                await at.limit(name, self._kv_bytes // 2)
            clients = await asyncio.gather(
                *(fleet.elastic(at, name, self._model, index=index) for index, name in enumerate(NAMES, start=1))
            )
            try:
                await asyncio.gather(
                    *(windows.warm_up(client, self._shape, 16, number) for number, client in enumerate(clients))
                )
                await self._fill_up(at)
                await self._measure(at, clients)
            finally:
                await fleet.stop(clients)

    async def _fill_up(self, at: harness.Node) -> None:
        """What the device has beyond the KV memory is nobody's: a model that never comes."""
        (device,) = (await at.client.inspect()).devices
        weights = {lease.model: lease.weights_bytes for lease in device.leases}
        for name in NAMES:
            await at.book(name, floor_bytes=self._floor, weights_bytes=weights[name])
        spare = device.capacity_bytes - sum(weights.values()) - self._kv_bytes
        await at.client.set_booking(at.device, "nobody", quota_bytes=spare, weights_bytes=0, floor_bytes=0)

    async def _measure(self, at: harness.Node, clients: Sequence[Client]) -> None:
        counts = (self._given.in_flight, max(1, round(self._given.skew * self._given.in_flight)))
        clock = turns.Clock()
        clock.start()
        loads = [
            Load(Side(name, [client]), clock, self._shape, self._given.seed + number)
            for number, (name, client) in enumerate(zip(NAMES, clients, strict=True))
        ]
        with windows.no_collector():
            for load, count in zip(loads, counts, strict=True):
                load.begin_full(count)
            order = [mode for number in range(self._given.rounds) for mode in MODES[:: 1 if number % 2 == 0 else -1]]
            before: list[dict[str, Any]] = []
            for number, mode in enumerate(order):
                most = self._kv_bytes // 2 if mode == "halves" else self._kv_bytes
                for name in NAMES:
                    await at.limit(name, most)
                await asyncio.sleep(self._given.lead_in)
                before += [fleet.as_dict(client.stats) for client in clients]
                for load in loads:
                    load.edge()
                await asyncio.sleep(self._given.window)
                for load, client in zip(loads, clients, strict=True):
                    load.edge()
                    before.append(fleet.as_dict(client.stats))
                say(f"window {number + 1} of {len(order)}: {mode}")
            await asyncio.gather(*(load.end() for load in loads))
        for index, load in enumerate(loads):
            for number, (mode, window) in enumerate(zip(order, load.windows()[::2], strict=True)):
                earlier, later = before[4 * number + index], before[4 * number + 2 + index]
                did = {key: later.get(key, 0) - earlier.get(key, 0) for key in COUNTERS}
                did |= {"kv_used_bytes": later.get("kv_used_bytes", 0), "running": later.get("running", 0)}
                self.found.append({"mode": mode, "number": number, **asdict(window), "did": did})


def ratios(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Shared over halves, round by round: tokens of both engines, and each one's mean TPOT."""
    rounds = sorted({window["number"] // 2 for window in found})

    def of(mode: str, number: int) -> list[dict[str, Any]]:
        return [window for window in found if window["mode"] == mode and window["number"] // 2 == number]

    def speed(mode: str) -> list[float]:
        return [sum(window["tokens"] / window["seconds"] for window in of(mode, number)) for number in rounds]

    def step_ms(mode: str, name: str) -> list[float]:
        every = [window for number in rounds for window in of(mode, number)]
        return [1e3 * _mean(window["tpot_s"]) for window in every if window["side"] == name]

    return [
        _row("tokens/s, both", speed("shared"), speed("halves")),
        *(_row(f"mean TPOT, {name}, ms", step_ms("shared", name), step_ms("halves", name)) for name in NAMES),
    ]


def _row(measure: str, shared: Sequence[float], halves: Sequence[float]) -> dict[str, Any]:
    each = pairs.ratios(shared, halves)
    found = pairs.interval(each)
    means = [sum(values) / len(values) for values in (shared, halves)]
    return {"measure": measure, "shared": means[0], "halves": means[1], "ratio": found.mean, "half": found.half}


def _mean(samples: Sequence[float]) -> float:
    return sum(samples) / len(samples) if samples else float("nan")


def show(found: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]]) -> None:
    cells = [
        (w["mode"], w["side"], w["tokens"] / w["seconds"], 1e3 * _mean(w["tpot_s"]), w["requests"], *w["did"].values())
        for w in found
    ]
    report.table("windows", ("mode", "engine", "tokens/s", "TPOT ms", "requests", *found[0]["did"]), cells)
    cells = [(row["measure"], row["shared"], row["halves"], f"{row['ratio']:.4f} ± {row['half']:.4f}") for row in rows]
    report.table("a full device", ("", "shared", "halves", "ratio, 95 %"), cells)


def main() -> None:
    parser = fleet.parser(__doc__ or "")
    parser.add_argument("--kv-gib", type=float, default=8.0, help="of both")
    parser.add_argument("--in-flight", type=int, default=48, help="requests of the first engine")
    parser.add_argument("--skew", type=float, default=1.0, help="of the second, relative to the first")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens")
    parser.add_argument("--output", type=int, default=256, help="tokens")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--window", type=float, default=6.0, help="seconds")
    parser.add_argument("--lead-in", type=float, default=3.0, help="seconds that are not counted")
    parser.add_argument("--options", default="{}", help="engine options as JSON")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    fleet.begin()
    with tempfile.TemporaryDirectory() as folder:
        bench = FullDevice(given, Path(folder))
        asyncio.run(bench.run())
    rows = ratios(bench.found)
    arguments = {key: str(value) for key, value in vars(given).items() if key != "out"}
    body = {"arguments": arguments, "summary": rows, "windows": bench.found}
    report.write(given.out, "gpu_full_device", given.commit, body)
    show(bench.found, rows)


if __name__ == "__main__":
    main()
