"""What goes wrong while weights are on their way: every request is answered all the same, and the log says why."""

import asyncio
import contextlib
import os
import signal

import pytest
import pytest_asyncio

from balloond.client import BalloondClient
from gpu_scheduler.client import GpuSchedulerClient
from loader.client import LoaderClient
from protos import common_pb2
from services.errors import Conflict, Refused, Unmet
from services.runtime import tasks
from testing import descriptors
from testing.patience import PATIENCE_S
from testing.systems.local import MODELS, world

pytestmark = pytest.mark.asyncio(loop_scope="module")
MODEL = MODELS[0]
PROMPT = list(range(20, 60))
DEVICES = {"cpu:0": 32 << 20, "cpu:1": 32 << 20}
GROUPS = {"look_timeout_s": 0.5}
"""A group does not wait long for a loader that a test has stopped."""


class Loads:
    """A running system whose loader and engines a test can stop in the middle."""

    def __init__(self, it, logged=()):
        """`logged`: bytes of each log that are of others' doing."""
        self.it = it
        self.logged = dict(logged)
        self.loader = LoaderClient(it.local.unix("loader"))
        self.balloond = BalloondClient(it.local.unix("balloond"))

    async def close(self):
        await self.loader.close()
        await self.balloond.close()

    async def answer(self):
        return (await self.it.complete(MODEL, PROMPT, 8))["choices"]

    async def entry(self):
        return (await self.loader.state(MODEL)).entry

    async def imaged(self):
        """The answer of a model that is up, once there is an image of it."""
        answer = await self.answer()

        async def has_image():
            return (await self.entry()).has_image

        await self.it.until(has_image, "no image was made")
        return answer

    async def down(self, residency=common_pb2.COLD):
        await self.it.evict(MODEL, residency)

    async def leased_bytes(self):
        return sum(device.leased_bytes for device in (await self.balloond.inspect()).devices)

    async def nothing_leased(self):
        async def nothing():
            return await self.leased_bytes() == 0

        await self.it.until(nothing, "memory is leased though no model is up")

    async def weights_from(self):
        return list((await self.it.measured(MODEL)).weights_from)

    def said(self, log, *words):
        """How many lines of these processes' logs have all of the words."""
        paths = (self.it.local.state / "logs").glob(f"{log}*.log")
        texts = (path.read_bytes()[self.logged.get(path, 0) :].decode() for path in paths)
        return sum(all(word in line for word in words) for text in texts for line in text.splitlines())

    def bad_image(self):
        """A byte of the image in host memory is another one now."""
        links = descriptors.links(self.it.system.running["loader"].pid)
        image = next(fd for fd, link in links.items() if "prism-image" in link)
        with image.open("r+b") as opened:
            opened.seek(1000)
            opened.write(b"other bytes")

    @contextlib.contextmanager
    def loader_stopped(self):
        loader = self.it.system.running["loader"].pid
        os.kill(loader, signal.SIGSTOP)
        try:
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(loader, signal.SIGCONT)

    @contextlib.asynccontextmanager
    async def in_mid_load(self):
        """The task of a request for which a load from the image is under way. The engine has its memory, and the group
        waits for the loader: that stands still."""
        spec = (await self.entry()).model
        with self.loader_stopped():
            asking = asyncio.get_running_loop().create_task(self.answer())
            await self.copying(spec)
            yield asking

    async def copying(self, spec):
        """Returns when a group has asked the loader to fill an engine's memory."""

        async def wakes():
            found = await self.it.resident(MODEL)
            return found[0] if found is not None and found[1].residency == common_pb2.WAKING else None

        group = await self.it.until(wakes, "no group brings it up")
        client = GpuSchedulerClient(self.it.local.unix(self.it.local.scheduler(group)))
        asked = asyncio.Event()

        def told(message):
            if message.progress.step == "copying weights":
                asked.set()

        # Who wants what is under way already hears how far it is.
        joined = tasks.spawn(client.set_residency(spec, common_pb2.ACTIVE, "test", on_progress=told), "join")
        async with asyncio.timeout(PATIENCE_S):
            await asked.wait()
        await tasks.cancel(joined)
        await client.close()


@contextlib.asynccontextmanager
async def loads_of(**settings):
    async with world("echo", {MODEL: {}}, devices=DEVICES, gpu_scheduler=GROUPS, **settings) as it:
        loads = Loads(it)
        yield loads
        await loads.close()


@pytest_asyncio.fixture(loop_scope="module")
async def fresh():
    async with loads_of() as loads:
        yield loads


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running():
    async with world("echo", {MODEL: {}}, devices=DEVICES, gpu_scheduler=GROUPS) as it:
        yield it


@pytest_asyncio.fixture(loop_scope="module")
async def loads(running):
    """One system for the tests that begin by making an image, whatever its groups had heard of an earlier one."""
    await running.rest()
    loads = Loads(running, {path: path.stat().st_size for path in (running.local.state / "logs").iterdir()})
    yield loads
    await loads.close()


@pytest.mark.parametrize("residency", [common_pb2.COLD, common_pb2.HIBERNATING])
async def test_an_image_that_went_bad_in_host_memory_is_dropped_and_the_checkpoint_read(loads, residency):
    answer = await loads.imaged()
    await loads.down(residency)
    loads.bad_image()
    assert await loads.answer() == answer
    assert await loads.weights_from() == ["checkpoint"]
    assert loads.said("gpu_scheduler", "image dropped: its weights do not verify", MODEL) == 1
    await loads.imaged()
    await loads.down()
    assert await loads.answer() == answer and await loads.weights_from() == ["image"]


async def test_a_loader_killed_in_mid_load_loses_no_request_and_no_memory(loads):
    answer = await loads.imaged()
    await loads.down()
    async with loads.in_mid_load() as asking:
        loads.it.kill("loader")
    assert await asking == answer
    assert loads.said("gpu_scheduler", "residency not reached", MODEL, "the loader at ") >= 1
    await loads.down()
    await loads.nothing_leased()
    # The image outlived it.
    assert await loads.answer() == answer and await loads.weights_from() == ["image"]


async def test_a_loader_killed_while_an_image_is_made_makes_it_when_it_is_back(fresh):
    with fresh.loader_stopped():
        await fresh.answer()  # the engine reads the checkpoint itself
        fresh.it.kill("loader")
    await fresh.imaged()
    assert fresh.said("gpu_scheduler", "image not made yet", MODEL) >= 1


@pytest.mark.parametrize("residency", [common_pb2.COLD, common_pb2.HIBERNATING])
async def test_an_engine_killed_while_its_weights_arrive_loses_no_request_and_no_memory(loads, residency):
    answer = await loads.imaged()
    await loads.down(residency)
    async with loads.in_mid_load() as asking:
        for pid in loads.it.engine_pids():
            os.kill(pid, signal.SIGKILL)
    assert await asking == answer
    await loads.down()
    await loads.nothing_leased()


async def test_a_cancelled_load_loses_no_request_and_no_memory(loads):
    answer = await loads.imaged()
    await loads.down()
    balloond = loads.it.system.running["balloond"].pid
    async with loads.in_mid_load() as asking:
        os.kill(balloond, signal.SIGSTOP)  # so that the load is still under way when it is cancelled
    try:

        async def cancelled():
            return await loads.loader.cancel(MODEL)

        await loads.it.until(cancelled, "no load was ever under way")
    finally:
        os.kill(balloond, signal.SIGCONT)
    assert await asking == answer
    assert loads.said("gpu_scheduler", "residency not reached", f"the load of {MODEL} was cancelled") == 1
    await loads.down()
    await loads.nothing_leased()


async def test_groups_activating_the_same_model_at_once_make_one_image_and_both_serve(fresh):
    spec = (await fresh.entry()).model
    groups = [GpuSchedulerClient(fresh.it.local.unix(fresh.it.local.scheduler(device))) for device in DEVICES]
    try:
        reached = await asyncio.gather(*(group.set_residency(spec, common_pb2.ACTIVE, "test") for group in groups))
        assert [each.residency for each in reached] == [common_pb2.ACTIVE] * 2
        await fresh.imaged()

        async def both_have_saved():
            return fresh.said("gpu_scheduler", "image made", MODEL) == 2

        await fresh.it.until(both_have_saved, "a group has no image")
        assert fresh.said("loader", "image saved", MODEL) == 1
        # And from the image: two loads of the same at once.
        for target in (common_pb2.COLD, common_pb2.ACTIVE):
            reached = await asyncio.gather(*(group.set_residency(spec, target, "test") for group in groups))
        assert [each.residency for each in reached] == [common_pb2.ACTIVE] * 2
    finally:
        for group in groups:
            await group.close()
    assert fresh.said("gpu_scheduler", "image not used") == 0


async def test_model_whose_image_exceeds_host_memory_serves_from_its_checkpoint_each_time(tmp_path):
    disk = {"disk_folder": str(tmp_path), "disk_capacity_bytes": 64 << 20}
    async with loads_of(loader={"host_capacity_bytes": 100_000, **disk}) as loads:
        answer = await loads.answer()

        async def said():
            return loads.said("gpu_scheduler", "no image made", MODEL, "of 100000 for images 0 are used")

        await loads.it.until(said, "nobody said why there is no image")
        why = (await loads.entry()).no_image
        assert why.endswith("all images together may take 0.1 MiB")
        for residency in (common_pb2.HIBERNATING, common_pb2.COLD):
            await loads.down(residency)
            await loads.nothing_leased()
            assert await loads.answer() == answer and await loads.weights_from() == ["checkpoint"]
        assert loads.said("gpu_scheduler", "no image to sleep on", MODEL) == 1
        with pytest.raises(Refused, match=why):
            await loads.loader.pin(MODEL)
        for residency in (common_pb2.HIBERNATING, common_pb2.COLD):

            async def brought_down(residency=residency):
                with contextlib.suppress(Conflict, Unmet):  # its group has yet to end the change that brought it up
                    return await loads.it.placement.eviction(MODEL, residency)

            told = await loads.it.until(brought_down, "it is not brought down")
            assert told.residency == common_pb2.ON_DISK and why in told.reason
            assert told.reason.endswith("its engine is given back, and the next start reads the checkpoint")
            assert await loads.answer() == answer
        assert not (await loads.entry()).on_disk and not os.listdir(tmp_path)


async def test_image_on_disk_that_exceeds_host_memory_is_not_used_and_is_logged(tmp_path):
    disk = {"disk_folder": str(tmp_path), "disk_capacity_bytes": 64 << 20}
    async with loads_of(loader=disk) as loads:
        answer = await loads.imaged()

        async def written():
            return (await loads.entry()).on_disk

        await loads.it.until(written, "the image was never written")
    async with loads_of(loader={"host_capacity_bytes": 100_000, **disk}) as loads:
        assert await loads.answer() == answer and await loads.weights_from() == ["checkpoint"]
        assert loads.said("loader", "image on disk not offered: host memory", "100000") == 1
        assert loads.said("gpu_scheduler", "image not used") == 0
