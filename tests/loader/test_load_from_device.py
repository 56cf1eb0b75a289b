"""A lease gets its weights from another that holds them: a loader's jobs over a real keeper and a real balloond, in
this process, so that a test can stop a copy in its middle."""

import asyncio
import errno
import os
from contextlib import aclosing

import pytest

from loader.catalogue.catalogue import CatalogueEntry
from loader.catalogue.models import NodeModels, Sizes
from loader.copies import jobs
from loader.copies.handoff_client import HandoffClient
from loader.copies.jobs import Jobs, JobTarget, Result
from loader.images.copying import ImageCopier
from loader.images.disk import DiskImages
from loader.images.image_jobs import ImageJobs
from loader.images.images import Images
from loader.transfers import Transfers
from protos import engine_pb2
from services.errors import Conflict, NotFound, Unmet
from services.runtime import tasks
from testing.patience import PATIENCE_S
from tests.loader.fakes import FakeKeeper, GatedTransfer, manifest

CONTENT = os.urandom(2_300_000)
"""Several chunks between devices."""


class FragileTransfer(GatedTransfer):
    """One whose link between devices may break in the middle of a copy."""

    breaks = False

    def between(self, sources, targets, plan, done):
        def step(pair):
            done(pair)
            if self.breaks:
                raise OSError(errno.EIO, "the link is broken")

        return super().between(sources, targets, plan, step)


class Loader:
    """A second one of the node, in this process, which lists the same model "a"."""

    def __init__(self, node):
        self.node = node
        self.has_way = Transfers().has_way
        self.transfer = FragileTransfer()
        self.transfer.gate.set()
        self.handoff = HandoffClient(node.handoff, answer_timeout_s=PATIENCE_S)
        self.models = NodeModels(Sizes(dtype_bytes=4, kv_extent_bytes=65536, quota_bytes=0), lambda: None, FakeKeeper())
        self.images = Images(FakeKeeper(), 1 << 30, lambda: 0.0, self._describe, lambda: None)
        copying = ImageCopier(
            self.models,
            self.images,
            self.handoff,
            lambda device: self.transfer,
            lambda source, target: self.has_way(source, target),
            chunk_bytes=65536,
            threads=4,
            answer_timeout_s=PATIENCE_S,
        )
        disk = DiskImages(
            "", 0, self.images, lambda generation: (False, True), lambda: None, threads=1, answer_timeout_s=PATIENCE_S
        )
        self.jobs = Jobs(asyncio.get_running_loop().time)
        self.image_jobs = ImageJobs(self.models, self.images, disk, copying, self.jobs)

    def _describe(self, name):
        model = self.models.find(name)
        return False, model.generation if model else None

    @property
    def generation(self):
        return self.models.get("a").generation

    async def save(self, engine):
        what = JobTarget("save", "a", self.generation, 0, engine.lease.lease_id, engine.manifest, engine.checksum)
        return await self._result(self.image_jobs.save(what, engine.total), [])

    async def load(self, engine, told=None, **keys):
        facts = {"generation": self.generation, "manifest": engine.manifest, "lease_id": engine.lease.lease_id} | keys
        total = engine_pb2.Manifest.FromString(facts["manifest"]).total_bytes
        return await self._result(self.image_jobs.load(JobTarget("load", "a", **facts), total), told)

    @staticmethod
    async def _result(steps, told):
        result = None
        async with aclosing(steps):
            async for step in steps:
                if isinstance(step, Result):
                    result = step
                elif told is not None:
                    told.append(step)
        return result

    def start(self, work):
        return asyncio.get_running_loop().create_task(work)

    async def stopped_in_the_middle(self, work):
        """A task of it, whose first chunk has arrived and whose second waits for the gate."""
        self.reset()
        self.transfer.gate.clear()
        task = self.start(work)
        await self.transfer.reached()
        return task

    def reset(self):
        while self.transfer.arrived.acquire(blocking=False):
            pass


@pytest.fixture
async def loader(node):
    loader = Loader(node)
    await loader.models.add(CatalogueEntry(name="a", path=str(node.folder / "models" / "a")))
    running = tasks.spawn(loader.handoff.run(), "handoff")
    yield loader
    loader.transfer.gate.set()
    loader.transfer.may_tidy.set()
    await asyncio.gather(
        *jobs._running, return_exceptions=True
    )  # what was borrowed goes back before the connection does
    await tasks.cancel(running)


@pytest.fixture
async def source(node, loader):
    """An engine that serves, whose weights an image was made of."""
    engine = await node.engine("a", CONTENT)
    await loader.save(engine)
    return engine


@pytest.fixture
async def target(node):
    return await empty(node)


async def empty(node, device="cpu:1"):
    return await node.engine("a", bytes(len(CONTENT)), device)


async def leave(node, *engines):
    for engine in engines:
        node.engines.remove(engine)
        await asyncio.to_thread(engine.close)


async def nothing_leased(node, *devices):
    """Returns when no byte of the devices is leased or lent."""
    async with asyncio.timeout(PATIENCE_S):
        async for state in node.balloond.watch():
            if state is not None and not any(one.leased_bytes for one in state.devices if one.device in devices):
                return


async def test_load_copies_the_bytes_of_the_other_device_and_both_leases_can_end(node, loader, source, target):
    told = []
    result = await loader.load(target, told)
    assert (result.source, result.checksum, result.total_bytes) == ("cpu:0", source.checksum, len(CONTENT))
    assert target.content() == source.content() == CONTENT
    steps = [at for at in told if at.step != "waiting"]
    assert {at.step for at in steps} == {"copying from cpu:0"} and {at.total for at in steps} == {len(CONTENT)}
    assert [at.done for at in steps] == sorted(at.done for at in steps)
    await leave(node, source, target)
    await nothing_leased(node, "cpu:0", "cpu:1")


async def test_job_of_a_load_has_its_progress_while_it_copies(node, loader, source, target):
    loading = await loader.stopped_in_the_middle(loader.load(target))
    (job,) = loader.jobs.of("a", target.lease.lease_id)
    async with asyncio.timeout(PATIENCE_S):
        while not job.at.done:
            await asyncio.sleep(0)
    assert 0 < job.at.done < job.at.total == len(CONTENT)
    loader.transfer.gate.set()
    await loading


async def test_filled_lease_is_a_source_itself_without_an_image(node, loader, source, target):
    await loader.load(target)
    await leave(node, source)
    loader.images.drop("a")
    third = await empty(node, "cpu:0")
    assert (await loader.load(third)).source == "cpu:1"
    assert third.content() == CONTENT


async def test_a_source_that_ends_in_the_middle_is_copied_to_its_end(node, loader, source, target):
    """Its extents stay until they are returned, whatever their process does."""
    loading = await loader.stopped_in_the_middle(loader.load(target))
    await leave(node, source)
    loader.transfer.gate.set()
    assert (await loading).source == "cpu:0"
    assert target.content() == CONTENT
    await nothing_leased(node, "cpu:0")


async def test_a_copy_that_breaks_in_the_middle_is_begun_anew_from_the_image(node, loader, source, target):
    loader.transfer.breaks = True
    told = []
    assert (await loader.load(target, told)).source == "image"
    assert target.content() == CONTENT
    assert told[-1].step == "copying"
    await leave(node, source, target)
    await nothing_leased(node, "cpu:0", "cpu:1")


async def test_load_whose_link_breaks_without_an_image_fails_with_that(node, loader, source, target):
    loader.transfer.breaks = True
    loader.images.drop("a")
    with pytest.raises(Unmet, match="there is no image of a"):
        await loader.load(target)
    await leave(node, source, target)
    await nothing_leased(node, "cpu:0", "cpu:1")


async def test_lease_that_ended_or_slept_is_no_source(node, loader, source, target):
    await node.asleep(source)
    assert not any(source.content())
    assert (await loader.load(target)).source == "image" and target.content() == CONTENT
    await leave(node, source, target)
    again = await empty(node)
    assert (await loader.load(again)).source == "image" and again.content() == CONTENT


async def test_load_without_a_path_between_the_devices_takes_the_image(node, loader, source, target):
    asked = []

    def none(*devices):
        asked.append(devices)
        return False

    loader.has_way = none
    assert (await loader.load(target)).source == "image" and target.content() == CONTENT
    assert asked == [("cpu:0", "cpu:1")]


async def test_doubted_source_is_not_copied_from_until_it_is_filled_anew(node, loader, source, target):
    assert (await loader.load(target, image_only=True)).source == "image" and target.content() == CONTENT
    await leave(node, target)
    other = await empty(node)
    assert (await loader.load(other)).source == "image", "the first source was doubted, the second has gone"
    third = await empty(node)
    assert (await loader.load(third)).source == "cpu:1"


async def test_doubt_of_a_source_reaches_loads_that_already_copy_from_it_or_wait_for_it(node, loader, source, target):
    chosen = asyncio.Event()
    loader.has_way = lambda *devices: chosen.set() or True
    copies = await loader.stopped_in_the_middle(loader.load(target))
    second, third = await empty(node), await empty(node)
    chosen.clear()
    waits = loader.start(loader.load(second))
    await chosen.wait()
    doubts = loader.start(loader.load(third, image_only=True))
    await loader.transfer.reached()
    loader.transfer.gate.set()
    assert [(await load).source for load in (copies, waits, doubts)] == ["cpu:0", "image", "image"]
    await leave(node, second, third)
    assert (await loader.load(await empty(node))).source == "image"


async def test_lease_that_is_being_filled_again_is_no_source_until_that_is_done(node, loader, source, target):
    loader.has_way = lambda *devices: False
    loading = await loader.stopped_in_the_middle(loader.load(source))
    cancelling = loader.start(loader.jobs.cancel("a"))
    await asyncio.sleep(0)
    loader.transfer.gate.set()
    await cancelling
    with pytest.raises(Conflict):
        await loading
    loader.has_way = lambda *devices: True
    assert (await loader.load(target)).source == "image"
    assert (await loader.load(source)).source == "cpu:1"


async def test_cancelled_copy_returns_its_extents_and_its_half_filled_target_is_no_source(node, loader, source, target):
    loading = await loader.stopped_in_the_middle(loader.load(target))
    cancelling = loader.start(loader.jobs.cancel("a", target.lease.lease_id))
    await asyncio.sleep(0)
    loader.transfer.gate.set()
    assert await cancelling == 1
    with pytest.raises(Conflict, match="the load of a was cancelled"):
        await loading
    await leave(node, source)
    other = await empty(node)
    assert (await loader.load(other)).source == "image" and other.content() == CONTENT
    await leave(node, target, other)
    await nothing_leased(node, "cpu:0", "cpu:1")


async def test_load_of_another_manifest_or_generation_does_not_use_the_source(node, loader, source, target):
    loader.images.drop("a")
    with pytest.raises(Unmet, match="there is no image of a"):
        await loader.load(target, manifest=manifest(len(CONTENT), "other"))
    with pytest.raises(Unmet, match="there is no image of a"):
        await loader.load(target, generation=loader.generation + 1)
    assert not any(target.content())


async def test_target_lease_that_is_gone_or_too_small_fails_the_load_with_that(node, loader, source):
    small = await node.engine("a", bytes(1000), "cpu:1")
    with pytest.raises(Unmet, match=f"do not hold {len(CONTENT)}"):
        await loader.load(small, manifest=source.manifest)
    with pytest.raises(NotFound, match="gone"):
        await loader.load(small, manifest=source.manifest, lease_id="gone")


async def test_engine_that_sleeps_and_wakes_during_the_cleanup_of_a_load_is_filled_anew(node, loader, source, target):
    """Its old extents return when nothing of them is mapped here any more; until then the next load waits."""
    loader.transfer.may_tidy.clear()
    while loader.transfer.tidying.acquire(blocking=False):
        pass
    assert (await loader.load(target)).source == "cpu:0"
    assert target.content() == CONTENT
    await loader.transfer.begun_to_tidy()
    await node.asleep(target)
    assert not any(target.content())
    leased = {device.device: device.leased_bytes for device in (await node.balloond.inspect()).devices}
    assert leased["cpu:1"] >= 2 * len(CONTENT), "the old extents are lent"
    again = loader.start(loader.load(target))
    await asyncio.sleep(0)
    assert not again.done()
    loader.transfer.may_tidy.set()
    assert (await again).source == "cpu:0" and target.content() == CONTENT
    await leave(node, source, target)
    await nothing_leased(node, "cpu:0", "cpu:1")


async def test_extents_of_an_engine_that_ends_during_the_cleanup_of_a_load_stay_until_its_end(
    node, loader, source, target
):
    loader.transfer.may_tidy.clear()
    while loader.transfer.tidying.acquire(blocking=False):
        pass
    await loader.load(target)
    await loader.transfer.begun_to_tidy()
    await leave(node, target)
    leased = {device.device: device.leased_bytes for device in (await node.balloond.inspect()).devices}
    assert leased["cpu:1"] >= len(CONTENT)
    loader.transfer.may_tidy.set()
    await nothing_leased(node, "cpu:1")


async def test_loads_of_the_same_target_share_one_copy(node, loader, source, target):
    first = await loader.stopped_in_the_middle(loader.load(target))
    second = loader.start(loader.load(target))
    (job,) = loader.jobs.of("a", target.lease.lease_id)
    async with asyncio.timeout(PATIENCE_S):
        while job.callers < 2:
            await asyncio.sleep(0)
    loader.transfer.gate.set()
    assert await first == await second
    assert not loader.transfer.arrived.acquire(blocking=False), "there was a second copy"
    assert target.content() == CONTENT


async def test_concurrent_loads_between_many_leases_all_end(node, loader, source, target):
    await loader.load(target)
    more = [await empty(node, device) for device in ("cpu:0", "cpu:1", "cpu:0")]
    async with asyncio.timeout(PATIENCE_S):
        for _ in range(3):
            await asyncio.gather(*(loader.load(engine) for engine in (source, target, *more)))
    assert all(engine.content() == CONTENT for engine in (source, target, *more))
    await leave(node, source, target, *more)
    await nothing_leased(node, "cpu:0", "cpu:1")
