"""Host time of one step of SGLang's scheduler: in our engine, and in unmodified SGLang's behind the same socket.

    python -m benchmarks.engine_step [--seconds 1.5] [--rounds 6] [--windows]

With --windows the model has layers with a window, which have a KV pool of their own on both sides.

Two engine processes on the CPU with the same arguments (pages of 16 tokens, overlapping steps), each without a forward
pass (benchmarks/engine_step_process.py), have load in turn. A cell of the table is the CPU time of the process's main
thread from the beginning of one step to that of the next, in microseconds; `process` counts all threads of it, the
driver's among them. The difference is the median over rounds, in each of which both sides have every load once: other
work on the machine comes and goes. Prompts are random and the pool is full of what earlier ones left, so that both
sides evict, as servers do that run for a while.

A GPU's own costs on the host (launching kernels, copies, events) are not in it.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks import _report, engine_step_process
from benchmarks.gpu import fleet, shapes
from benchmarks.gpu.fleet import Client, say
from benchmarks.gpu.model_configs import CONFIGS
from gpu_scheduler.engines.engine import EngineProcess, Spawn
from gpu_scheduler.engines.kinds import KINDS
from protos import common_pb2, engine_pb2
from services.runtime import tasks
from testing.engines import harness

KINDS["step"] = replace(KINDS["echo"], module="benchmarks.engine_step_process")
MODEL = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2} | {
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 256,
}
"""A token's KV is 1/64 of an extent here, as an 8B model's is on a GPU."""
BYTES_PER_TOKEN = shapes.kv_bytes_per_token(MODEL, 4)
"""Bytes of a token of each kind of KV."""
WINDOWS = {
    **CONFIGS["gpt-oss"],
    **MODEL,
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
}
"""Configuration of a model of two layers, of which one has a window and a KV pool for it."""
POOL_TOKENS = 128 << 10
OPTIONS = {
    "random_weights": 1,
    "page_size": 16,
    "overlap": 1,
    "chunked_prefill_size": 2048,
    "max_running_requests": 256,
    "reserve_low": 4,
    "reserve_high": 32,
}
"""Options of both engines, as an engine on a GPU has them."""
CONTEXT_TOKENS = 4096
NAME = "elastic"


@dataclass(frozen=True)
class Case:
    """Always so many requests of this shape."""

    name: str
    requests: int
    prompt: int
    output: int
    temperature: float = 0.0


CASES = (
    Case("decode, 1", 1, 64, 256),
    Case("decode, 32", 32, 64, 256),
    Case("decode, 128", 128, 64, 256),
    Case("sampled, 128", 128, 64, 256, temperature=0.8),
    Case("prefill, 32", 32, 1024, 8),
    Case("mixed, 16", 16, 256, 128),
)
LEAD_IN_S = 0.7

Steps = NDArray[np.int64]
"""A row for each step, columns as `engine_step_process.COLUMNS` says."""


@dataclass
class Window:
    """When a side had the load of a case, by the clock that all processes share (ns)."""

    case: Case
    side: str
    begin: int
    end: int


async def measure(
    folder: Path, seconds: float, rounds: int, chosen: str, profile: Path | None, windows_too: bool
) -> list[dict[str, Any]]:
    limit = POOL_TOKENS * BYTES_PER_TOKEN * (2 if windows_too else 1)
    written = shapes.write(folder / "model", "tiny", **(WINDOWS if windows_too else MODEL))
    model = fleet.Model(written, "cpu:0", CONTEXT_TOKENS, OPTIONS | {"kv_span_bytes": limit})
    async with harness.node(folder, limit + (512 << 20)) as at:
        await at.book(NAME, floor_bytes=limit // 16)
        await at.limit(NAME, limit)
        clients = {side: await _start(at, folder, side, model, profile) for side in engine_step_process.SIDES}
        windows: list[Window] = []
        cases = [case for case in CASES if chosen in case.name]
        for client in clients.values():
            await _load(client, Case("fill", 32, 1024, 2), seconds=0.0, until_evicted=True)
        for number in range(rounds):
            for case in cases:
                order = engine_step_process.SIDES[:: 1 if number % 2 == 0 else -1]
                for side in order:
                    begin, end = await _load(clients[side], case, seconds=seconds)
                    windows.append(Window(case, side, begin, end))
                    say(f"round {number}, {case.name}, {side}")
        await fleet.stop(list(clients.values()))
    steps = {side: _read(folder / f"{side}.steps") for side in clients}
    return [_row(case, side, steps[side], windows) for case in cases for side in clients]


async def _start(at: harness.Node, folder: Path, side: str, model: fleet.Model, profile: Path | None) -> Client:
    environment = {
        engine_step_process.SIDE_VARIABLE: side,
        engine_step_process.LOG_VARIABLE: str(folder / f"{side}.steps"),
    }
    if profile is not None:
        environment[engine_step_process.PROFILE_VARIABLE] = str(profile / f"{side}.prof")
    engine = await EngineProcess.start(Spawn("step", "error", environment, start_timeout_s=fleet.START_S), 1, None)
    await engine.hello(fleet.START_S)
    client = Client(NAME if side == "elastic" else side, engine)
    if side == "elastic":
        load = harness.load(at, NAME, model.path, context_tokens=model.context_tokens, **model.options)
        load.poison_fresh_pages = False
    else:
        spec = common_pb2.ModelSpec(name=side, path=str(model.path), context_tokens=model.context_tokens)
        options = {**model.options, "pool_tokens": POOL_TOKENS}
        load = engine_pb2.Load(model=spec, device="cpu:0", options={key: str(value) for key, value in options.items()})
    client.measured = await engine.command(engine_pb2.ToEngine(load=load)).done()
    say(f"{side} is ready")
    return client


async def _load(client: Client, case: Case, *, seconds: float, until_evicted: bool = False) -> tuple[int, int]:
    """Keeps the case's requests running; returns when it began to count, and when it ended."""
    chance = np.random.default_rng(client.received)
    ending = False

    async def slot(number: int) -> None:
        length = max(2, case.output * (number + 1) // case.requests)
        while not ending:
            prompt = chance.integers(3, MODEL["vocab_size"], case.prompt).tolist()
            reply = client.ask(prompt, length, temperature=case.temperature)
            await reply.ended.wait()
            length = case.output
            if reply.error:
                return

    slots = [tasks.spawn(slot(number), f"slot {number}") for number in range(case.requests)]
    if until_evicted:
        before = client.stats.evicted_tokens
        while client.stats.evicted_tokens == before:
            await asyncio.sleep(0.05)
    else:
        await asyncio.sleep(LEAD_IN_S)
    begin = time.monotonic_ns()
    await asyncio.sleep(seconds)
    end = time.monotonic_ns()
    ending = True
    client.abort_all()
    await client.quiet(60.0)
    await asyncio.gather(*slots)
    return begin, end


def _read(path: Path) -> Steps:
    return np.frombuffer(path.read_bytes(), dtype=np.int64).reshape(-1, len(engine_step_process.COLUMNS))


def _row(case: Case, side: str, steps: Steps, windows: list[Window]) -> dict[str, Any]:
    clock = steps[:, 0]
    spent = []
    mine = [window for window in windows if window.case == case and window.side == side]
    for window in mine:
        first, last = np.searchsorted(clock, (window.begin, window.end))
        spent.append(np.column_stack((np.diff(steps[first:last], axis=0)[:, 1:3] / 1e3, steps[first : last - 1, 3:])))
    return {
        "case": case.name,
        "side": side,
        "steps": sum(len(each) for each in spent),
        "prefill_steps": sum(int(each[:, 3].sum()) for each in spent),
        "requests": float(np.concatenate(spent)[:, 2].mean()),
        "us_of_rounds": {
            "decode p50": [_median(each[each[:, 3] == 0, 0]) for each in spent],
            "prefill p50": [_median(each[each[:, 3] == 1, 0]) for each in spent],
            "mean": [round(float(each[:, 0].mean()), 1) for each in spent],
            "process": [round(float(each[:, 1].mean()), 1) for each in spent],
        },
    }


def _median(samples: NDArray[np.float64]) -> float | None:
    return round(float(np.median(samples)), 1) if len(samples) else None


def show(rows: list[dict[str, Any]]) -> None:
    """Ours, theirs and the difference: medians of the rounds."""
    cells = []
    for ours, theirs in zip(rows[::2], rows[1::2], strict=True):
        for measure, found in ours["us_of_rounds"].items():
            pairs = [(a, b) for a, b in zip(found, theirs["us_of_rounds"][measure], strict=True) if a and b]
            if pairs:
                a, b = np.median(pairs, axis=0)
                more = float(np.median([x - y for x, y in pairs]))
                cells.append((ours["case"], measure, float(a), float(b), more, f"{100 * more / b:+.1f} %"))
    _report.table(("case", "CPU us per step", *engine_step_process.SIDES, "difference", ""), cells)


async def main() -> None:
    fleet.begin()
    parser = _report.arguments("engine_step", __doc__ or "")
    parser.add_argument("--seconds", type=float, default=1.5, help="of a window")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--cases", default="", help="only those whose names contain this")
    parser.add_argument("--windows", action="store_true", help="a model of which half the layers have a window")
    parser.add_argument("--profile", type=Path, help="folder for what cProfile finds in both main threads")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = await measure(Path(folder), given.seconds, given.rounds, given.cases, given.profile, given.windows)
    show(rows)
    _report.write(
        given.out,
        "engine_step",
        {"options": OPTIONS, "pool_tokens": POOL_TOKENS, "windows": given.windows, "rows": rows},
    )


if __name__ == "__main__":
    asyncio.run(main())
