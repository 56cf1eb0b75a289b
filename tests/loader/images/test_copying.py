"""Saving and loading: what is checked, what happens to what is half done, and that copies run beside each other."""

import asyncio
import os

import pytest

from loader.catalogue.catalogue import CatalogueEntry
from loader.catalogue.models import NodeModels, Sizes
from loader.images.copying import ImageCopier
from loader.images.image_memory import Image
from loader.images.images import Images
from loader.policy.sources import Content, LeaseSource
from services.errors import NotFound, Refused, Unavailable, Unmet
from services.runtime.checksum import checksum
from tests.loader import checkpoint_files
from tests.loader.fakes import FakeHandoff, FakeKeeper, GatedTransfer, manifest

TOTAL = 200_000
CONTENT = os.urandom(TOTAL)
MANIFEST = manifest(TOTAL)
SIZES = Sizes(dtype_bytes=4, kv_extent_bytes=65536, quota_bytes=0)


class World:
    """One model, "m"; the lease "engine" has its weights, the lease "other" has room for them."""

    def __init__(self):
        self.keeper = FakeKeeper()
        self.handoff = FakeHandoff()
        self.handoff.lease("engine", CONTENT)
        self.handoff.lease("other", bytes(TOTAL))
        self.transfer = GatedTransfer()
        self.models = NodeModels(SIZES, lambda: None, FakeKeeper())
        self.images = Images(self.keeper, 10 * TOTAL, lambda: 0.0, self.describe, lambda: None)
        self.copying = ImageCopier(
            self.models,
            self.images,
            self.handoff,
            lambda device: self.transfer,
            lambda source, target: True,
            chunk_bytes=8192,
            threads=4,
            answer_timeout_s=0.2,
        )

    def describe(self, name):
        model = self.models.find(name)
        return False, model.generation if model else None

    @property
    def generation(self):
        return self.models.get("m").generation

    async def save(self, *, lease="engine", generation=None, manifest=MANIFEST, total=TOTAL, checksum="", steps=None):
        generation = self.generation if generation is None else generation
        return await self.run(self.copying.save("m", generation, lease, manifest, total, checksum), steps)

    async def load(self, *, lease="other", model="m", generation=None, manifest=MANIFEST, total=TOTAL, steps=None):
        generation = self.generation if generation is None else generation
        return await self.run(self.copying.load(model, generation, lease, manifest, total), steps)

    async def load_from_device(self, *, target="other", checksum=""):
        content = Content("m", self.generation, 0, MANIFEST)
        return [step async for step in self.copying.load_from_device(content, target, TOTAL, checksum)]

    @staticmethod
    async def run(copy, steps):
        last = None
        async for last in copy:
            if steps is not None and not isinstance(last, Image):
                steps.append(last)
        assert isinstance(last, Image)
        return last

    def start(self, work):
        return asyncio.get_running_loop().create_task(work)

    def nothing_left(self):
        return not any(self.handoff.lent.values())


@pytest.fixture
async def world(tmp_path):
    world = World()
    await world.models.add(CatalogueEntry(name="m", path=str(checkpoint_files.write(tmp_path))))
    yield world
    world.transfer.gate.set()
    world.handoff.close()


@pytest.fixture
async def open_world(world):
    world.transfer.gate.set()
    return world


async def test_an_image_is_the_weights_of_the_lease_with_their_checksum(open_world):
    image = await open_world.save(checksum=checksum(CONTENT))
    assert image.checksum == checksum(CONTENT) and image.total_bytes == TOTAL
    with image.weights() as weights:
        assert weights == CONTENT
    assert open_world.nothing_left() and "image/m" in open_world.keeper.records


async def test_a_loaded_lease_has_the_images_bytes_and_its_padding_untouched(open_world):
    await open_world.save()
    await open_world.load()
    content = open_world.handoff.content("other")
    assert content[:TOTAL] == CONTENT and not any(content[TOTAL:])
    assert open_world.nothing_left()


async def test_progress_of_a_save_rises_to_the_size_of_the_image(world):
    steps: list[int] = []
    saving = world.start(world.save(steps=steps))
    await world.transfer.reached()
    world.transfer.gate.set()
    await saving
    assert steps == sorted(steps) and steps and 0 <= steps[0] and steps[-1] <= TOTAL


async def test_save_of_an_existing_image_keeps_it_as_it_is(open_world):
    first = await open_world.save()
    del open_world.handoff.leases["engine"]  # not even asked for
    assert await open_world.save() is first


async def test_a_second_save_waits_for_the_first_and_copies_nothing(world):
    first, second = world.start(world.save()), world.start(world.save())
    await world.transfer.reached()
    assert world.handoff.lent == {"engine": 1}
    world.transfer.gate.set()
    assert await first is await second
    assert not world.transfer.arrived.acquire(blocking=False)


async def test_save_with_another_manifest_makes_a_new_image(open_world):
    first = await open_world.save()
    other = manifest(TOTAL, "other")
    second = await open_world.save(manifest=other)
    assert second is not first and open_world.images.get("m") is second


async def test_a_cancelled_save_drops_the_partial_image_and_gives_the_extents_back(world):
    saving = world.start(world.save())
    await world.transfer.reached()
    assert world.images.used_bytes > TOTAL
    saving.cancel()
    world.transfer.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await saving
    assert world.images.used_bytes == 0 and not world.keeper.records and world.nothing_left()
    assert (await world.save()).checksum == checksum(CONTENT)


async def test_extents_go_back_only_when_the_cancelled_copys_thread_has_ended(world):
    saving = world.start(world.save())
    await world.transfer.reached()
    saving.cancel()
    for _ in range(3):
        await asyncio.sleep(0)
        saving.cancel()  # impatience does not help
    assert world.handoff.lent == {"engine": 1} and not saving.done()
    world.transfer.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await saving
    assert world.nothing_left()


async def test_a_save_whose_first_waiter_was_cancelled_is_made_by_the_second(world):
    first, second = world.start(world.save()), world.start(world.save())
    await world.transfer.reached()
    first.cancel()
    world.transfer.gate.set()
    assert (await second).checksum == checksum(CONTENT)


async def test_weights_of_another_checksum_make_no_image(open_world):
    with pytest.raises(Unmet, match="have checksum rows:.*, their engine computed rows:00000000"):
        await open_world.save(checksum="rows:00000000")
    assert open_world.images.used_bytes == 0 and open_world.nothing_left()


async def test_an_image_that_is_there_is_not_taken_for_weights_of_another_checksum(open_world):
    await open_world.save()
    with pytest.raises(Unmet, match="their engine computed rows:00000000"):
        await open_world.save(checksum="rows:00000000")
    assert open_world.images.get("m") is not None


async def test_weights_of_a_checkpoint_that_changed_meanwhile_make_no_image(open_world):
    with pytest.raises(Unmet, match="the engine's weights are of 1"):
        await open_world.save(generation=1)


async def test_copy_of_a_missing_lease_image_or_model_fails_with_its_name(open_world):
    with pytest.raises(NotFound, match="no lease gone"):
        await open_world.save(lease="gone")
    with pytest.raises(Unmet, match="no image of m"):
        await open_world.load()
    await open_world.save()
    with pytest.raises(NotFound, match="no lease gone"):
        await open_world.load(lease="gone")
    with pytest.raises(Unmet, match="there is no image of other"):
        await open_world.load(model="other")
    await open_world.models.remove("m")
    with pytest.raises(NotFound, match="no model 'm'"):
        await open_world.run(open_world.copying.save("m", 1, "engine", MANIFEST, TOTAL, ""), None)


async def test_an_image_is_only_loaded_under_its_own_manifest_and_generation(open_world):
    await open_world.save()
    with pytest.raises(Unmet, match="lays its weights out in another way"):
        await open_world.load(manifest=manifest(TOTAL, "other"))
    with pytest.raises(Unmet, match="not of 1"):
        await open_world.load(generation=1)
    assert not any(open_world.handoff.content("other"))


async def test_a_lease_that_is_too_small_is_refused_with_the_arithmetic(open_world):
    open_world.handoff.lease("small", bytes(65536))
    with pytest.raises(Unmet, match=f"lease small: 1 extents of 65536 bytes do not hold {TOTAL}"):
        await open_world.save(lease="small")
    await open_world.save()
    with pytest.raises(Unmet, match="lease small"):
        await open_world.load(lease="small")


async def test_save_with_short_host_memory_is_refused(open_world):
    total = 20 * TOTAL
    open_world.handoff.lease("large", bytes(total), extent_bytes=total)
    with pytest.raises(Refused, match="short"):
        await open_world.save(lease="large", manifest=manifest(total), total=total)
    assert open_world.nothing_left()


async def test_failed_copy_leaves_no_image_and_no_borrowed_extents(open_world):
    os.ftruncate(open_world.handoff.leases["engine"][1].fd, 10)
    with pytest.raises(Unavailable, match="the copy failed: extent 65536 has 10 bytes"):
        await open_world.save()
    assert open_world.images.used_bytes == 0 and open_world.nothing_left()


async def test_an_image_that_the_keeper_does_not_take_in_time_is_not_made(open_world):
    open_world.keeper.there.clear()
    with pytest.raises(Unavailable, match="the keeper does not answer"):
        await open_world.save()
    assert open_world.images.get("m") is None and open_world.images.used_bytes == 0


async def test_several_loads_of_one_image_run_at_the_same_time_while_the_loop_is_free(world):
    world.transfer.gate.set()
    await world.save()
    await world.transfer.reached()
    world.transfer.gate.clear()
    for number in range(3):
        world.handoff.lease(f"lease{number}", bytes(TOTAL))
    loads = [world.start(world.load(lease=f"lease{number}")) for number in range(3)]
    await world.transfer.reached(3)  # all three have begun, and this loop runs
    world.transfer.gate.set()
    await asyncio.gather(*loads)
    assert all(world.handoff.content(f"lease{number}")[:TOTAL] == CONTENT for number in range(3))


async def loaded_and_not_tidied(world, lease="other"):
    """A load that has said that it is done, and tidies up."""
    await world.save()
    world.transfer.may_tidy.clear()
    while world.transfer.tidying.acquire(blocking=False):
        pass
    copy = world.copying.load("m", world.generation, lease, MANIFEST, TOTAL)
    async for step in copy:
        if isinstance(step, Image):
            break
    return copy


async def test_load_is_done_once_its_bytes_are_copied_and_returns_extents_after_its_cleanup(open_world):
    copy = await loaded_and_not_tidied(open_world)
    assert open_world.handoff.content("other")[:TOTAL] == CONTENT
    assert open_world.handoff.lent["other"] == 1
    ending = open_world.start(anext(copy, None))
    await open_world.transfer.begun_to_tidy()
    assert open_world.handoff.lent["other"] == 1 and not ending.done()
    open_world.transfer.may_tidy.set()
    assert await ending is None
    assert open_world.nothing_left()


async def test_cleanup_of_a_load_is_waited_for_despite_repeated_cancellation(open_world):
    copy = await loaded_and_not_tidied(open_world)
    ending = open_world.start(copy.aclose())
    await open_world.transfer.begun_to_tidy()
    for _ in range(3):
        ending.cancel()
        await asyncio.sleep(0)
    assert open_world.handoff.lent["other"] == 1 and not ending.done()
    open_world.transfer.may_tidy.set()
    with pytest.raises(asyncio.CancelledError):
        await ending
    assert open_world.nothing_left() and open_world.transfer.tidied == 2


async def test_lease_whose_load_is_still_cleaning_up_is_a_source_already(open_world):
    copy = await loaded_and_not_tidied(open_world)
    open_world.handoff.lease("third", bytes(TOTAL))
    steps = open_world.start(open_world.load_from_device(target="third"))
    await open_world.transfer.begun_to_tidy()
    assert open_world.handoff.content("third")[:TOTAL] == CONTENT
    open_world.transfer.may_tidy.set()
    assert (await steps)[-1].lease_id == "other"
    await copy.aclose()
    assert open_world.nothing_left()


async def test_failed_load_needs_no_cleanup(open_world):
    await open_world.save()
    os.ftruncate(open_world.handoff.leases["other"][1].fd, 10)
    before = open_world.transfer.tidied
    with pytest.raises(Unavailable, match="the copy failed"):
        await open_world.load()
    assert open_world.nothing_left() and open_world.transfer.tidied == before


async def test_extents_that_cannot_be_unmapped_are_logged_and_return(open_world, capsys):
    await open_world.save()
    open_world.transfer.tidy_error = OSError(5, "cuMemUnmap: CUDA_ERROR_UNKNOWN")
    await open_world.load()
    assert open_world.nothing_left()
    assert "extents stay mapped after a copy" in capsys.readouterr().out


async def test_an_image_dropped_during_a_load_is_loaded_to_its_end(world):
    world.transfer.gate.set()
    await world.save()
    await world.transfer.reached()
    world.transfer.gate.clear()
    loading = world.start(world.load())
    await world.transfer.reached()
    world.images.drop("m")
    world.transfer.gate.set()
    await loading
    assert world.handoff.content("other")[:TOTAL] == CONTENT and world.images.used_bytes == 0


async def test_a_leases_weights_are_copied_to_another_lease_and_its_padding_left_alone(open_world):
    open_world.handoff.lease("target", bytes(TOTAL + 5000), extent_bytes=50_000)
    await open_world.save()
    steps = await open_world.load_from_device(target="target")
    assert [step.done for step in steps[:-1]] == sorted(step.done for step in steps[:-1])
    assert (steps[-1].lease_id, steps[-1].device, steps[-1].checksum) == ("engine", "cpu:0", checksum(CONTENT))
    content = open_world.handoff.content("target")
    assert content[:TOTAL] == CONTENT and not any(content[TOTAL:])
    assert open_world.handoff.content("engine")[:TOTAL] == CONTENT
    assert open_world.nothing_left()


async def test_leases_of_a_cancelled_copy_return_only_when_its_thread_has_ended(world):
    world.transfer.gate.set()
    await world.save()
    await world.transfer.reached()
    world.transfer.gate.clear()
    copying = world.start(world.load_from_device())
    await world.transfer.reached()
    copying.cancel()
    await asyncio.sleep(0)
    assert world.handoff.lent == {"engine": 1, "other": 1} and not copying.done()
    world.transfer.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await copying
    assert world.nothing_left()


async def test_failed_copy_between_leases_returns_both_and_may_be_repeated(open_world):
    await open_world.save()
    size = os.fstat(open_world.handoff.leases["other"][1].fd).st_size
    os.ftruncate(open_world.handoff.leases["other"][1].fd, 10)
    assert not any(isinstance(step, LeaseSource) for step in await open_world.load_from_device())
    assert open_world.nothing_left()
    os.ftruncate(open_world.handoff.leases["other"][1].fd, size)
    assert isinstance((await open_world.load_from_device())[-1], LeaseSource)


async def test_an_image_of_another_checksum_is_not_taken_from_a_lease(open_world):
    await open_world.save()
    assert await open_world.load_from_device(checksum="rows:1") == []
    assert await open_world.load_from_device(checksum=checksum(CONTENT))
