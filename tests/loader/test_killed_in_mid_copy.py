"""Real processes that are killed in the middle of a copy: a loader that has stopped after its first chunk, and the
engines at either end."""

import asyncio
import os
import subprocess
import sys

import pytest

from loader.client import LoaderClient
from services.errors import Unavailable
from services.runtime.checksum import checksum
from testing import descriptors
from testing.patience import PATIENCE_S
from tests.balloond.conftest import Child
from tests.loader.conftest import ROOT, Node
from tests.loader.fakes import manifest

EXTENT = 1 << 20
TOTAL = 2 * EXTENT
SOURCE, TARGET = 5, 0
"""Bytes that weights are full of."""
CONTENT = bytes([SOURCE]) * TOTAL


class Engine(Child):
    """A process that holds a model's weights on a device."""

    def __init__(self, node, device, byte):
        super().__init__(node.handoff, device, "a")
        assert self.answer() == "ready"
        self.ask("grow_weights", TOTAL)
        self.ask("fill_weights", byte)
        self.lease_id = self.ask("lease_id")
        self.byte = byte


class Fifo:
    """The loader's copies pass through it one by one."""

    def __init__(self, folder):
        self.folder = folder
        for name in ("reached", "gate"):
            os.mkfifo(folder / name)

    async def reached(self):
        async with asyncio.timeout(PATIENCE_S):
            assert await asyncio.to_thread((self.folder / "reached").read_text) == "here"

    async def open(self):
        await asyncio.to_thread((self.folder / "gate").write_text, "go on")

    async def let_through(self, work):
        """`work` is one copy from beginning to end."""
        task = asyncio.get_running_loop().create_task(work)
        await self.reached()
        await self.open()
        return await task


class World:
    def __init__(self, node):
        self.node = node
        self.fifo = Fifo(node.folder)
        self.engines = []

    def start_loader(self):
        with open(self.node.folder / "loader.log", "ab") as log:
            self.node.processes["loader"] = subprocess.Popen(
                [sys.executable, "-m", "tests.loader.stopping", self.node.folder]
                + ["--config", f"{self.node.folder}/loader.toml"],
                cwd=ROOT,
                stdout=log,
                stderr=log,
            )

    async def engine(self, device, byte=TARGET):
        await self.node.balloond.set_booking(device, "a", quota_bytes=0, weights_bytes=TOTAL, floor_bytes=0)
        self.engines.append(await asyncio.to_thread(Engine, self.node, device, byte))
        return self.engines[-1]

    async def save(self, engine):
        spec = (await self.node.entry("a")).model
        said = checksum(bytes([engine.byte]) * TOTAL)
        return await self.node.client.save_image("a", spec.generation, engine.lease_id, manifest(TOTAL), said)

    async def load(self, engine):
        spec = (await self.node.entry("a")).model
        return await self.node.client.load_image("a", spec.generation, engine.lease_id, manifest(TOTAL))

    async def in_the_middle(self, work):
        task = asyncio.get_running_loop().create_task(work)
        await self.fifo.reached()
        return task

    async def leased(self):
        """Bytes of each device that are leased or lent."""
        return [device.leased_bytes for device in (await self.node.balloond.inspect()).devices]

    async def until_leased(self, *expected):
        async with asyncio.timeout(PATIENCE_S):
            async for state in self.node.balloond.watch():
                if state is not None and tuple(device.leased_bytes for device in state.devices) == expected:
                    return

    def borrowed(self):
        """Extents that the loader has open."""
        return sum("extent" in link for link in descriptors.links(self.node.processes["loader"].pid).values())


@pytest.fixture
async def world():
    node = Node()
    world = World(node)
    try:
        node.start("keeper", "balloond")
        node.list_models("a", "b")
        world.start_loader()
        await node.begin()
        yield world
        await node.end()
    finally:
        for engine in world.engines:
            engine.close()
        node.stop()


async def kill_loader(world, copying):
    """While a copy is under way: who waits is told, and a successor is there."""
    world.node.kill("loader")
    with pytest.raises(Unavailable, match=f"the loader at {world.node.address}: "):
        await copying
    world.start_loader()
    await world.node.healthy()


async def test_a_loader_killed_while_it_saves_leaves_no_image_and_no_extent(world):
    engine = await world.engine("cpu:0", SOURCE)
    await kill_loader(world, await world.in_the_middle(world.save(engine)))
    catalogue = await world.node.until(lambda catalogue: True)
    assert catalogue.host_used_bytes == 0 and not catalogue.entries[0].has_image
    engine.kill()
    await world.until_leased(0, 0)
    again = await world.engine("cpu:0", SOURCE)
    assert (await world.fifo.let_through(world.save(again))).checksum == checksum(CONTENT)


@pytest.mark.parametrize("source", ["image", "cpu:0"])
async def test_a_loader_killed_in_mid_load_leaves_the_image_and_no_extent(world, source):
    holds = await world.engine("cpu:0", SOURCE)
    await world.fifo.let_through(world.save(holds))
    if source == "image":
        holds.kill()
    target = await world.engine("cpu:1")
    await kill_loader(world, await world.in_the_middle(world.load(target)))
    # The same lease is filled by the successor, who has the image and knows of no other lease.
    loaded = await world.fifo.let_through(world.load(target))
    assert loaded.source == "image" and target.ask("weights_are", SOURCE) == "True"
    for engine in world.engines:
        engine.kill()
    await world.until_leased(0, 0)


async def test_extents_that_a_killed_loader_had_borrowed_return_with_their_engine(world):
    holds = await world.engine("cpu:0", SOURCE)
    await world.fifo.let_through(world.save(holds))
    target = await world.engine("cpu:1")
    copying = await world.in_the_middle(world.load(target))
    for engine in world.engines:
        engine.kill()
    assert await world.leased() == [TOTAL, TOTAL] and world.borrowed() == 4
    world.node.kill("loader")
    with pytest.raises(Unavailable):
        await copying
    await world.until_leased(0, 0)


@pytest.mark.parametrize("source", ["image", "cpu:0"])
async def test_an_engine_killed_while_its_weights_arrive_returns_its_extents_when_the_copy_has_ended(world, source):
    holds = await world.engine("cpu:0", SOURCE)
    await world.fifo.let_through(world.save(holds))
    if source == "image":
        holds.kill()
    target = await world.engine("cpu:1")
    copying = await world.in_the_middle(world.load(target))
    target.kill()
    held = 0 if source == "image" else TOTAL
    await world.until_leased(held, TOTAL)
    await world.fifo.open()
    assert (await copying).source == source
    await world.until_leased(held, 0)
    assert world.borrowed() == 0 and (await world.node.entry("a")).has_image


async def test_a_source_killed_while_it_is_read_is_read_to_its_end(world):
    holds = await world.engine("cpu:0", SOURCE)
    await world.fifo.let_through(world.save(holds))
    target = await world.engine("cpu:1")
    copying = await world.in_the_middle(world.load(target))
    holds.kill()
    await world.fifo.open()
    assert (await copying).source == "cpu:0" and target.ask("weights_are", SOURCE) == "True"
    await world.until_leased(0, TOTAL)
    assert world.borrowed() == 0


async def test_a_caller_that_goes_away_in_mid_load_leaves_nothing_borrowed(world):
    """As a gpu_scheduler does that is killed."""
    holds = await world.engine("cpu:0", SOURCE)
    await world.fifo.let_through(world.save(holds))
    holds.kill()
    target = await world.engine("cpu:1")
    spec = (await world.node.entry("a")).model
    client = LoaderClient(world.node.address)
    copying = await world.in_the_middle(client.load_image("a", spec.generation, target.lease_id, manifest(TOTAL)))
    copying.cancel()
    await client.close()
    await world.fifo.open()
    target.kill()
    await world.until_leased(0, 0)
    assert world.borrowed() == 0 and not (await world.node.client.state("a")).under_way
