"""Does an engine whose memory is taken and given all the time say what unmodified SGLang says?

    python -m benchmarks.gpu.same_answers --out DIR --commit HASH [--device cuda:0] [--shape 1b]

Greedy answers with the same random weights and deterministic kernels, the prefix cache on, a third of the prompts
sharing prefixes. The reference runs all prompts at once; some at a time in other orders with its cache warm, as often
as the elastic engine runs, since the widest of few is narrower than that of many; and twice with a fifth of the memory,
so that it evicts by itself. Where these part is what SGLang's own answers depend on: ties. The elastic engine runs
several times, its limit moving every 200 ms between a fifth of what the run needs and all of it; in the middle of each
second run it hands back what runs, its weights leave for host memory and come back, and it goes on. New KV is NaN, and
SGLang recounts its pool after every step.

Exit status 1 if an answer parts from the reference's by more than the reference's part from each other, or if no prefix
was evicted, no request retracted, or the engine never hibernated.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.gpu import fleet, report, shapes
from benchmarks.gpu.answers import Answer, Parting, partings, widest
from benchmarks.gpu.fleet import Client, Model, Reply, say
from services.runtime import tasks
from testing.engines import harness
from testing.engines.images import Image

LEAST = 0.2
"""Of what the run needs: the lowest limit, and the memory of the reference that has little."""
MOVE_S = 0.2
RUN_S = 240.0
_MOST_BYTES = 32 << 30
"""Of the device for each reference: log-probabilities of many batch sizes leave it tens of GiB that it does not use."""
ENVIRONMENT = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}


def parse() -> argparse.Namespace:
    parser = fleet.parser(__doc__ or "", shape="1b")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--longest", type=int, default=1500, help="prompt, in tokens")
    parser.add_argument("--new", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--in-flight", type=int, default=96)
    parser.add_argument("--runs", type=int, default=4, help="of the elastic engine, and of the warm reference")
    parser.add_argument("--options", default="{}", help="engine options as JSON, for both sides")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def make_prompts(count: int, longest: int, vocabulary: int, seed: int) -> tuple[list[list[int]], int]:
    """Of 5 to `longest` tokens, every third one beginning with half of the one before it; and how many of all tokens
    are such beginnings."""
    chance = random.Random(seed)
    made: list[list[int]] = []
    shared = 0
    for number in range(count):
        prompt = [chance.randrange(3, vocabulary) for _ in range(chance.randint(5, longest))]
        if number % 3 == 2:
            begin = made[-1][: min(len(made[-1]) // 2, len(prompt) - 1)]
            prompt[: len(begin)] = begin
            shared += len(begin)
        made.append(prompt)
    return made, shared


class Run:
    """All prompts once on one engine, at most `in_flight` at a time, in an order by `seed` (None: as they are)."""

    def __init__(self, client: Client, prompts: Sequence[Sequence[int]], new_tokens: int) -> None:
        self._client = client
        self._prompts = prompts
        self._new_tokens = new_tokens
        self._replies: list[Reply | None] = [None] * len(prompts)
        self._ended = 0
        self.half = asyncio.Event()
        """Half of the prompts are answered, or one failed."""

    async def answers(self, in_flight: int, seed: int | None = None) -> list[Answer]:
        """Raises RuntimeError if one fails."""
        order = list(range(len(self._prompts)))
        if seed is not None:
            random.Random(seed).shuffle(order)
        begun = time.monotonic()
        waiting = iter(order)
        async with asyncio.timeout(RUN_S):
            await asyncio.gather(*(self._ask(waiting) for _ in range(in_flight)))
        say(
            f"{self._client.name}: {len(order)} prompts, {in_flight} at a time: {time.monotonic() - begun:.1f} s; "
            f"the GPU has {report.smi('memory.used') or 'no'} MiB in use"
        )
        return [Answer(reply.tokens, reply.top) for reply in self._replies if reply is not None]

    async def _ask(self, waiting: Any) -> None:
        for number in waiting:
            reply = self._client.ask(self._prompts[number], self._new_tokens, logprobs=True, top_logprobs=10)
            await reply.ended.wait()
            self._replies[number] = reply
            self._ended += 1
            if not reply.ok or 2 * self._ended >= len(self._prompts):
                self.half.set()
            if not reply.ok:
                raise RuntimeError(f"{self._client.name}, prompt {number}: finish {reply.finish}, {reply.error!r}")


class Mover:
    """Moves the elastic engine's limit."""

    def __init__(self, at: harness.Node, name: str, needed_bytes: int) -> None:
        self._at = at
        self._name = name
        self._needed = needed_bytes
        self.moves: list[tuple[float, int]] = []
        """(seconds, bytes)"""

    async def move(self, seed: int) -> None:
        """For ever; every third limit is the least."""
        chance = random.Random(seed)
        begun = time.monotonic()
        while True:
            share = LEAST if len(self.moves) % 3 == 2 else chance.uniform(LEAST, 1.0)
            nbytes = self._at.kv_extent_bytes * -(-int(share * self._needed) // self._at.kv_extent_bytes)
            await self._at.limit(self._name, nbytes)
            self.moves.append((round(time.monotonic() - begun, 3), nbytes))
            await asyncio.sleep(MOVE_S)


async def nap(at: harness.Node, client: Client, image: Image) -> dict[str, float]:
    """Hibernates and wakes again; seconds, and the bytes that were left on the device."""
    begun = time.monotonic()
    await client.hibernate()
    asleep = time.monotonic()
    left = await at.leased_bytes()
    await client.wake(lambda: image.put(client.lease_id))
    found = {"hibernate_s": asleep - begun, "wake_s": time.monotonic() - asleep, "leased_asleep": left}
    say(f"{client.name} hibernated and woke: {found}")
    return found


class Comparison:
    def __init__(self, given: argparse.Namespace, folder: Path) -> None:
        self._given = given
        self._folder = folder
        path = shapes.write(folder / given.shape, given.shape, tie_word_embeddings=False)
        self._config = json.loads((path / "config.json").read_text())
        on_host = given.device.startswith("cpu")
        self._prompts, shared = make_prompts(given.prompts, given.longest, self._config["vocab_size"], given.seed)
        self._tokens = sum(len(prompt) + given.new for prompt in self._prompts) - shared
        self._needed = self._tokens * shapes.kv_bytes_per_token(self._config, 4 if on_host else 2)
        options = {"random_weights": 1, "deterministic": 1, **json.loads(given.options)}
        self._model = Model(path, given.device, given.longest + given.new, options)
        self._problems: list[str] = []

    async def run(self) -> list[str]:
        """What is wrong; nothing if all is as it should be."""
        weights = -(-shapes.weights_bytes(self._config) // (64 << 20)) * (64 << 20)
        capacity = weights + int(1.2 * self._needed) + (1 << 30)
        async with harness.node(self._folder, capacity, self._given.device) as at:
            await at.book("elastic", floor_bytes=int(LEAST * self._needed) // 2, weights_bytes=weights)
            say(f"{len(self._prompts)} prompts, {self._tokens} tokens, {self._needed / 2**20:.0f} MiB of KV")
            least = int(LEAST * self._tokens)
            clients = await asyncio.gather(
                fleet.elastic(at, "elastic", self._model, poison=True, environment=ENVIRONMENT),
                fleet.reference("reference", self._model, self._pool(self._tokens), most_bytes=_MOST_BYTES),
                fleet.reference("reference with little", self._model, self._pool(least), most_bytes=_MOST_BYTES),
            )
            image = Image(at.handoff, self._given.device, clients[0].measured.weights_bytes)
            try:
                await self._compare(at, image, *clients)
            finally:
                await image.close()
                await fleet.stop(clients)
        return self._problems

    def _pool(self, tokens: int) -> int:
        return -(-int(1.1 * tokens) // 64) * 64

    async def _compare(
        self, at: harness.Node, image: Image, elastic: Client, reference: Client, little: Client
    ) -> None:
        given = self._given
        await image.take(elastic.lease_id)
        reruns = {"at once": await self._run(reference).answers(len(self._prompts))}
        for order in range(given.runs):
            warm = await self._run(reference).answers(max(2, given.in_flight // 4), 2 + order)
            reruns[f"warm, order {order}"] = warm
        for order in range(2):
            reruns[f"little memory, order {order}"] = await self._run(little).answers(given.in_flight, order)
        base = reruns["at once"]
        own = {f"at once; {name}": partings(base, answers) for name, answers in reruns.items() if answers is not base}
        bound = max(widest(found) for found in own.values())
        mover = Mover(at, "elastic", self._needed)
        moving = tasks.spawn(mover.move(given.seed), "move the limit")
        found: list[list[Parting]] = []
        naps: list[dict[str, float]] = []
        try:
            for number in range(given.runs):
                run = self._run(elastic)
                answering = tasks.spawn(run.answers(given.in_flight, 10 + number), f"run {number}")
                if number % 2:
                    await run.half.wait()
                    naps.append(await nap(at, elastic, image))
                found.append(partings(base, await answering))
            await elastic.quiet(RUN_S)
        except Exception as error:  # what was found so far is written all the same
            self._problems.append(f"run {len(found)}: {type(error).__name__}: {error}")
        await tasks.cancel(moving)
        self._planner(found, bound, elastic)
        self._report(own, bound, found, mover, naps, [elastic, reference, little], base)

    def _run(self, client: Client) -> Run:
        return Run(client, self._prompts, self._given.new)

    def _planner(self, found: list[list[Parting]], bound: float, elastic: Client) -> None:
        for number, differing in enumerate(found):
            wide = [each for each in differing if each.gap > bound]
            if wide:
                first = f"the first is {wide[0]}"
                self._problems.append(f"run {number}: {len(wide)} answers part by more than {bound:.2e}; {first}")
        for what in ("evicted_tokens", "retractions", "hibernations"):
            if not getattr(elastic.stats, what):
                self._problems.append(f"nothing was tested: no {what}")

    def _report(
        self,
        own: dict[str, list[Parting]],
        bound: float,
        found: list[list[Parting]],
        mover: Mover,
        naps: list[dict[str, float]],
        clients: list[Client],
        base: list[Answer],
    ) -> None:
        rows = [(f"reference: {name}", len(each), widest(each)) for name, each in own.items()]
        rows += [(f"elastic, run {number}", len(each), widest(each)) for number, each in enumerate(found)]
        shown = [(name, f"{len(base) - count} of {len(base)}", f"{gap:.2e}") for name, count, gap in rows]
        report.table("greedy answers", ("runs", "equal", "widest gap where they part"), shown)
        stats = {client.name: fleet.as_dict(client.stats) for client in clients}
        counters = ("evicted_tokens", "retractions", "hibernations")
        for name, counted in stats.items():
            say(f"{name}: " + ", ".join(f"{what} {counted.get(what, 0)}" for what in counters))
        say(f"{len(mover.moves)} moves of the limit")
        body = {
            "arguments": {key: str(value) for key, value in vars(self._given).items() if key != "out"},
            "tokens": self._tokens,
            "needed_bytes": self._needed,
            "bound": bound,
            "reference_partings": {name: [asdict(each) for each in some] for name, some in own.items()},
            "elastic_partings": [[asdict(each) for each in some] for some in found],
            "stats": stats,
            "limits": mover.moves,
            "naps": naps,
            "prompt_tokens": [len(prompt) for prompt in self._prompts],
            "reference_answers": [list(answer.tokens) for answer in base],
            "problems": self._problems,
        }
        report.write(self._given.out, "gpu_same_answers", self._given.commit, body)


async def main() -> None:
    fleet.begin()
    given = parse()
    with tempfile.TemporaryDirectory() as folder:
        problems = await Comparison(given, Path(folder)).run()
    fleet.fail(problems)


if __name__ == "__main__":
    asyncio.run(main())
