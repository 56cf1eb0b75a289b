"""Does one model on two devices say what it says on one, as nearly as SGLang's own does?

    python -m benchmarks.gpu.tensor_parallel --out DIR --commit HASH [--device cuda:0,cuda:1] [--shape 1b]

The same random weights four times: unmodified SGLang on the first device and on both, our engine on the first and on
both. SGLang on one device answers first, greedily. Its answers are then forced on all four: each decodes as long as it
says the same, and where it says something else it is asked again with the answer's own token behind the prompt. So for
every token of every answer there are log-probabilities of all four, given the same tokens before it. Sums over two
devices round differently, and stock SGLang shows by how much.

Then our engine on both devices sleeps and wakes, each rank's weights by way of host memory, and answers as before.

Exit status 1 if our two differ by more than stock's two (`MARGIN`), if after a wake-up an answer differs by more than
that from before, or if nothing was compared.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from benchmarks.gpu import fleet, report, shapes
from benchmarks.gpu.fleet import Client, Model, say
from testing.engines import harness
from testing.engines.images import Image

MARGIN = 1.25
"""Ours may be so many times as wide as stock's: the widest of some thousands is not the same in every run."""
RUN_S = 120.0
Top = Mapping[int, float]
"""Log-probabilities of the likeliest tokens at one place."""
ENVIRONMENT = {
    # Four engines on two devices: what is free of them is not the same.
    "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",
    "NCCL_NVLS_ENABLE": "0",
}
ON_HOST = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1", "GLOO_SOCKET_IFNAME": "lo"}


def parse() -> argparse.Namespace:
    parser = fleet.parser(__doc__ or "", shape="1b")
    parser.set_defaults(device="cuda:0,cuda:1")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--longest", type=int, default=600, help="prompt, in tokens")
    parser.add_argument("--new", type=int, default=48, help="tokens of an answer")
    parser.add_argument("--naps", type=int, default=3)
    return parser.parse_args()


async def forced(client: Client, prompt: Sequence[int], answer: Sequence[int]) -> list[Top]:
    """For each token of the answer the log-probabilities of the best ten, given prompt and answer before it. Raises
    RuntimeError."""
    top: list[Top] = []
    while len(top) < len(answer):
        rest = answer[len(top) :]
        reply = client.ask([*prompt, *answer[: len(top)]], len(rest), logprobs=True, top_logprobs=10)
        await reply.ended.wait()
        if not reply.ok:
            raise RuntimeError(f"{client.name}: finish {reply.finish}, {reply.error!r}")
        same = next((i for i, (said, due) in enumerate(zip(reply.tokens, rest, strict=True)) if said != due), len(rest))
        top += reply.top[: same + 1]
    return top


async def all_forced(client: Client, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> list[Top]:
    begun = time.monotonic()
    async with asyncio.timeout(RUN_S):
        each = await asyncio.gather(*(forced(client, p, a) for p, a in zip(prompts, answers, strict=True)))
    say(f"{client.name}: {len(prompts)} answers forced in {time.monotonic() - begun:.1f} s")
    return [top for tops in each for top in tops]


def distances(one: Sequence[Top], two: Sequence[Top]) -> list[float]:
    """For each place the widest gap between what both count among their best."""
    gaps = (
        [abs(a[token] - b[token]) for token in a.keys() & b.keys()] or [float("inf")]
        for a, b in zip(one, two, strict=True)
    )
    return [max(each) for each in gaps]


def spread(gaps: Sequence[float]) -> dict[str, float]:
    return {"mean": statistics.fmean(gaps), "p99": report.quantile(gaps, 0.99), "max": max(gaps)}


def wider(ours: Mapping[str, float], stock: Mapping[str, float]) -> bool:
    return any(ours[what] > MARGIN * stock[what] for what in ("mean", "p99"))


class Trial:
    def __init__(self, given: argparse.Namespace, folder: Path) -> None:
        self._given = given
        self._folder = folder
        self._devices: list[str] = given.device.split(",")
        self._on_host = self._devices[0].startswith("cpu")
        # Tied embeddings with random weights would repeat the last token for ever.
        self._path = shapes.write(folder / given.shape, given.shape, tie_word_embeddings=False)
        chance = random.Random(1)
        vocabulary = 4000 if given.shape == "tiny" else 128_000
        self._prompts = [
            [chance.randrange(3, vocabulary) for _ in range(chance.randint(5, given.longest))]
            for _ in range(given.prompts)
        ]
        self._problems: list[str] = []

    def _model(self, devices: Sequence[str]) -> Model:
        context = self._given.longest + self._given.new
        return Model(self._path, devices[0], context, {"random_weights": 1}, devices[1:])

    async def run(self) -> list[str]:
        one, both = self._model(self._devices[:1]), self._model(self._devices)
        environment = {**ENVIRONMENT, **(ON_HOST if self._on_host else {})}
        alone = {**ENVIRONMENT}
        tokens = sum(map(len, self._prompts)) + len(self._prompts) * self._given.new
        pool = -(-2 * tokens // 64) * 64
        weights = shapes.weights_bytes(json.loads((self._path / "config.json").read_text()))
        # What a machine may have of descriptors bounds what is managed: two thirds of it are weights.
        capacity = (1 << 30) if self._on_host else 2 * weights + (6 << 30)
        others = dict.fromkeys(self._devices[1:], capacity)
        async with harness.node(self._folder, capacity, self._devices[0], others) as at:
            for name in ("ours on one", "ours on both"):
                booked = capacity // 3 if self._on_host else weights + (256 << 20)
                await at.book(name.replace(" ", "-"), floor_bytes=64 << 20, weights_bytes=booked)
            clients = list(
                await asyncio.gather(
                    fleet.reference("stock on one", one, pool, "engine", alone),
                    fleet.reference("stock on both", both, pool, "engine", environment),
                    fleet.elastic(at, "ours-on-one", one, environment=alone),
                    fleet.elastic(at, "ours-on-both", both, environment=environment),
                )
            )
            try:
                await self._compare(at, clients)
            finally:
                await fleet.stop(clients)
        return self._problems

    async def _compare(self, at: harness.Node, clients: Sequence[Client]) -> None:
        first, both = clients[0], clients[-1]
        replies = [first.ask(prompt, self._given.new) for prompt in self._prompts]
        for reply in replies:
            await reply.ended.wait()
        answers = [reply.tokens for reply in replies]
        tops = {client.name: await all_forced(client, self._prompts, answers) for client in clients}
        pairs = {f"{a}; {b}": spread(distances(tops[a], tops[b])) for a, b in combinations(tops, 2)}
        naps = await self._sleep(at, both)
        awake = await all_forced(both, self._prompts, answers)
        pairs["ours-on-both; after its sleep"] = spread(distances(tops[both.name], awake))
        stock = pairs["stock on one; stock on both"]
        places = sum(map(len, answers))
        if not places or not stock["max"]:
            self._problems.append("nothing was compared: stock on two devices is stock on one")
        for pair in ("ours-on-one; ours-on-both", "ours-on-both; after its sleep"):
            if wider(pairs[pair], stock):
                self._problems.append(f"{pair}: {pairs[pair]}, stock's two devices: {stock}")
        rows = [(name, *(f"{value:.2e}" for value in found.values())) for name, found in pairs.items()]
        report.table(f"log-probabilities at {places} places", ("between", "mean", "p99", "max"), rows)
        rows = [(f"{nap['hibernate_s']:.3f}", f"{nap['wake_s']:.3f}", nap["leased_asleep"]) for nap in naps]
        report.table("sleep on both devices", ("hibernate s", "wake s", "bytes leased asleep"), rows)
        body: dict[str, Any] = {
            "arguments": {key: str(value) for key, value in vars(self._given).items() if key != "out"},
            "places": places,
            "distances": pairs,
            "naps": naps,
            "measured": {client.name: fleet.as_dict(client.measured) for client in clients},
            "problems": self._problems,
        }
        report.write(self._given.out, "gpu_tensor_parallel", self._given.commit, body)

    async def _sleep(self, at: harness.Node, client: Client) -> list[dict[str, float]]:
        """Seconds to sleep and to wake, and what was leased of both devices in between, beside the other engine."""
        ranks = zip(self._devices, client.measured.ranks, strict=True)
        images = [Image(at.handoff, device, rank.weights_bytes) for device, rank in ranks]
        leases = client.lease_ids
        await asyncio.gather(*(image.take(lease) for image, lease in zip(images, leases, strict=True)))

        async def fill() -> None:
            await asyncio.gather(*(image.put(lease) for image, lease in zip(images, leases, strict=True)))

        naps = []
        for _ in range(self._given.naps):
            begun = time.monotonic()
            await client.hibernate()
            asleep = time.monotonic()
            state = await at.client.inspect()
            leased = sum(
                lease.kv_bytes + lease.weights_bytes
                for device in state.devices
                for lease in device.leases
                if lease.model == client.name
            )
            await client.wake(fill)
            woke = time.monotonic()
            naps.append({"hibernate_s": asleep - begun, "wake_s": woke - asleep, "leased_asleep": leased})
        for image in images:
            await image.close()
        if any(nap["leased_asleep"] for nap in naps):
            self._problems.append(f"{client.name} kept memory of ours while it slept: {naps}")
        return naps


async def main() -> None:
    fleet.begin()
    given = parse()
    with tempfile.TemporaryDirectory() as folder:
        problems = await Trial(given, Path(folder)).run()
    fleet.fail(problems)


if __name__ == "__main__":
    asyncio.run(main())
