"""A real engine on a device that is full, beside a neighbour that has cached prefixes too."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from balloond.backends.cpu import CpuMapper
from balloond.driver.connection.lease import Lease
from balloond.driver.kv.range import ElasticRange
from protos import engine_pb2
from testing.engines.harness import KV_EXTENT, STEP_S, EngineEnd, Node, load, node
from testing.patience import PATIENCE_S
from tests.gpu_scheduler.engines.sglang import checkpoints
from tests.gpu_scheduler.engines.sglang.shared import Engines

pytestmark = [pytest.mark.sglang, pytest.mark.asyncio(loop_scope="session")]

FLOOR = 512 << 10
LEFT = 48
"""Extents for the engine."""
OLD_S = 1000.0


class Neighbour:
    """Runs something, and has the rest of the device in prefixes."""

    def __init__(self, at: Node) -> None:
        self.lease = Lease.attach(at.handoff, at.device, "neighbour", timeout_s=PATIENCE_S)
        self.held: list[int] = []
        self.range = ElasticRange(
            self.lease, CpuMapper(), span_bytes=1 << 30, extent_bytes=KV_EXTENT, low=0, high=0, large=1
        )

    async def fill(self, at: Node, left: int = LEFT) -> None:
        """Leaves so many extents."""
        (device,) = (await at.client.inspect()).devices
        free = device.free_bytes // KV_EXTENT
        assert free > left
        self.held = self.range.acquire(free - left, timeout_s=PATIENCE_S)
        assert len(self.held) == free - left

    def tells(self, age_s: float) -> None:
        self.range.usage(KV_EXTENT, [(age_s, self.range.mapped_bytes - KV_EXTENT)])

    @property
    def asked(self) -> bool:
        """Whether balloond wanted something back."""
        return self.range.take_reclaims() > 0

    def give(self) -> None:
        """All that it has."""
        self.range.release(self.held)
        self.range.reclaimed()

    def close(self) -> None:
        self.range.close()
        self.lease.detach()


@pytest.fixture
def asking() -> Iterator[tuple[str, list[int]]]:
    """Requests' names, and prompts that are all different."""
    return ((f"{number}", prompt) for number, prompt in enumerate(checkpoints.prompts(400)))


async def test_own_prefixes_are_evicted_first_unless_the_neighbours_are_older(
    tmp_path: Path, engines: Engines, models: dict[str, Path], asking: Iterator[tuple[str, list[int]]]
) -> None:
    async with node(tmp_path, capacity_bytes=128 << 20) as at, engines.one() as end:
        await at.book("llama", floor_bytes=FLOOR)
        await at.book("neighbour", floor_bytes=FLOOR, weights_bytes=0)
        await end.hold(load(at, "llama", models["llama"], context_tokens=512))
        neighbour = Neighbour(at)
        try:
            await neighbour.fill(at)
            async with asyncio.timeout(STEP_S):
                while end.stats.evicted_tokens < 500:
                    neighbour.tells(age_s=0.0)
                    await say(end, *next(asking))
                    assert not neighbour.asked, "its prefixes are younger than the engine's"
            assert end.stats.retractions == 0

            async with asyncio.timeout(STEP_S):
                while not neighbour.asked:
                    neighbour.tells(age_s=OLD_S)
                    await say(end, *next(asking))
        finally:
            neighbour.close()


async def test_loading_model_waits_for_probe_memory_that_a_neighbour_still_has(
    tmp_path: Path, engines: Engines, models: dict[str, Path]
) -> None:
    async with node(tmp_path, capacity_bytes=128 << 20) as at, engines.one() as end:
        await at.book("llama", floor_bytes=FLOOR)
        await at.book("neighbour", floor_bytes=FLOOR, weights_bytes=0)
        mapped, _ = await end.hold(load(at, "llama", models["llama"], context_tokens=512))
        await end.do(unload=engine_pb2.Unload())
        await at.until(lambda: nothing_leased(at))
        neighbour = Neighbour(at)
        try:
            await neighbour.fill(at, left=mapped.weights_bytes // KV_EXTENT + 1)
            neighbour.tells(age_s=OLD_S)
            end.send(load=load(at, "llama", models["llama"], context_tokens=512))
            await end.mapped()
            async with asyncio.timeout(STEP_S):
                while not neighbour.asked:
                    await asyncio.sleep(0.005)
            neighbour.give()
            await end.hear("done")
        finally:
            neighbour.close()


async def nothing_leased(at: Node) -> bool:
    return not await at.leased_bytes()


async def say(end: EngineEnd, name: str, prompt: list[int]) -> None:
    end.ask(name, prompt, 4, ignore_eos=True)
    assert len((await end.answer(name)).tokens) == 4
