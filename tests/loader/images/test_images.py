"""Images: what they take, who gives way, and that nothing is shown that the keeper does not hold."""

import asyncio
import os

import pytest

from loader.images import image_memory
from loader.images.images import Images
from services.errors import Refused
from tests.loader.fakes import FakeKeeper

PAGE = 4096
ONE = 2 * PAGE
"""Host memory of an image made here: a page of weights, a page of manifest."""


class World:
    def __init__(self, capacity):
        self.keeper = FakeKeeper()
        self.pinned: set[str] = set()
        self.generations: dict[str, int] = {}
        self.time = 0.0
        self.changes = 0
        self.forgotten: list[bytes] = []
        self.images = Images(self.keeper, capacity, self.now, self.describe, self.changed, self.forget)

    def now(self):
        self.time += 1
        return self.time

    def describe(self, model):
        return model in self.pinned, self.generations.get(model)

    def changed(self):
        self.changes += 1

    def forget(self, weights):
        self.forgotten.append(bytes(weights))

    async def save(self, model, generation=1, content=b"w" * PAGE, manifest=b"m", rank=0):
        self.generations.setdefault(model, generation)
        with self.images.blank(model, generation, len(content), manifest, rank) as image:
            with image.weights() as weights:
                weights[:] = content
            await self.images.publish(image, "rows:0")
        return image

    def names(self):
        return {image.model for image in self.images.all()}


async def freed(image):
    """Returns when the image's memory is no longer this process's."""
    while image.fd >= 0 or not image.memory.closed:
        await asyncio.sleep(0.001)


@pytest.fixture
def world():
    return World(capacity=3 * ONE)


async def test_listener_for_freed_images_is_called_while_the_memory_is_still_mapped(world):
    image = await world.save("a", content=b"x" * PAGE)
    with world.images.using(image):
        world.images.drop("a")
        assert world.forgotten == []
    await freed(image)
    assert world.forgotten == [b"x" * PAGE]


async def test_a_published_image_is_held_by_the_keeper_and_counted(world):
    image = await world.save("a")
    assert world.images.get("a") is image and world.images.used_bytes == ONE
    assert set(world.keeper.records) == {"image/a"}
    assert [record.id for record, _ in world.images.everything()] == ["image/a"]


async def test_image_is_not_available_before_the_keeper_has_it(world):
    world.keeper.there.clear()
    saving = asyncio.get_running_loop().create_task(world.save("a"))
    await asyncio.sleep(0)
    assert world.images.get("a") is None and world.images.used_bytes == ONE
    # A keeper that comes back now is given it.
    assert [record.id for record, _ in world.images.everything()] == ["image/a"]
    world.keeper.there.set()
    await saving
    assert world.images.get("a") is not None


async def test_an_image_that_the_keeper_never_took_is_gone(world):
    world.keeper.there.clear()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await world.save("a")
    assert world.images.get("a") is None and world.images.used_bytes == 0 and not list(world.images.everything())


async def test_an_older_image_outlives_a_younger_one_that_the_keeper_never_took(world):
    older = await world.save("a")
    world.keeper.there.clear()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await world.save("a", generation=2)
    assert world.images.get("a") is older and set(world.keeper.records) == {"image/a"}


async def test_keeper_holds_a_newer_image_though_the_older_one_is_dropped_meanwhile(world):
    older = await world.save("a")
    answered = asyncio.Event()

    async def keep(kept):
        world.keeper.keep_soon(kept)
        await answered.wait()

    world.keeper.keep = keep
    saving = asyncio.get_running_loop().create_task(world.save("a", generation=2))
    await asyncio.sleep(0)
    world.images.drop("a")
    world.generations["a"] = 2
    answered.set()
    younger = await saving
    assert world.images.get("a") is younger and set(world.keeper.records) == {"image/a"}
    await freed(older)
    assert not younger.memory.closed and world.forgotten == [b"w" * PAGE]


async def test_partial_image_of_a_failed_save_is_gone(world):
    with pytest.raises(ZeroDivisionError), world.images.blank("a", 1, PAGE, b"m"):
        assert world.images.used_bytes == ONE
        _ = 1 / 0
    assert world.images.used_bytes == 0 and not world.keeper.records


async def test_a_new_image_takes_the_place_of_its_models_older_one(world):
    older = await world.save("a")
    world.generations["a"] = 2
    newer = await world.save("a", generation=2)
    assert world.images.get("a") is newer and world.images.used_bytes == ONE
    await freed(older)


async def test_the_least_recently_used_image_gives_way_to_another(world):
    for model in "abc":
        await world.save(model)
    with world.images.using(world.images.get("a")):
        pass
    await world.save("d")
    assert world.names() == {"a", "c", "d"}
    assert set(world.keeper.records) == {"image/a", "image/c", "image/d"}


async def test_image_is_refused_with_the_sizes_where_pinned_ones_fill_the_memory(world):
    world.pinned = set("abc")
    for model in "abc":
        await world.save(model)
    with pytest.raises(
        Refused, match=f"takes {ONE} bytes; of {3 * ONE} for images {3 * ONE} are used.*leaves {ONE} short"
    ):
        await world.save("d")
    assert world.names() == {"a", "b", "c"}


async def test_a_pinned_model_whose_image_is_made_anew_does_not_need_room_for_both(world):
    world.pinned = {"a"}
    await world.save("a", content=bytes(4 * PAGE))
    await world.save("a", content=bytes(4 * PAGE), manifest=b"another")
    assert world.images.get("a").manifest == b"another"


async def test_an_image_of_a_model_that_left_the_catalogue_gives_way_first(world):
    for model in "abc":
        await world.save(model)
    del world.generations["c"]
    await world.save("d")
    assert world.names() == {"a", "b", "d"}


async def test_a_dropped_image_stays_readable_for_the_copy_that_reads_it_and_is_then_freed(world):
    image = await world.save("a")
    with world.images.using(image) as one, world.images.using(image) as two:
        world.images.drop("a")
        assert world.images.get("a") is None and not world.keeper.records
        assert one == two == b"w" * PAGE and world.images.used_bytes == ONE
    assert world.images.used_bytes == 0
    await freed(image)


async def test_an_image_in_use_does_not_give_way(world):
    images = [await world.save(model) for model in "abc"]
    with world.images.using(images[0]), world.images.using(images[1]):
        await world.save("d")
    assert world.names() == {"a", "b", "d"}


async def test_drop_of_a_missing_image_does_nothing(world):
    before = world.changes
    world.images.drop("a")
    assert world.changes == before


async def test_a_successor_has_the_images_of_its_predecessor_and_forgets_what_it_cannot_read(world):
    image = await world.save("a", content=b"abcd" * 1024)
    record = image_memory.record(image)
    strange = image_memory.record(image)
    strange.id, strange.detail = "image/strange", b"?"
    successor = World(capacity=3 * ONE)
    successor.keeper.records["image/strange"] = strange
    fds = [os.dup(image.fd), os.dup(image.fd)]
    successor.images.restore([(record, fds[0]), (strange, fds[1])])
    world.images.drop("a")
    assert successor.names() == {"a"} and "image/strange" not in successor.keeper.records
    with successor.images.using(successor.images.get("a")) as weights:
        assert weights == b"abcd" * 1024
    with pytest.raises(OSError):
        os.fstat(fds[1])


async def test_the_parts_of_an_image_come_and_go_together(world):
    parts = [await world.save("a", content=bytes([rank]) * PAGE, rank=rank) for rank in range(2)]
    assert world.images.parts("a") == parts and world.images.get("a", 1) is parts[1]
    assert set(world.keeper.records) == {"image/a", "image/a#1"}
    await world.save("b")
    world.time += 1
    await world.save("c")  # the capacity is three parts
    assert world.images.parts("a") == [] and world.names() == {"b", "c"}


async def test_a_part_makes_room_by_others_images_and_never_by_its_own_other_parts(world):
    await world.save("b")
    first = await world.save("a")
    world.time += 1
    await world.save("a", rank=1)
    await world.save("a", content=b"x" * 2 * PAGE, rank=1, generation=1)
    assert world.images.get("a") is first and world.names() == {"a"}


async def test_successor_has_every_part_of_an_image(world):
    for rank in range(2):
        await world.save("a", content=bytes([rank]) * PAGE, rank=rank)
    kept = [(record, os.dup(fd)) for record, fd in world.images.everything()]
    successor = World(capacity=3 * ONE)
    successor.images.restore(kept)
    assert [(part.rank, bytes(part.memory[:1])) for part in successor.images.parts("a")] == [(0, b"\0"), (1, b"\1")]


async def test_parts_of_an_older_image_make_way_for_the_new_one_and_are_gone_with_its_first_part():
    world = World(2 * ONE)
    for rank in range(2):
        await world.save("a", rank=rank)
    world.generations["a"] = 2
    await world.save("a", generation=2, content=b"x" * 2 * PAGE)
    assert [(part.rank, part.generation) for part in world.images.parts("a")] == [(0, 2)]

    world = World(8 * ONE)
    for rank in range(2):
        await world.save("a", rank=rank)
    world.generations["a"] = 2
    await world.save("a", generation=2, rank=1)
    assert [(part.rank, part.generation) for part in world.images.parts("a")] == [(1, 2)]
    assert world.images.used_bytes == ONE
