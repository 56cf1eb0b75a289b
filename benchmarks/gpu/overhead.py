"""What elastic memory costs: our engine beside SGLang with a pool of its own, on one GPU, in turns.

    python -m benchmarks.gpu.overhead --out DIR --commit HASH [--parts one] [--loads 28,32,full]

Both sides are there all the time, with the same random weights, the same arguments and as many bytes for KV. They run
in turns of half a second (A B, B A, A B, ...; `turns`), each under a load of its own, equal to the other's, and by a
clock that stands while the side does. Prompts are random, but for what --shared has them begin with, so every one
leaves something in the prefix cache that later ones push out. Parts:

    one    one elastic engine and SGLang's scheduler behind the same socket: only the memory differs
    two    two elastic engines on the GPU and two of SGLang's, each with half of the load
           (`--precedence 50`: as on a gpu_scheduler, where short prompts go side by side and decode steps wait for
           them, milliseconds at most)
    users  one elastic engine, and sglang.Engine with its own processes, as its users have it

Where there are cores enough, both sides are pinned to the same ones, the main thread of an engine to one of its own.

The model is a shape of `shapes.py`, a checkpoint (--folder), or with --drawn one of `model_configs.py`, in its whole
size or as NAME@LAYERS with its first layers alone, whose random weights each engine draws: nothing of it lies on the
disk. Both sides get the prefill graphs that the model has when it is served. Where requests have states, SGLang keeps
them its own way (`stock_model`), with as many as it wants for --in-flight requests, and ours has the same bytes.

First both are given requests until they have to evict: from then on no memory is mapped. With `--growing` they are not,
and the first windows are those in which it is.

With --batches, before any load: the time from a number of requests that come at once until all have their first
token, and of a decode step with all of them, of each side while the other stands; medians of several takes.

A load is a rate in requests per second (Poisson), or `full`: always `--in-flight` requests. It is cut into windows, as
many as --windows says or the load itself (`full:6`); `32@20` has a precedence of its own. Ratios are ours over theirs,
window by window, with a 95 % confidence interval of their mean.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.gpu import batches, cores, fleet, pairs, report, shapes, turns, windows
from benchmarks.gpu.fleet import Client, Model, say
from benchmarks.gpu.model_configs import config_of
from benchmarks.gpu.windows import Load, Shape, Side, Window
from gpu_scheduler.config import Arbitration
from gpu_scheduler.engines import shared_board
from gpu_scheduler.engines.sharing.prefill_graphs import graph_tokens
from kv_kinds.layout import PADDING_STATES
from loader.checkpoints.architectures.kv_of_config import kv_of_folder
from loader.checkpoints.checkpoint import read
from testing import format_checkpoints
from testing.engines import harness

PARTS = {"one": (1, "scheduler", 40.0), "two": (2, "scheduler", 24.0), "users": (1, "engine", 40.0)}
"""How many engines on each side, which front the reference has, and how many GiB of KV a side has."""
SLACK_BYTES = 1 << 30
_FILLED_S = 120.0
_TAKES = 3


def arguments(description: str) -> argparse.ArgumentParser:
    """With what says which engines there are and what they are asked."""
    parser = fleet.parser(description)
    parser.add_argument("--loads", default="28,32,full")
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--folder", type=Path, help="a checkpoint, instead of random weights of a shape")
    model.add_argument("--drawn", metavar="NAME", help="a model of model_configs.py, with random weights")
    parser.add_argument("--window", type=float, default=4.0, help="seconds of each side")
    parser.add_argument("--lead-in", type=float, default=4.0, help="seconds of each side that are not counted")
    parser.add_argument("--in-flight", type=int, default=256, help="requests, at full load")
    parser.add_argument("--prompt", type=int, default=256, help="tokens")
    parser.add_argument("--shared", type=int, default=0, help="tokens that all prompts begin with")
    parser.add_argument("--output", type=int, default=128, help="tokens")
    parser.add_argument("--context", type=int, default=4096, help="tokens, of the model as it is served")
    parser.add_argument("--kv-gib", type=float, help="of each side, shared by its engines (40; 24 for `two`)")
    parser.add_argument("--options", default="{}", help="engine options as JSON, for both sides")
    parser.add_argument("--reference-options", default="{}", help="more of them, for SGLang alone")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--precedence", type=float, default=0.0, help="ms that our decodes wait for others' prefills")
    batch = Arbitration().prefill_priority_batch
    parser.add_argument("--precedence-batch", type=int, default=batch, help=f"of those that wait (default {batch})")
    return parser


def parse() -> argparse.Namespace:
    parser = arguments(__doc__ or "")
    parser.add_argument("--parts", default="one", help="of one,two,users")
    parser.add_argument("--windows", type=int, default=15)
    parser.add_argument("--turn", type=float, default=0.5, help="seconds")
    parser.add_argument("--batches", type=int, nargs="*", default=[], help="numbers of requests that come at once")
    parser.add_argument("--growing", action="store_true", help="begin with KV that has yet to grow")
    return parser.parse_args()


class Part:
    """One pairing of engines, started once and measured under every load."""

    _at: harness.Node

    def __init__(self, given: argparse.Namespace, name: str, folder: Path) -> None:
        self._given = given
        self._name = name
        self._count, self._front, kv_gib = PARTS[name]
        path = given.folder
        if given.drawn:
            path = format_checkpoints.write_headers(folder / given.drawn, config_of(given.drawn))
            (path / "tokenizer.json").write_text("{}")
        on_host = given.device.startswith("cpu")
        itemsize = 4 if on_host else 2
        if path is None:
            path = shapes.write(folder / given.shape, given.shape)
            config = json.loads((path / "config.json").read_text())
            vocabulary, self._weights_bytes = config["vocab_size"], shapes.weights_bytes(config)
            active_bytes = self._weights_bytes
        else:
            found = read(path, itemsize)
            vocabulary, self._weights_bytes = found.vocabulary, found.weights_bytes + (64 << 20)
            active_bytes = found.active_bytes
        kinds = kv_of_folder(path, itemsize, 1)
        assert kinds is not None, f"what {path} keeps of a request is not known"
        self._kv = kinds.in_extents(harness.extent_bytes(given.device))
        options: dict[str, Any] = {"random_weights": int(given.folder is None)}
        if not on_host:
            options["prefill_graph_tokens"] = graph_tokens(active_bytes)
        requests = given.in_flight
        if any(kind.states for kind in kinds.kinds):
            options["max_running_requests"] = given.in_flight
            requests *= shapes.STATES_OF_A_REQUEST
        options |= json.loads(given.options)
        most = int((given.kv_gib or kv_gib) * 2**30 / self._count)
        self._pool_tokens = self._kv.most_tokens(most, requests) // 64 * 64
        if self._pool_tokens <= 0:
            raise SystemExit(f"--kv-gib: the states of {given.in_flight} requests (--in-flight) take all of it")
        # One state more is for the empty places of a batch.
        self._limit = self._kv.bytes_of(self._pool_tokens, requests + PADDING_STATES)
        self._floor = self._limit // 16
        self._model = Model(path, given.device, given.context, options)
        self._theirs = Model(path, given.device, given.context, {**options, **json.loads(given.reference_options)})
        if not 0 <= given.shared < given.prompt:
            raise SystemExit(f"--shared: from 0 to {given.prompt - 1} tokens of a prompt of {given.prompt}")
        self._shape = Shape(given.prompt, given.output, vocabulary, given.shared)
        self._folder = folder
        self.rows: list[dict[str, Any]] = []
        """Of the summary."""
        self._windows: list[dict[str, Any]] = []
        self._stats: dict[str, Any] = {}
        self._about: dict[str, Any] = {}
        self._words: shared_board.SharedBoard | None = None

    async def run(self) -> None:
        weights = -(-self._weights_bytes // (64 << 20)) * (64 << 20)
        capacity = self._count * (weights + self._limit) + SLACK_BYTES
        async with harness.node(self._folder, capacity, self._given.device) as at:
            self._at = at
            names = [f"elastic-{number}" for number in range(self._count)]
            for name in names:
                await at.book(name, floor_bytes=self._floor, weights_bytes=weights)
                await at.limit(name, self._limit)
            say(f"{self._name}: {self._count} and {self._count} engines, {self._limit / 2**30:.2f} GiB of KV each")
            arbitrated = self._given.precedence or "@" in self._given.loads
            board_fd = shared_board.create() if arbitrated else None
            starting = [
                fleet.elastic(
                    at,
                    name,
                    self._model,
                    environment=self._environment(name, "sglang"),
                    index=index,
                    board_fd=board_fd,
                )
                for index, name in enumerate(names, start=1)
            ] + [
                fleet.reference(
                    name, self._theirs, self._pool_tokens, self._front, environment=self._environment(name, "stock")
                )
                for name in (f"stock-{number}" for number in range(self._count))
            ]
            clients = await asyncio.gather(*starting)
            try:
                ours, theirs = clients[: self._count], clients[self._count :]
                if board_fd is not None:
                    self._words = shared_board.SharedBoard(board_fd)
                await self._measure(Side("elastic", ours), Side("reference", theirs))
            finally:
                await fleet.stop(clients)

    def _environment(self, _name: str, _kind: str) -> Mapping[str, str]:
        """Of an engine's process."""
        return {}

    async def _warm_up(self, clients: Sequence[Client]) -> None:
        begun = time.monotonic()
        most = int(self._model.options.get("max_running_requests", self._given.in_flight))
        await asyncio.gather(
            *(
                windows.warm_up(client, self._shape, min(most, self._given.in_flight), 1000 + number)
                for number, client in enumerate(clients)
            )
        )
        say(f"warm after {time.monotonic() - begun:.1f} s")

    async def _measure(self, ours: Side, theirs: Side) -> None:
        clients = [*ours.clients, *theirs.clients]
        await self._warm_up(clients)
        if not self._given.growing:
            for side in (ours, theirs):
                await self._fill(side)
        pinned = cores.plan(self._count, sorted(os.sched_getaffinity(0)))
        if pinned is not None:
            cores.apply(pinned, [side.pids() for side in (ours, theirs)], main_thread=self._front == "scheduler")
        self._about = {
            "cores": None if pinned is None else {name: sorted(value) for name, value in vars(pinned).items()},
            "measured": {client.name: fleet.as_dict(client.measured) for client in clients},
            "pool_tokens": self._pool_tokens,
            "kv_bytes_per_token": self._kv.marginal(0),
            "same_answers_alone": await self._same(clients),
            "gpu_memory_used_mib": report.smi("memory.used"),
            "clocks": {"before": report.smi("clocks.sm,temperature.gpu,power.draw")},
        }
        say(f"answers alone: {self._about['same_answers_alone']}; GPU has {self._about['gpu_memory_used_mib']} MiB")
        if self._given.batches:
            self._about["batches"] = [await self._batch(clients, count) for count in self._given.batches]
            _show_batches(self._about["batches"])
        for number, each in enumerate(self._given.loads.split(",")):
            name, _, count = each.partition(":")
            load, _, precedence_ms = name.partition("@")
            if self._words is not None:
                precedence_s = float(precedence_ms or self._given.precedence) / 1e3
                self._words.set_prefill_priority(precedence_s, self._given.precedence_batch)
            await self._compare((ours, theirs), load, name, int(count or self._given.windows), 100 * (number + 1))

    async def _fill(self, side: Side) -> None:
        """Requests until every engine of the side has begun to evict what it cached."""
        begun = time.monotonic()
        clock = turns.Clock()
        clock.start()
        load = Load(side, clock, self._shape, 5_000 + self._given.seed)
        load.begin_full(self._given.in_flight)
        async with asyncio.timeout(_FILLED_S):
            while not all(client.stats.evicted_tokens for client in side.clients):
                await asyncio.sleep(0.1)
        await load.end()
        say(f"{side.name} is full after {time.monotonic() - begun:.1f} s")

    async def _same(self, clients: list[Client]) -> str:
        """Whether all say the same, one prompt at a time: the same weights, then."""
        prompt = self._shape.prompts(5)
        equal = 0
        for _ in range(4):
            said = []
            tokens = prompt()
            for client in clients:
                reply = client.ask(tokens, 16)
                await client.quiet(windows.DRAIN_S)
                said.append(reply.tokens)
            equal += all(other == said[0] for other in said)
        return f"{equal} of 4 equal"

    async def _batch(self, clients: Sequence[Client], count: int) -> dict[str, Any]:
        """Milliseconds until `count` requests that come at once have their first token, and of a decode step with all
        of them, of each client; medians."""
        prompt = self._shape.prompts(50_000 + count)
        firsts: dict[str, list[float]] = {client.name: [] for client in clients}
        took: dict[str, list[float]] = {client.name: [] for client in clients}
        for _ in range(_TAKES):
            for client in clients:
                found, replies = await batches.steps(client, [prompt() for _ in range(count)], "greedy")
                firsts[client.name].append(max(each.first_s for each in replies) - replies[0].asked_s)
                took[client.name] += found
        medians = {
            name: {"first_tokens_ms": 1e3 * median(firsts[name]), "step_ms": 1e3 * median(took[name] or [float("nan")])}
            for name in firsts
        }
        return {"requests": count, **medians}

    async def _compare(self, sides: tuple[Side, Side], load: str, name: str, count: int, seed: int) -> None:
        """Measures both sides under a load, `name` in results, and writes what was found. A run that is interrupted
        keeps the windows that were over."""
        clocks = [turns.Clock() for _ in sides]
        processes = [turns.Processes(side.pids()) for side in sides]
        loads = [
            Load(side, clock, self._shape, self._given.seed * 10_000 + seed)
            for side, clock in zip(sides, clocks, strict=True)
        ]
        with windows.no_collector():
            try:
                await self._in_turns(load, count, loads, clocks, processes)
            except asyncio.CancelledError:
                self._keep(sides, loads, name)
                raise
            finally:
                for each in processes:
                    each.go_on()
            await asyncio.gather(*(each.end() for each in loads))
        self._keep(sides, loads, name)

    def _keep(self, sides: tuple[Side, Side], loads: list[Load], name: str) -> None:
        """Adds the windows of a load to the results, shows and writes them; nothing without a window."""
        ours, theirs = (each.windows() for each in loads)
        if not ours:
            return
        for side, each, some in zip(sides, loads, (ours, theirs), strict=True):
            self._windows += [{"load": name, "number": k, **asdict(window)} for k, window in enumerate(some)]
            self._stats[f"{name}, {side.name}"] = {"before": each.before, "after": side.stats()}
        stats = [(each.before, side.stats()) for side, each in zip(sides, loads, strict=True)]
        rows = _ratios(self._name, name, ours, theirs, stats)
        show(rows)
        self.rows += rows
        self._about["clocks"][f"after {name}"] = report.smi("clocks.sm,temperature.gpu,power.draw")
        self._write()

    async def _in_turns(
        self, load: str, count: int, loads: list[Load], clocks: list[turns.Clock], processes: list[turns.Processes]
    ) -> None:
        given = self._given
        for each in loads:
            if load == "full":
                each.begin_full(given.in_flight)
            else:
                each.begin_steady(float(load))
        for each in processes:
            each.stop()
        await self._turns(clocks, processes, given.lead_in)
        for number in range(count):
            for each in loads:
                each.edge()
            await self._turns(clocks, processes, given.window)
            say(f"{self._name}, {load}: window {number + 1} of {count}")
        for each in loads:
            each.edge()

    async def _turns(self, clocks: list[turns.Clock], processes: list[turns.Processes], seconds: float) -> None:
        rounds = max(1, int(seconds / (2 * self._given.turn)))
        await turns.take(clocks, processes, self._given.turn, 4 * rounds)

    def _write(self) -> None:
        body = {
            "part": self._name,
            "arguments": {key: str(value) for key, value in vars(self._given).items() if key != "out"},
            **self._about,
            "summary": self.rows,
            "stats": self._stats,
            "windows": self._windows,
        }
        report.write(self._given.out, f"gpu_overhead_{self._name}", self._given.commit, body)


def _show_batches(found: Sequence[Mapping[str, Any]]) -> None:
    cells = [
        (str(row["requests"]), name, f"{of['first_tokens_ms']:.2f}", f"{of['step_ms']:.3f}")
        for row in found
        for name, of in row.items()
        if name != "requests"
    ]
    report.table("requests that come at once", ("requests", "", "all first tokens, ms", "decode step, ms"), cells)


Stats = tuple[list[dict[str, Any]], list[dict[str, Any]]]
"""Of a side's engines, before and after a load."""


def _ratios(part: str, load: str, ours: list[Window], theirs: list[Window], stats: list[Stats]) -> list[dict[str, Any]]:
    rows = []
    for measure in ours[0].measures():
        a = [window.measures()[measure] for window in ours]
        b = [window.measures()[measure] for window in theirs]
        each = pairs.ratios(a, b)
        found = pairs.interval(each)
        rows.append(
            {
                "part": part,
                "load": load,
                "measure": measure,
                "elastic": sum(a) / len(a),
                "reference": sum(b) / len(b),
                "ratio": found.mean,
                "half": found.half,
                "ratios": each,
                "failed": sum(window.failed for window in (*ours, *theirs)),
                "evicted_tokens": [_gained(side, "evicted_tokens") for side in stats],
                "retractions": [_gained(side, "retractions") for side in stats],
            }
        )
    return rows


def _gained(side: Stats, counter: str) -> int:
    return sum(after.get(counter, 0) - before.get(counter, 0) for before, after in zip(*side, strict=True))


def show(rows: list[dict[str, Any]]) -> None:
    header = ("part", "load", "measure", "elastic", "reference", "ratio, 95 %", "evicted tokens", "failed")
    cells = []
    for row in rows:
        of_time = row["measure"] != "tokens/s"  # everything else is in seconds
        values = [f"{1e3 * row[side]:.2f} ms" if of_time else f"{row[side]:.0f}" for side in ("elastic", "reference")]
        ratio = str(pairs.Interval(row["ratio"], row["half"], len(row["ratios"])))
        evicted = " / ".join(str(count) for count in row["evicted_tokens"])
        cells.append((row["part"], row["load"], row["measure"], *values, ratio, evicted, row["failed"]))
    report.table("elastic memory beside SGLang's own", header, cells)


async def main() -> None:
    fleet.begin()
    given = parse()
    rows: list[dict[str, Any]] = []
    problems: list[str] = []
    for name in given.parts.split(","):
        with tempfile.TemporaryDirectory() as folder:
            part = Part(given, name, Path(folder))
            try:
                await part.run()
            except Exception as error:
                traceback.print_exc()
                problems.append(f"{name}: {type(error).__name__}: {error}")
            rows += part.rows
    if rows:
        show(rows)
    fleet.fail(problems)


if __name__ == "__main__":
    asyncio.run(main())
