"""Several elastic engines with the same random weights on one device, and what a benchmark watches of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from balloond import backends
from benchmarks.gpu import fleet, shapes
from benchmarks.gpu.fleet import Client, Model, Reply
from benchmarks.gpu.series import Held
from services.runtime import tasks
from testing.engines import harness

_AS_ON_A_GPU = {"page_size": 16, "overlap": 1}
RESERVE_BYTES = 1 << 30
"""What balloond by itself leaves of a GPU to those who book nothing."""
LOADING_BYTES = 3 << 30
"""Booked for an engine until it has measured what it takes."""
SET_ASIDE_BYTES = 130 << 20
"""A GPU's spares, which balloond keeps of its capacity."""
_UNESTIMATED_BYTES = 1 << 30
"""Of a GPU for what an engine has in extents beside its weights, graphs for example; what is left is taken away."""


class Shared:
    """A device, the model of its engines, and the sizes that follow."""

    def __init__(self, folder: Path, shape: str, device: str, context_tokens: int, options: str = "{}") -> None:
        """`options`: the engines' own, as JSON."""
        path = shapes.write(folder / shape, shape)
        config = json.loads((path / "config.json").read_text())
        self.device = device
        self.on_host = device.startswith("cpu")
        self.vocabulary: int = config["vocab_size"]
        self.kv_bytes_per_token = shapes.kv_bytes_per_token(config, 4 if self.on_host else 2)
        extent = harness.WEIGHTS_EXTENT if self.on_host else 32 << 20
        self.weights_bytes = -(-shapes.weights_bytes(config) * (2 if self.on_host else 1) // extent) * extent
        given = {"random_weights": 1, **(_AS_ON_A_GPU if self.on_host else {}), **json.loads(options)}
        self.model = Model(path, device, context_tokens, given)

    def prompts(self, seed: int) -> Callable[[int], list[int]]:
        """Random ones of a length, none of which begins like another."""
        chance = np.random.default_rng(seed)
        return lambda tokens: chance.integers(3, self.vocabulary, tokens).tolist()

    def tokens(self, nbytes: int) -> int:
        return nbytes // self.kv_bytes_per_token

    @contextlib.asynccontextmanager
    async def engines(
        self,
        folder: Path,
        names: Sequence[str],
        kv_bytes: int | None,
        floor_bytes: int,
        quota_bytes: int | None = 0,
        board_fd: int | None = None,
    ) -> AsyncIterator[tuple[harness.Node, list[Client]]]:
        """A node whose device has `kv_bytes` for the KV of all (None, on a GPU: what there is), and warm engines with
        the model. Their limits are open: each may take what there is. Without a `quota_bytes` what each engine measured
        is booked for it."""
        stated = LOADING_BYTES if quota_bytes is None else quota_bytes
        if kv_bytes is None:
            capacity = backends.look(self.device).free_bytes - RESERVE_BYTES
        else:
            each = self.weights_bytes + stated + (0 if self.on_host else _UNESTIMATED_BYTES)
            capacity = len(names) * each + kv_bytes + (0 if self.on_host else SET_ASIDE_BYTES)
        async with harness.node(folder, capacity, self.device) as at:
            for name in names:
                await at.client.set_booking(
                    self.device,
                    name,
                    quota_bytes=stated,
                    weights_bytes=self.weights_bytes,
                    floor_bytes=floor_bytes,
                )
            clients = await asyncio.gather(
                *(
                    fleet.elastic(at, name, self.model, index=index, board_fd=board_fd)
                    for index, name in enumerate(names, start=1)
                )
            )
            try:
                measured = {client.name: client.measured.quota_bytes for client in clients}
                for lease in (await at.client.inspect()).devices[0].leases:
                    await at.client.set_booking(
                        self.device,
                        lease.model,
                        quota_bytes=measured[lease.model] if quota_bytes is None else stated,
                        weights_bytes=lease.weights_bytes,
                        floor_bytes=floor_bytes,
                    )
                if kv_bytes is not None:
                    await self._take_away(at, kv_bytes)
                yield at, clients
            finally:
                await fleet.stop(clients)

    async def _take_away(self, at: harness.Node, kv_bytes: int) -> None:
        """What the device has beyond `kv_bytes`, because the weights were estimated, is booked for nobody."""
        device = (await at.client.inspect()).devices[0]
        weights = sum(lease.weights_bytes for lease in device.leases)
        beyond = device.capacity_bytes - device.booked_bytes - weights - kv_bytes
        quota = beyond // device.page_bytes * device.page_bytes
        if quota < 0:
            raise RuntimeError(f"the weights are {-quota} bytes larger than they were thought to be")
        await at.client.set_booking(self.device, "nobody", quota_bytes=quota, weights_bytes=0, floor_bytes=0)


async def warm_up(shared: Shared, clients: Sequence[Client], most: int, longest: int) -> None:
    """Batches of all sizes and a prompt of the longest, on all engines at once, so that no kernel is compiled later."""
    prompt = shared.prompts(99)
    size = 1
    while size <= most:
        for client in clients:
            for _ in range(size):
                client.ask(prompt(32), 4)
        await quiet(clients)
        size *= 2
    for client in clients:
        client.ask(prompt(longest), 2)
    await quiet(clients)


async def quiet(clients: Sequence[Client], timeout_s: float = 240.0) -> None:
    await asyncio.gather(*(client.quiet(timeout_s) for client in clients))


def held(client: Client, since_s: float) -> Held:
    """What the engine last said that it has."""
    stats = client.stats
    return Held(
        round(time.monotonic() - since_s, 4),
        stats.kv_held_bytes,
        stats.kv_used_bytes,
        stats.kv_cached_bytes,
        stats.kv_reserve_bytes,
    )


@contextlib.contextmanager
def sampling(take: Callable[[], None], every_s: float = 0.1) -> Iterator[None]:
    """Calls `take` all the time."""

    async def repeat() -> None:
        while True:
            take()
            await asyncio.sleep(every_s)

    task = tasks.spawn(repeat(), "sample")
    try:
        yield
    finally:
        task.cancel()


@contextlib.asynccontextmanager
async def decoding(
    client: Client, prompt: Callable[[int], list[int]], streams: int, prompt_tokens: int, output_tokens: int
) -> AsyncIterator[list[Reply]]:
    """Streams that decode all the while: one that ends is followed by another. Yields all replies so far, once every
    stream has begun."""
    replies: list[Reply] = []
    ending = False

    async def stream() -> None:
        while not ending:
            replies.append(reply := client.ask(prompt(prompt_tokens), output_tokens))
            await reply.ended.wait()
            if reply.error:
                return

    running = [tasks.spawn(stream(), f"stream {number}") for number in range(streams)]
    await begun(replies, streams)
    try:
        yield replies
    finally:
        ending = True
        client.abort_all()
        await client.quiet(60.0)
        await asyncio.gather(*running)


async def begun(replies: Sequence[Reply], count: int) -> None:
    """Until the first `count` have their first token. Raises RuntimeError if one fails."""
    async with asyncio.timeout(120.0):
        while len(replies) < count or not all(reply.first_s for reply in replies[:count]):
            failed = next((reply.error for reply in replies if reply.error), "")
            if failed:
                raise RuntimeError(failed)
            await asyncio.sleep(0.01)


def broken(replies: Sequence[Reply]) -> list[Reply]:
    """Those that ended without all their tokens."""
    return [reply for reply in replies if not reply.ok]


def stats_of(clients: Sequence[Client]) -> dict[str, dict[str, Any]]:
    return {client.name: fleet.as_dict(client.stats) for client in clients}
