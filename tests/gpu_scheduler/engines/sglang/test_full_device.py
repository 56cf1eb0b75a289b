"""A real engine on a device that is full, beside a neighbour that has cached prefixes too."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from balloond.backends.cpu import CpuMapper
from balloond.driver.lease import Lease
from balloond.driver.range import ElasticRange
from tests.gpu_scheduler.engines.sglang import checkpoints
from tests.gpu_scheduler.engines.sglang.harness import KV_EXTENT, STEP_S, EngineEnd, Node, load, node
from tests.gpu_scheduler.engines.sglang.shared import Engines

pytestmark = [pytest.mark.sglang, pytest.mark.asyncio(loop_scope="session")]

FLOOR = 512 << 10
LEFT = 48
"""Extents for the engine."""
OLD_S = 1000.0


class Neighbour:
    """Runs something, and has the rest of the device in prefixes."""

    def __init__(self, at: Node) -> None:
        self.lease = Lease.attach(at.handoff, at.device, "neighbour", timeout_s=10)
        self.range = ElasticRange(
            self.lease, CpuMapper(), span_bytes=1 << 30, extent_bytes=KV_EXTENT, low=0, high=0, large=1
        )

    async def fill(self, at: Node) -> None:
        (device,) = (await at.client.inspect()).devices
        free = device.free_bytes // KV_EXTENT
        assert free > LEFT
        assert len(self.range.acquire(free - LEFT, timeout_s=30)) == free - LEFT

    def tells(self, age_s: float) -> None:
        self.range.usage(KV_EXTENT, [(age_s, self.range.mapped_bytes - KV_EXTENT)])

    @property
    def asked(self) -> bool:
        """Whether balloond wanted something back."""
        return self.range.take_reclaims() > 0

    def close(self) -> None:
        self.range.close()
        self.lease.detach()


@pytest.fixture
def asking() -> Iterator[tuple[str, list[int]]]:
    """Requests' names, and prompts that are all different."""
    return ((f"{number}", prompt) for number, prompt in enumerate(checkpoints.prompts(400)))


async def test_own_prefixes_go_first_unless_the_neighbours_are_older(
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


async def say(end: EngineEnd, name: str, prompt: list[int]) -> None:
    end.ask(name, prompt, 4, ignore_eos=True)
    assert len((await end.answer(name)).tokens) == 4
