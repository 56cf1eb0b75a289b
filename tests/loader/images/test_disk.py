"""Images on disk: who is written, who gives way, and that whatever fails leaves the ordinary path."""

import asyncio
import errno
import os

import pytest

from loader.images import disk_file
from loader.images.disk import DiskImages
from loader.images.image_memory import Image
from loader.images.images import Images
from services.errors import Refused, Unavailable, Unmet
from services.runtime.checksum import checksum
from testing.patience import PATIENCE_S
from tests.loader.fakes import FakeKeeper, manifest

TOTAL = 200_000
MANIFEST = manifest(TOTAL)
FILE = 4096 + 200_704
"""Bytes of one file here."""


class World:
    """A loader's images in memory and on disk. Model "a" is of generation 1, "b" of 2 and so on."""

    def __init__(self, folder, capacity=10 * FILE, host=10 * FILE):
        self.folder = folder
        self.keeper = FakeKeeper()
        self.pinned: set[int] = set()
        self.wanted = set(range(1, 27))
        self.changes = 0
        self.images = Images(
            self.keeper,
            host,
            lambda: 0.0,
            lambda model: (False, generation(model)),
            lambda: None,
            on_publish=lambda image: self.disk.write_soon(image),
        )
        self.disk = DiskImages(
            str(folder),
            capacity,
            self.images,
            lambda number: (number in self.pinned, number in self.wanted),
            self.changed,
            threads=2,
            answer_timeout_s=0.2,
            sleep=self.sleep,
        )
        self.pauses: list[float] = []
        """What it waits for, until the test says that it is over."""
        self._woken = asyncio.Event()
        self._change = asyncio.Event()

    async def sleep(self, seconds):
        self.pauses.append(seconds)
        await self._woken.wait()

    def wake(self):
        """Its pauses are over."""
        woken, self._woken = self._woken, asyncio.Event()
        woken.set()

    def changed(self):
        self.changes += 1
        self._change.set()

    async def save(self, model, content=None, rank=0, layout=MANIFEST):
        """An image in memory, as an engine's save makes it; returns its bytes."""
        content = content or os.urandom(TOTAL)
        with self.images.blank(model, generation(model), len(content), layout, rank) as image:
            with image.weights() as weights:
                weights[:] = content
            await self.images.publish(image, checksum(content))
        return content

    async def store(self, model, **keys):
        """The same, and on disk when this returns."""
        content = await self.save(model, **keys)
        await self.until(lambda: self.find(model, keys.get("rank", 0)))
        return content

    def find(self, model, rank=0, layout=MANIFEST):
        return self.disk.find(generation(model), layout, rank)

    async def until(self, condition):
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                self._change.clear()
                await self._change.wait()

    async def quiet(self):
        """Returns when every write so far has ended."""
        for _ in range(3):
            await asyncio.sleep(0)
        async with self.disk._writing:
            pass

    async def read(self, model, rank=0):
        steps = [step async for step in self.disk.read(model, self.find(model, rank))]
        assert isinstance(steps[-1], Image)
        return steps

    def names(self):
        """Models that the disk has."""
        return "".join(chr(96 + number) for number in range(1, 27) if self.disk.parts(number))

    def age(self, model, seconds):
        """As if it had been used so long ago."""
        path = self.find(model).path
        os.utime(path, (path.stat().st_atime, path.stat().st_mtime - seconds))


def generation(model):
    return ord(model) - 96


@pytest.fixture
async def world(tmp_path):
    world = World(tmp_path / "images")
    await world.disk.start()
    return world


async def test_a_published_image_is_written_and_comes_back_when_memory_has_none(world):
    content = await world.store("a")
    assert os.listdir(world.folder) == [world.find("a").path.name] and world.disk.used_bytes == FILE
    world.images.drop("a")
    steps = await world.read("a")
    assert steps[-2] <= TOTAL and steps[-1].checksum == checksum(content)
    image = world.images.get("a")
    with world.images.using(image) as weights:
        assert weights == content
    assert image.manifest == MANIFEST and "image/a" in world.keeper.records


async def test_image_disk_without_a_folder_writes_and_finds_nothing(tmp_path):
    world = World("")
    await world.disk.start()
    await world.save("a")
    await world.quiet()
    assert not world.find("a") and not world.disk.used_bytes and world.changes == 0


async def test_a_successor_has_the_files_of_its_predecessor_without_leftovers_and_damaged_ones(world):
    for model in "ab":
        await world.store(model)
    damaged = world.find("b").path
    os.truncate(damaged, 5000)
    (world.folder / "x.image.writing").write_bytes(b"half")
    (world.folder / "y.image").write_bytes(b"not one")
    (world.folder / "someone's").write_bytes(b"else")
    successor = World(world.folder)
    await successor.disk.start()
    assert successor.names() == "a"
    assert sorted(os.listdir(world.folder)) == sorted([world.find("a").path.name, "someone's"])
    await successor.read("a")


async def test_a_successor_with_less_room_keeps_what_was_used_last(world):
    for model in "abc":
        await world.store(model)
    world.age("b", 100)
    successor = World(world.folder, capacity=2 * FILE)
    await successor.disk.start()
    assert successor.names() == "ac"


async def test_an_image_that_host_memory_can_never_hold_is_not_offered_and_gives_way_first(world):
    await world.store("a")
    await world.save("b", content=os.urandom(2 * TOTAL), layout=manifest(2 * TOTAL))
    await world.until(lambda: world.find("b", layout=manifest(2 * TOTAL)))
    small = World(world.folder, capacity=4 * FILE, host=FILE)
    await small.disk.start()
    assert small.disk.offered(1) and small.find("a")
    assert not small.disk.offered(2) and small.find("b", layout=manifest(2 * TOTAL)) is None
    assert small.names() == "ab"
    small.age("a", 300)
    await small.store("c")
    await small.store("d")
    assert small.names() == "acd"


async def test_damaged_file_on_a_read_only_disk_stays_and_is_not_used(world, monkeypatch):
    await world.store("a")
    world.images.drop("a")
    stored = world.find("a")
    with open(stored.path, "r+b") as file:
        file.write(b"other bytes")

    def read_only(path, missing_ok=False):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(type(stored.path), "unlink", read_only)
    with pytest.raises(Unmet, match="the image of a on disk cannot be used: it is no image"):
        await world.read("a")
    assert world.find("a") is None and stored.path.exists() and world.images.used_bytes == 0


async def test_an_image_of_another_key_is_not_found(world):
    await world.store("a")
    assert world.find("b") is None and world.find("a", rank=1) is None
    assert world.find("a", layout=manifest(TOTAL, "other")) is None


async def test_an_image_of_another_layout_replaces_the_one_before(world):
    await world.store("a")
    world.images.drop("a")
    other = manifest(TOTAL, "other")
    await world.save("a", layout=other)
    await world.until(lambda: world.find("a", layout=other))
    assert world.find("a") is None and len(os.listdir(world.folder)) == 1


@pytest.mark.parametrize("how", ["changed", "truncated", "gone", "of another version"])
async def test_damaged_image_file_is_refused_in_one_line_and_removed(world, how):
    await world.store("a")
    world.images.drop("a")
    path = world.find("a").path
    with open(path, "r+b") as file:
        if how == "changed":
            file.seek(4096 + 1000)
            file.write(b"other bytes")
        elif how == "truncated":
            file.truncate(4096)
        elif how == "of another version":
            file.seek(8)
            file.write(b"\x09")
        else:
            path.unlink()
    with pytest.raises(Unmet, match="the image of a on disk cannot be used: "):
        await world.read("a")
    assert world.find("a") is None and os.listdir(world.folder) == []
    assert world.images.get("a") is None and world.images.used_bytes == 0
    await world.store("a")  # the next save writes it again


async def test_host_memory_that_is_short_refuses_the_read_and_keeps_the_file(tmp_path):
    world = World(tmp_path, host=FILE)
    await world.disk.start()
    await world.store("a")
    await world.store("b")  # which drops the first from memory
    with world.images.using(world.images.get("b")), pytest.raises(Refused, match="short"):
        await world.read("a")
    assert world.find("a") and world.images.get("a") is None
    await world.read("a")
    assert world.images.get("b") is None


async def test_image_read_from_disk_and_not_taken_by_the_keeper_is_not_in_memory(world):
    await world.store("a")
    world.images.drop("a")
    world.keeper.there.clear()
    with pytest.raises(Unavailable, match="the keeper does not answer"):
        await world.read("a")
    assert world.images.get("a") is None and world.find("a")


async def test_image_file_least_recently_used_gives_way(tmp_path):
    world = World(tmp_path, capacity=3 * FILE)
    await world.disk.start()
    for model in "abc":
        await world.store(model)
    for model, seconds in (("a", 300), ("b", 200), ("c", 100)):
        world.age(model, seconds)
    successor = World(tmp_path, capacity=3 * FILE)
    await successor.disk.start()
    await successor.disk.used(1, 0)  # a, which an engine was given
    await successor.store("d")
    assert successor.names() == "acd"


async def test_image_files_of_unlisted_models_give_way_first_and_pinned_ones_only_to_pinned(tmp_path):
    world = World(tmp_path, capacity=3 * FILE)
    await world.disk.start()
    for model in "abc":
        await world.store(model)
    world.pinned = {1, 2}
    world.wanted.remove(3)
    await world.store("d")
    assert world.names() == "abd"
    world.pinned.add(4)
    await world.save("e")
    await world.quiet()
    assert world.names() == "abd"
    world.pinned.add(6)
    await world.store("f")
    assert len(world.names()) == 3 and "f" in world.names()


async def test_the_parts_of_an_image_come_and_go_together(tmp_path):
    world = World(tmp_path, capacity=3 * FILE)
    await world.disk.start()
    for rank in range(2):
        await world.store("a", rank=rank)
    assert [part.rank for part in world.disk.parts(1)] == [0, 1]
    for model in "bc":
        await world.store(model)
    assert world.names() == "bc"


async def test_full_disk_is_logged_in_a_line_and_the_image_in_memory_stays(world, monkeypatch, capsys):
    def full(fd, nbytes):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(disk_file, "_reserve", full)
    await world.save("a")
    await world.quiet()
    assert world.find("a") is None and world.images.get("a") and os.listdir(world.folder) == []
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "image not written to disk" in line]
    assert "No space left on device" in line
    monkeypatch.undo()
    await world.store("b")


async def test_image_that_found_the_disk_full_is_written_when_there_is_space(world, monkeypatch):
    def full(fd, nbytes):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(disk_file, "_reserve", full)
    await world.save("a")
    for pauses in ([30.0], [30.0, 60.0], [30.0, 60.0, 120.0]):
        await world.quiet()
        await asyncio.sleep(0)
        assert world.pauses == pauses and world.find("a") is None
        monkeypatch.undo() if len(pauses) == 3 else None
        world.wake()
    await world.until(lambda: world.find("a"))


async def test_image_without_room_on_disk_beside_others_is_written_when_they_are_gone(tmp_path):
    world = World(tmp_path, capacity=FILE)
    await world.disk.start()
    await world.store("a")
    world.pinned.add(1)
    await world.save("b")
    await world.quiet()
    await asyncio.sleep(0)
    assert world.names() == "a" and world.pauses == [30.0]
    world.pinned.clear()
    world.wake()
    await world.until(lambda: world.find("b"))
    assert world.names() == "b"


async def test_image_dropped_while_it_waits_to_be_written_is_not_written(world, monkeypatch):
    def full(fd, nbytes):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(disk_file, "_reserve", full)
    await world.save("a")
    await world.quiet()
    await asyncio.sleep(0)
    monkeypatch.undo()
    world.images.drop("a")
    world.wake()
    await world.quiet()
    assert world.find("a") is None and world.pauses == [30.0] and os.listdir(world.folder) == []


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOMEM, errno.EACCES])
async def test_image_file_unreadable_through_no_fault_of_its_own_stays(world, monkeypatch, number):
    content = await world.store("a")
    world.images.drop("a")

    def fails(*told):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(disk_file, "read_header", fails)
    with pytest.raises(Unmet, match=f"the image of a on disk cannot be read now: {os.strerror(number)}"):
        await world.read("a")
    successor = World(world.folder)
    await successor.disk.start()
    assert successor.names() == "", "it is looked at again at the next start"
    monkeypatch.undo()
    (*_, image) = await world.read("a")
    with image.weights() as weights:
        assert bytes(weights) == content


async def test_image_dropped_before_or_during_its_write_leaves_no_file(world, monkeypatch):
    write = disk_file.write

    def dropped_first(*arguments):
        world.images._images.clear()  # as `drop` does, from the loop
        write(*arguments)

    def dropped_last(*arguments):
        write(*arguments)
        world.images._images.clear()

    for dropped in (dropped_first, dropped_last):
        monkeypatch.setattr(disk_file, "write", dropped)
        await world.save("a")
        await world.quiet()
        assert world.find("a") is None and os.listdir(world.folder) == []
    monkeypatch.undo()
    await world.save("b")
    world.images.drop("b")
    await world.quiet()
    assert world.find("b") is None and os.listdir(world.folder) == []


async def test_image_that_is_being_written_may_give_way(tmp_path, monkeypatch):
    """Memory for the next model is not waited for."""
    world = World(tmp_path, host=FILE)
    await world.disk.start()
    await world.save("a")
    await world.save("b")  # before the loop ran anything of the write
    await world.quiet()
    assert world.images.get("b") and world.images.get("a") is None


async def test_closed_read_of_an_image_file_leaves_no_image_in_memory(world):
    await world.store("a")
    world.images.drop("a")
    steps = world.disk.read("a", world.find("a"))
    await anext(steps)
    await steps.aclose()
    assert world.images.used_bytes == 0 and world.find("a")
    await world.read("a")


async def test_drop_of_a_model_removes_its_files_and_does_nothing_when_repeated(world):
    for rank in range(2):
        await world.store("a", rank=rank)
    await world.disk.drop(1)
    before = world.changes
    await world.disk.drop(1)
    assert os.listdir(world.folder) == [] and world.changes == before
