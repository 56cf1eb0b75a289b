"""First tokens of prompts that come to one engine at once: what a prefill step takes that follows another.

    python -m benchmarks.gpu.bursts --out DIR --commit HASH [--device cuda:0] [--shape 1b] [--prompts 6] [--tokens 1770]
        [--case reference '{"prefill_graph_tokens": 512}' '{}'] [--beside 16] [--precedence 0 50] [--record]

Each case is an engine: `reference` unmodified SGLang, anything else ours with these options. All have the model at the
same time; rounds go through the cases in turn, there and back, and every other engine is idle. With `--beside` one more
engine decodes so many streams all the while, once for each `--precedence` (milliseconds that its steps wait at most).

Reported for each case, in milliseconds: the k-th first token of a burst (median over rounds), the time between the
first and the last but two of them for each whole step of the engine's chunk, and of the neighbour the time between two
tokens. With `--record` also where the time of a turn of SGLang's loop goes that prefills (`profiled`, its stages), in
rounds of their own.

Exit status 1 if a request failed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, isnan, nan
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.gpu import fleet, neighbours, profiled, recording, report
from benchmarks.gpu.fleet import Client, say
from benchmarks.gpu.neighbours import Shared
from benchmarks.gpu.series import gaps_of
from gpu_scheduler.config import Arbitration
from gpu_scheduler.engines import shared_board
from gpu_scheduler.engines.shared_board import SharedBoard
from testing.engines import harness

REFERENCE = "reference"
RECORDED = "nothing, recorded"
NEIGHBOUR = "neighbour"
CASES = (REFERENCE, '{"prefill_graph_tokens": 512}', "{}")
_CHUNK_TOKENS, _CONTEXT_TOKENS = 2048, 8192
"""A prefill step of the reference, which has the same as ours; and what the model is served with at least."""
_FLOOR_BYTES = 4 << 20
_STREAM_PROMPT, _STREAM_OUTPUT = 64, 256
_RECORDERS = ("stages",)
_PAUSE_S = 0.05
"""Between two bursts: everything is idle."""


@dataclass
class Case:
    """One engine, and the bursts that it had."""

    name: str
    client: Client
    chunk: int
    bursts: dict[str, list[list[float]]] = field(default_factory=dict)
    """By what went on beside it: the first tokens of each, seconds, in order."""
    spans: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    """When each began and ended."""
    gaps_s: dict[str, list[float]] = field(default_factory=dict)
    """Between two tokens of the neighbour's meanwhile."""

    def firsts_s(self, beside: str) -> list[float]:
        """Medians of the k-th ones."""
        return [median(each) for each in zip(*self.bursts[beside], strict=True)]

    def step_s(self, beside: str, tokens: int) -> float:
        """Between the ends of two whole steps, from the first prompt's end to that of the last but two: no other is
        launched after the last, and the one before that may have the last ones' results with it. NaN where these end
        in one step."""
        firsts = self.firsts_s(beside)
        last = len(firsts) - 3
        steps = ceil((last + 1) * tokens / self.chunk) - ceil(tokens / self.chunk)
        return (firsts[last] - firsts[0]) / steps if steps else nan


def parse() -> argparse.Namespace:
    parser = fleet.parser(__doc__ or "", shape="1b")
    parser.add_argument("--prompts", type=int, default=6, help="that come at once")
    parser.add_argument("--tokens", type=int, default=1770, help="of each")
    parser.add_argument("--rounds", type=int, default=12, help="bursts of each case")
    parser.add_argument("--case", nargs="+", default=list(CASES), help="reference, or options of ours as JSON")
    parser.add_argument("--beside", type=int, default=0, help="streams of another engine that decode meanwhile")
    parser.add_argument("--precedence", type=int, nargs="+", default=[0, 50], help="milliseconds")
    batch = Arbitration().prefill_priority_batch
    parser.add_argument("--precedence-batch", type=int, default=batch, help=f"of those that wait (default {batch})")
    parser.add_argument("--record", action="store_true", help="where the time of a turn goes")
    given = parser.parse_args()
    for case in given.case:
        if case != REFERENCE and not isinstance(json.loads(case), dict):
            parser.error(f"{case} is no JSON object")
    if given.prompts < 4:
        parser.error("a burst has 4 prompts or more")
    return given


@contextlib.asynccontextmanager
async def engines(
    given: argparse.Namespace, shared: Shared, folder: Path, board_fd: int
) -> AsyncIterator[tuple[list[Case], Client | None]]:
    """All of them, with the model; the one beside them last."""
    burst = (given.prompts + 1) * (given.tokens + 8)
    pool_tokens = ceil(burst / 1024) * 1024 + 4096
    kv_bytes = pool_tokens * shared.kv_bytes_per_token
    ours = [name for name in given.case if name != REFERENCE] + [NEIGHBOUR] * bool(given.beside)
    each = shared.weights_bytes + neighbours.LOADING_BYTES + 2 * kv_bytes
    async with harness.node(folder, len(ours) * each + neighbours.SET_ASIDE_BYTES, shared.device) as at:

        async def start(index: int, name: str) -> Client:
            if name == REFERENCE:
                variables = recording.environment("stock", folder / name, _RECORDERS) if given.record else None
                return await fleet.reference(name, shared.model, pool_tokens, environment=variables)
            options = {} if name == NEIGHBOUR else json.loads(name)
            booked = f"engine-{index}"
            variables = recording.environment("sglang", folder / booked, _RECORDERS) if given.record else None
            await at.client.set_booking(
                shared.device,
                booked,
                quota_bytes=neighbours.LOADING_BYTES,
                weights_bytes=shared.weights_bytes,
                floor_bytes=_FLOOR_BYTES,
            )
            given_options = {**shared.model.options, **options}
            model = replace(shared.model, options=given_options, weights_bytes=shared.weights_bytes)
            return await fleet.elastic(at, booked, model, environment=variables, index=index, board_fd=board_fd)

        names = [*given.case, *([NEIGHBOUR] * bool(given.beside))]
        made = await asyncio.gather(*(start(index, name) for index, name in enumerate(names, start=1)))
        try:
            beside = made[-1] if given.beside else None
            cases = [Case(name, client, _chunk(name, client)) for name, client in zip(given.case, made, strict=False)]
            yield cases, beside
        finally:
            await fleet.stop(made)


def _chunk(name: str, client: Client) -> int:
    """Prompt tokens of a whole step of that engine."""
    if name == REFERENCE:
        return _CHUNK_TOKENS
    return int(json.loads(name).get("chunked_prefill_size", client.measured.prefill_chunk_tokens))


async def measure(
    given: argparse.Namespace, cases: Sequence[Case], prompts: Callable[[int], list[int]], beside: str
) -> list[str]:
    """Bursts of all cases in turn; what went wrong."""
    problems = []
    for number in range(given.rounds):
        for case in cases[:: 1 if number % 2 == 0 else -1]:
            replies = [case.client.ask(prompts(given.tokens), 2) for _ in range(given.prompts)]
            await case.client.quiet(60.0)
            problems += [f"{case.name}: {reply.error or reply.finish}" for reply in neighbours.broken(replies)]
            case.bursts.setdefault(beside, []).append(sorted(reply.ttft_s for reply in replies))
            span = min(reply.asked_s for reply in replies), max(reply.last_s for reply in replies)
            case.spans.setdefault(beside, []).append(span)
            await asyncio.sleep(_PAUSE_S)
    return problems


async def measure_beside(
    given: argparse.Namespace,
    cases: Sequence[Case],
    neighbour: Client,
    turn: SharedBoard,
    prompts: Callable[[int], list[int]],
) -> list[str]:
    """The same beside streams that decode, and without the bursts."""
    problems: list[str] = []
    for milliseconds in given.precedence:
        turn.set_prefill_priority(milliseconds / 1e3, given.precedence_batch)
        name = f"{given.beside} streams, precedence {milliseconds} ms"
        async with neighbours.decoding(neighbour, prompts, given.beside, _STREAM_PROMPT, _STREAM_OUTPUT) as replies:
            problems += await measure(given, cases, prompts, name)
            arrived = [reply.arrived_s for reply in replies]
            for case in cases:
                case.gaps_s[name] = [gap for span in case.spans[name] for gap in gaps_of(arrived, *span)]
    return problems


async def record(
    given: argparse.Namespace, cases: Sequence[Case], prompts: Callable[[int], list[int]], folder: Path
) -> tuple[dict[str, profiled.Found], list[str]]:
    """By case where the time of its turns goes, nothing beside; and what went wrong."""
    clients = [case.client for case in cases]

    async def wake(client: Client) -> None:
        client.ask(prompts(1), 1)
        await client.quiet(60.0)

    async with recording.recorded(clients, folder, _RECORDERS[0], wake) as found:
        problems = await measure(given, cases, prompts, RECORDED)
    return {case.name: found[case.client.name] for case in cases}, problems


def show_turns(turns: Mapping[str, profiled.Found]) -> None:
    """Milliseconds of each stage in a turn that prefills, and how often it came."""
    stages = sorted({name for found in turns.values() for name in found if name.startswith("prefill: ")})
    rows = []
    for stage in stages:
        cells = []
        for found in turns.values():
            count, _ = found.get("prefill: turn", (0, 0.0))
            times, seconds = found.get(stage, (0, 0.0))
            cells += [f"{times / max(1, count):.1f}", f"{1e3 * seconds / max(1, count):.2f}"]
        rows.append((stage, *cells))
    header = ("", *(cell for name in turns for cell in (f"{name}: times", "ms")))
    report.table("a turn that prefills", header, rows)


def show(cases: Sequence[Case], tokens: int) -> None:
    for beside in cases[0].bursts:
        rows = []
        for case in cases:
            firsts = [f"{1e3 * each:.1f}" for each in case.firsts_s(beside)]
            gaps = case.gaps_s.get(beside, [])
            between = [f"{1e3 * report.quantile(gaps, q):.1f}" for q in (0.5, 0.99)] if gaps else ["-", "-"]
            rows.append((case.name, str(case.chunk), *firsts, f"{1e3 * case.step_s(beside, tokens):.1f}", *between))
        header = ("", "chunk", *(f"{k + 1}." for k in range(len(rows[0]) - 5)), "a step", "gap p50", "p99")
        report.table(f"first tokens beside {beside}, ms", header, rows)


def as_dict(case: Case, tokens: int) -> dict[str, Any]:
    return {
        "chunk_tokens": case.chunk,
        "measured": fleet.as_dict(case.client.measured),
        "beside": {
            beside: {
                "firsts_s": [[round(each, 6) for each in burst] for burst in bursts],
                "step_s": None if isnan(step_s := case.step_s(beside, tokens)) else step_s,
                "neighbours_gaps_s": [round(gap, 6) for gap in case.gaps_s.get(beside, [])],
            }
            for beside, bursts in case.bursts.items()
        },
    }


async def main() -> None:
    fleet.begin()
    given = parse()
    if given.record:
        recording.possible()
    fd = shared_board.create()
    turn = SharedBoard(fd)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shared = Shared(folder, given.shape, given.device, max(_CONTEXT_TOKENS, given.tokens + 16))
        async with engines(given, shared, folder, fd) as (cases, neighbour):
            everybody = [*(case.client for case in cases), *([neighbour] if neighbour else [])]
            await neighbours.warm_up(shared, everybody, max(8, given.beside), given.tokens)
            prompts = shared.prompts(1)
            for case in cases:  # kernels of whole and of rest steps
                for _ in range(given.prompts):
                    case.client.ask(prompts(given.tokens), 2)
                await case.client.quiet(120.0)
            say("warm")
            problems = await measure(given, cases, prompts, "nothing")
            turns: dict[str, profiled.Found] = {}
            if given.record:
                turns, more = await record(given, cases, prompts, folder)
                problems += more
            if neighbour is not None:
                problems += await measure_beside(given, cases, neighbour, turn, prompts)
    show(cases, given.tokens)
    if turns:
        show_turns(turns)
    body = {
        "arguments": {key: str(value) for key, value in vars(given).items() if key != "out"},
        "cases": {case.name: as_dict(case, given.tokens) for case in cases},
        "turns": turns,
        "problems": problems,
    }
    report.write(given.out, f"gpu_bursts_{given.shape}", given.commit, body)
    fleet.fail(problems)


if __name__ == "__main__":
    asyncio.run(main())
