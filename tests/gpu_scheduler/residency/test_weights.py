"""Images of weights: when one is made, and what is said where there is none."""

import asyncio
from types import SimpleNamespace

from gpu_scheduler.config import GpuSchedulerConfig
from gpu_scheduler.residency.weights import Weights
from gpu_scheduler.residents import Resident, Residents
from protos import common_pb2, engine_pb2
from services.errors import Refused, Unmet


def resident(**more):
    return Resident(common_pb2.ModelSpec(name="m", **more), common_pb2.COLD)


def engine():
    return SimpleNamespace(alive=True)


def made(loader, images, devices=("cpu:0",), **more):
    config = GpuSchedulerConfig(name="g", listen="unix:/none", group="g", devices=list(devices), balloond="")
    return Weights(config, Residents(lambda resident: None), loader, images, **more)


class Loader:
    """Has room for the first rank's part of an image."""

    def __init__(self):
        self.parts = set()

    async def save_image(self, model, generation, lease_id, manifest, checksum, rank, on_progress):
        if rank:
            raise Refused("host memory is short")
        self.parts.add(rank)

    async def drop_image(self, model):
        self.parts.clear()


def on_two(loader, images):
    return made(loader, images, devices=("cpu:0", "cpu:1"))


async def test_an_image_that_is_not_made_whole_is_not_kept():
    loader, it = Loader(), resident(devices=2)
    mapped = [engine_pb2.WeightsMapped(rank=rank) for rank in range(2)]
    await on_two(loader, {})._save_image(it, engine(), mapped)
    assert not loader.parts and not it.image_checksums
    assert it.no_image == "host memory is short"


class ShortLoader(Loader):
    """Fails with what the test says, as long as there is something."""

    def __init__(self, *fails):
        super().__init__()
        self.fails = list(fails)
        self.asked = 0

    async def save_image(self, *told, rank, **keys):
        self.asked += 1
        if self.fails:
            raise self.fails.pop(0)
        self.parts.add(rank)


class Sleeps:
    """Pauses that are over when the test says so."""

    def __init__(self):
        self.told = asyncio.Queue()
        self.over = asyncio.Event()

    async def __call__(self, seconds):
        self.told.put_nowait(seconds)
        await self.over.wait()
        self.over.clear()


async def saving(loader):
    """(weights, resident, its engine's pauses), when the first attempt has been made."""
    sleeps, it = Sleeps(), resident()
    weights = made(loader, {}, sleep=sleeps)
    it.engine, it.residency = engine(), common_pb2.ACTIVE
    weights.begin_saving(it, it.engine, [engine_pb2.WeightsMapped(checksum="sum")])
    await it.saving
    return weights, it, sleeps


async def test_an_image_for_which_there_was_no_room_is_made_when_there_is():
    short = [Refused("host memory is short"), Refused("host memory is short")]
    weights, it, sleeps = await saving(ShortLoader(*short))
    assert weights.why_no_image(it) == "host memory is short" and await sleeps.told.get() == 30.0
    sleeps.over.set()
    assert await sleeps.told.get() == 60.0
    it.change = object()  # it moves, say
    sleeps.over.set()
    assert await sleeps.told.get() == 120.0
    it.change = None
    sleeps.over.set()
    while not it.image_checksums:
        await asyncio.sleep(0)
    assert weights.has_image(it) and weights.why_no_image(it) == "" and it.no_image == ""


async def test_image_is_not_made_later_of_an_engine_that_is_gone_or_of_changed_files():
    loader = ShortLoader(Refused("host memory is short"))
    _, it, sleeps = await saving(loader)
    await sleeps.told.get()
    it.engine = engine()
    sleeps.over.set()
    for _ in range(5):
        await asyncio.sleep(0)
    assert loader.asked == 1 and sleeps.told.empty()

    loader = ShortLoader(Unmet("m is of generation 2 by now"))
    weights, it, sleeps = await saving(loader)
    for _ in range(5):
        await asyncio.sleep(0)
    assert loader.asked == 1 and sleeps.told.empty()
    assert weights.why_no_image(it) == "m is of generation 2 by now"
    it.engine_gone()
    assert it.no_image == ""


async def test_an_image_for_another_number_of_devices_is_none():
    assert not on_two(Loader(), {"m": ["whole"]}).has_image(resident(devices=2))
    assert on_two(Loader(), {"m": ["front", "back"]}).has_image(resident(devices=2))
