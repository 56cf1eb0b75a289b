"""Time per token and to the first token of a model with adapters (LoRA), beside the model without room for adapters and
beside unmodified SGLang with the same adapters.

    python -m benchmarks.gpu.adapters --out DIR --commit HASH [--shape 8b] [--limit-s 200]

Three engines are on the GPU, with the same random weights: ours without room for adapters, ours with room, and SGLang's
scheduler behind the same socket, with room. They are asked in turns, in one order and then in the other, while the
others are idle: the base alone, all requests with one adapter, and those of a batch with four. Each time all requests
of a batch come at once, with new random prompts; the time to the first token is the mean of them, and a decode step is
what the last of them to begin took for each of its tokens. All adapters are in their buffers before anything counts.

DIR/gpu_adapters.json has seconds of every round, and for each case the ratio to our base without room, and to SGLang in
the same case, with 95 % confidence intervals over the rounds; `same_answers` counts prompts for which our greedy tokens
are SGLang's. It ends within --limit-s, with as many rounds as there is time for. Exit status 1 if a request fails or
there was no time for two rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.gpu import fleet, pairs, report, shapes, windows
from benchmarks.gpu.fleet import Client, Model, say
from benchmarks.gpu.windows import Shape
from protos import common_pb2
from testing.engines import harness

_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_ADAPTERS = 4
_SLOTS = 1 + _ADAPTERS
"""Room for adapters that the loader makes for a base with so many of them."""
_CONTEXT = 4096
"""Tokens, of the model as it is served: a prefill step is no longer."""
_ENDS_S = 12.0
"""Seconds kept for stopping the engines and writing the results."""
_DRAIN_S = 60.0
MEASURES = ("first token", "decode step")
PLAIN = "base, no room"


@dataclass(frozen=True)
class Case:
    """An engine, and the adapters that requests of a batch have in turn; none: the base answers."""

    name: str
    client: Client
    adapters: Sequence[common_pb2.Adapter] = ()
    like: str = ""
    """Name of the case of ours that SGLang's is compared with."""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = fleet.parser(__doc__ or "")
    parser.add_argument("--rank", type=int, default=16, help="of the adapters")
    parser.add_argument("--batches", default="1,32", help="requests at once")
    parser.add_argument("--prompt", type=int, default=256, help="tokens")
    parser.add_argument("--output", type=int, default=48, help="tokens")
    parser.add_argument("--rounds", type=int, default=24, help="at most")
    parser.add_argument("--kv-gib", type=float, default=8.0, help="of each engine")
    parser.add_argument("--limit-s", type=float, default=200.0, help="for all of it")
    return parser.parse_args(arguments)


async def measured(case: Case, prompts: Sequence[Sequence[int]], new_tokens: int) -> dict[str, float]:
    """Seconds by measure. Raises RuntimeError if a request fails."""
    replies = []
    for number, prompt in enumerate(prompts):
        adapter = case.adapters[number % len(case.adapters)] if case.adapters else None
        replies.append(case.client.ask(prompt, new_tokens, adapter=adapter))
    await case.client.quiet(_DRAIN_S)
    for reply in replies:
        if not reply.ok or len(reply.tokens) != new_tokens:
            raise RuntimeError(f"{case.name}: finish {reply.finish}, {len(reply.tokens)} tokens, {reply.error!r}")
    last = max(replies, key=lambda reply: reply.first_s)
    return {MEASURES[0]: sum(reply.ttft_s for reply in replies) / len(replies), MEASURES[1]: last.tpot_s}


class Rounds:
    """Seconds of every round so far, by batch, case and measure."""

    def __init__(self, cases: Sequence[Case], batches: Sequence[int]) -> None:
        self.cases = cases
        self.batches = batches
        self.seconds: dict[tuple[int, str, str], list[float]] = defaultdict(list)

    def of(self, batch: int) -> list[Case]:
        """Those that this batch is large enough for."""
        return [case for case in self.cases if len(case.adapters) <= batch]

    async def one(self, shape: Shape, new_tokens: int, number: int) -> None:
        """Every case once, in one order or in the other. Nothing is kept of a round that fails."""
        prompt = shape.prompts(10_000 + number)
        found: dict[tuple[int, str, str], float] = {}
        for batch in self.batches:
            cases = self.of(batch)
            for case in cases if number % 2 == 0 else reversed(cases):
                values = await measured(case, [prompt() for _ in range(batch)], new_tokens)
                found |= {(batch, case.name, measure): value for measure, value in values.items()}
        for key, value in found.items():
            self.seconds[key].append(value)

    def summary(self) -> list[dict[str, Any]]:
        """A row for each batch, case and measure."""
        rows = []
        for batch in self.batches:
            for case in self.of(batch):
                for measure in MEASURES:
                    own = self.seconds[batch, case.name, measure]
                    row: dict[str, Any] = {"batch": batch, "case": case.name, "measure": measure}
                    row |= {"seconds": sum(own) / len(own) if own else None, "rounds": len(own)}
                    row["to_plain"] = _ratio(own, self.seconds[batch, PLAIN, measure])
                    if case.like:
                        row["ours_to_this"] = _ratio(self.seconds[batch, case.like, measure], own)
                    rows.append(row)
        return rows

    def raw(self) -> list[dict[str, Any]]:
        return [
            {"batch": batch, "case": case, "measure": measure, "seconds": [round(value, 7) for value in values]}
            for (batch, case, measure), values in self.seconds.items()
        ]


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, Any]:
    each = pairs.ratios(ours, theirs)
    found = pairs.interval(each)
    return {"mean": found.mean, "half": found.half, "n": found.n}


def show(rows: Sequence[dict[str, Any]]) -> None:
    def text(found: dict[str, Any] | None) -> str:
        return str(pairs.Interval(found["mean"], found["half"], found["n"])) if found else ""

    cells = [
        (
            row["batch"],
            row["case"],
            row["measure"],
            f"{1e3 * row['seconds']:.2f} ms" if row["seconds"] is not None else "",
            text(row["to_plain"]),
            text(row.get("ours_to_this")),
        )
        for row in rows
    ]
    report.table("adapters", ("batch", "case", "measure", "mean", f"to {PLAIN!r}, 95 %", "ours to this"), cells)


async def same_answers(ours: Case, theirs: Case, shape: Shape) -> str:
    """How many prompts of each adapter, one at a time, get the same greedy tokens: the same adapters, then."""
    equal = asked = 0
    prompt = shape.prompts(7)
    for adapter in ours.adapters:
        tokens = prompt()
        said = []
        for client in (ours.client, theirs.client):
            reply = client.ask(tokens, 16, adapter=adapter)
            await client.quiet(_DRAIN_S)
            said.append(reply.tokens)
        base = ours.client.ask(tokens, 16)
        await ours.client.quiet(_DRAIN_S)
        if base.tokens == said[0]:
            raise RuntimeError(f"adapter {adapter.name} changes nothing")
        equal += said[0] == said[1]
        asked += 1
    return f"{equal} of {asked} equal"


def cases_of(clients: Sequence[Client], adapters: Sequence[common_pb2.Adapter]) -> list[Case]:
    """`clients`: ours without room, ours with room, and SGLang's."""
    plain, room, stock = clients
    unused, one, four = "room, unused", "one adapter", f"{len(adapters)} adapters"
    return [
        Case(PLAIN, plain),
        Case(unused, room),
        Case(one, room, adapters[:1]),
        Case(four, room, adapters),
        Case(f"SGLang, {unused}", stock, like=unused),
        Case(f"SGLang, {one}", stock, adapters[:1], like=one),
        Case(f"SGLang, {four}", stock, adapters, like=four),
    ]


async def run(given: argparse.Namespace, folder: Path) -> list[str]:
    """Lines that say what went wrong; empty if nothing did."""
    ends_s = time.monotonic() + given.limit_s - _ENDS_S
    batches = [int(each) for each in given.batches.split(",")]
    path = shapes.write(folder / given.shape, given.shape)
    config = json.loads((path / "config.json").read_text())
    paths = [shapes.write_adapter(folder / f"a{n}", given.shape, given.rank, seed=n) for n in range(_ADAPTERS)]
    adapters = [
        common_pb2.Adapter(name=at.name, base=given.shape, path=str(at), generation=1, rank=given.rank) for at in paths
    ]
    say(f"{_ADAPTERS} adapters are written")
    on_host = given.device.startswith("cpu")
    per_token = shapes.kv_bytes_per_token(config, 4 if on_host else 2)
    pool_tokens = int(given.kv_gib * 2**30 / per_token) // 64 * 64
    most = pool_tokens * per_token
    options = {"random_weights": 1, "max_running_requests": max(batches)}
    weights = shapes.weights_bytes(config) * (2 if on_host else 1)
    model = Model(path, given.device, _CONTEXT, options, weights_bytes=weights)
    room = common_pb2.AdapterPool(slots=_SLOTS, rank=given.rank, modules=_MODULES)
    with_room = replace(model, adapters=room)
    shape = Shape(given.prompt, given.output, config["vocab_size"])
    names = ("plain", "room")
    # Buffers of adapters and CUDA graphs are beside the weights.
    async with harness.node(folder, len(names) * (weights + most + (4 << 30)) + (1 << 30), given.device) as at:
        for name in names:
            await at.book(name, floor_bytes=most // 16, weights_bytes=weights)
            await at.limit(name, most)
        clients: list[Client] = []
        try:
            starting = [
                fleet.elastic(at, names[0], model),
                fleet.elastic(at, names[1], with_room),
                fleet.reference("stock", with_room, pool_tokens),
            ]
            started = await asyncio.gather(*starting, return_exceptions=True)
            clients += [each for each in started if isinstance(each, Client)]
            failed = [f"{type(each).__name__}: {each}" for each in started if isinstance(each, BaseException)]
            if failed:
                return failed
            return await _compare(given, Rounds(cases_of(clients, adapters), batches), shape, ends_s)
        finally:
            await fleet.stop(clients)


async def _compare(given: argparse.Namespace, rounds: Rounds, shape: Shape, ends_s: float) -> list[str]:
    about: dict[str, Any] = {
        "arguments": {key: str(value) for key, value in vars(given).items() if key != "out"},
        "measured": {case.client.name: fleet.as_dict(case.client.measured) for case in rounds.cases},
        "gpu_memory_used_mib": report.smi("memory.used"),
    }
    problems: list[str] = []

    def write() -> None:
        body = {**about, "summary": rounds.summary(), "rounds": rounds.raw(), "problems": problems}
        report.write(given.out, "gpu_adapters", given.commit, body)

    try:
        warming = Rounds(rounds.cases, rounds.batches)
        for number in range(2):  # kernels are compiled, adapters read and copied to their buffers
            await warming.one(shape, given.output, number - 2)
        say("warm")
        four = [case for case in rounds.cases if len(case.adapters) == _ADAPTERS]
        about["same_answers"] = await same_answers(four[0], four[1], shape)
        say(f"answers: {about['same_answers']}")
        longest = 0.0
        with windows.no_collector():
            for number in range(given.rounds):
                begun = time.monotonic()
                if number and begun + 1.2 * longest > ends_s:
                    break
                await rounds.one(shape, given.output, number)
                longest = max(longest, time.monotonic() - begun)
                if number % 4 == 3:
                    write()
        say(f"{number + 1 if number == given.rounds - 1 else number} rounds of {longest:.1f} s at most")
    except (RuntimeError, TimeoutError) as error:
        problems.append(f"{type(error).__name__}: {error}")
    if len(rounds.seconds[rounds.batches[0], PLAIN, MEASURES[0]]) < 2:
        problems.append("there was no time for two rounds")
    write()
    show(rounds.summary())
    return problems


async def main() -> None:
    fleet.begin()
    given = parse()
    with tempfile.TemporaryDirectory() as folder:
        problems = await run(given, Path(folder))
    fleet.fail(problems)


if __name__ == "__main__":
    asyncio.run(main())
