"""Images on disk, pins, and work that is shared or cancelled, as other services meet them: real processes."""

import asyncio
import contextlib
import os
import signal

import pytest

from protos import common_pb2
from services.errors import Conflict, NotFound, Unmet
from testing.patience import PATIENCE_S
from tests.loader.test_server import CONTENT


@pytest.fixture
async def stored(node):
    """An engine of "a", and an image of its weights that only the disk has."""
    engine = await node.engine("a", CONTENT)
    await node.save(engine, (await node.entry("a")).model)
    await on_disk(node)
    await node.client.drop_image("a")
    await node.asleep(engine)
    return engine


async def on_disk(node, name="a"):
    await node.until(lambda catalogue: any(e.on_disk for e in catalogue.entries if e.model.name == name))


@contextlib.contextmanager
def standing_still(node, name):
    """A process that does not answer, so that whatever needs it stays under way."""
    node.processes[name].send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        node.processes[name].send_signal(signal.SIGCONT)


async def under_way(node, kind="load"):
    """What there is of that kind for "a", without the reads that it waits for."""
    return [each for each in (await node.client.state("a")).under_way if each.kind == kind]


async def started(node, work, callers=1, kind="load"):
    """`work` as a task, once so many callers follow it."""
    task = asyncio.get_running_loop().create_task(work)
    async with asyncio.timeout(PATIENCE_S):
        while True:
            if any(each.callers == callers for each in await under_way(node, kind)):
                return task
            await asyncio.sleep(0.01)


def reads(node):
    """How many images the loader says to have read from disk."""
    return (node.folder / "loader.log").read_text().count("image read from disk")


async def test_image_only_on_disk_is_read_and_copied_with_progress_of_both(node, stored):
    entry = await node.entry("a")
    assert (entry.has_image, entry.on_disk) == (False, True)
    assert (entry.image_bytes, entry.image_checksum) == (len(CONTENT), stored.checksum)
    told = []
    loaded = await node.load(stored, entry.model, on_progress=told.append)
    assert stored.content() == CONTENT and loaded.checksum == stored.checksum
    assert {"reading from disk", "copying"} <= {progress.step for progress in told}
    assert told[-1].done == told[-1].total == len(CONTENT)
    entry = await node.entry("a")
    assert entry.has_image and entry.on_disk


async def test_a_host_that_was_restarted_has_the_images_of_its_disk(node, stored):
    for name in ("loader", "keeper"):
        node.kill(name)
    node.start("keeper", "loader")
    await node.load(stored, (await node.entry("a")).model)
    assert stored.content() == CONTENT


async def test_a_loader_killed_before_an_image_was_written_writes_it_later(node):
    engine = await node.engine("a", CONTENT)
    await node.save(engine, (await node.entry("a")).model)
    node.kill("loader")
    for file in node.images.glob("*.image"):
        file.rename(file.with_name(file.name + ".writing"))  # as if it had been killed a moment earlier
    (node.images / "half.image.writing").write_bytes(b"half")
    node.start("loader")
    await on_disk(node)
    assert [file.suffix for file in node.images.iterdir()] == [".image"]


async def test_damaged_image_file_is_refused_and_no_longer_listed(node, stored):
    entry = await node.entry("a")
    (file,) = node.images.iterdir()
    with open(file, "r+b") as opened:
        opened.seek(500_000)
        opened.write(b"other bytes")
    with pytest.raises(Unmet, match="image of a on disk cannot be used: its data has checksum"):
        await node.load(stored, entry.model)
    assert not (await node.entry("a")).on_disk and not any(stored.content())
    with pytest.raises(Unmet, match="there is no image of a"):
        await node.load(stored, entry.model)


async def test_image_on_disk_without_room_in_host_memory_is_refused_like_a_missing_one(node, stored):
    spec = (await node.entry("a")).model
    await node.client.pin("b")
    large = await node.engine("b", bytes(15 << 20))
    await node.save(large, (await node.entry("b")).model)
    with pytest.raises(Unmet, match="of no use now: an image of a takes .* short"):
        await node.load(stored, spec)
    assert (await node.entry("a")).on_disk


async def test_engines_loading_an_image_from_disk_at_once_share_one_read(node, stored):
    other = await node.engine("a", bytes(len(CONTENT)))
    before = reads(node)
    spec = (await node.entry("a")).model
    told = {stored: [], other: []}
    await asyncio.gather(*(node.load(engine, spec, on_progress=told[engine].append) for engine in told))
    for engine in told:
        assert engine.content() == CONTENT
    # Who comes late may find that the disk has been read.
    assert "reading from disk" in {each.step for progress in told.values() for each in progress}
    assert reads(node) - before == 1


async def test_a_register_with_prefetch_has_the_image_in_memory_at_its_end(node, stored):
    entry = await node.entry("a")
    listing = common_pb2.ModelListing(name="a", path=entry.model.path)
    told = []
    assert await node.client.register(listing, on_progress=told.append) == entry.model
    assert not told and not (await node.entry("a")).has_image
    assert await node.client.register(listing, prefetch=True, on_progress=told.append) == entry.model
    assert told[-1].done == told[-1].total == len(CONTENT)
    assert (await node.entry("a")).has_image
    assert (await node.client.register(listing, prefetch=True)) == entry.model


async def test_drop_from_disk_removes_the_image_file(node, stored):
    await node.client.drop_image("a", from_disk=True)
    entry = await node.entry("a")
    assert not entry.on_disk and not entry.image_checksum
    assert [path.name for path in node.images.iterdir()] == []


async def test_cancelled_load_raises_the_reason_and_leaves_nothing_behind(node, stored):
    spec = (await node.entry("a")).model
    with standing_still(node, "balloond"):
        loading = await started(node, node.load(stored, spec))
        assert await node.client.cancel("a", "another lease") == 0
        assert await node.client.cancel("a", stored.lease.lease_id) == 1
        with pytest.raises(Conflict, match="the load of a was cancelled"):
            await loading
    assert not any(stored.content())
    assert await node.client.cancel("a") == 0
    await node.load(stored, spec)
    assert stored.content() == CONTENT


async def test_cancelled_save_raises_the_reason_and_leaves_nothing_behind(node):
    engine = await node.engine("a", CONTENT)
    spec = (await node.entry("a")).model
    with standing_still(node, "balloond"):
        saving = await started(node, node.save(engine, spec), kind="save")
        assert await node.client.cancel("a") == 1
        with pytest.raises(Conflict, match="the save of a was cancelled"):
            await saving
    catalogue = await node.until(lambda catalogue: True)
    assert catalogue.host_used_bytes == 0 and not (await node.entry("a")).has_image
    assert (await node.save(engine, spec)).checksum == engine.checksum


async def test_repeated_load_joins_the_first_and_the_job_has_both_callers(node, stored):
    spec = (await node.entry("a")).model
    with standing_still(node, "balloond"):
        first = await started(node, node.load(stored, spec))
        second = await started(node, node.load(stored, spec), callers=2)
        (seen,) = await under_way(node)
        assert (seen.lease_id, seen.callers) == (stored.lease.lease_id, 2)
    assert (await first).checksum == (await second).checksum == stored.checksum
    state = await node.client.state("a")
    assert not state.under_way and state.model == spec and state.entry.has_image
    with pytest.raises(NotFound, match="no model 'ghost'"):
        await node.client.state("ghost")


async def test_a_pinned_image_stays_through_a_restart_of_the_loader_until_it_is_unpinned(node):
    specs = [(await node.entry(name)).model for name in "ab"] + [await node.add("c", str(node.checkpoint("c")))]
    engines = [await node.engine(spec.name, os.urandom(7 << 20)) for spec in specs]
    await node.client.pin("a")
    await node.client.pin("a")
    await node.save(engines[0], specs[0])
    await node.save(engines[1], specs[1])
    node.kill("loader")
    node.start("loader")
    assert (await node.entry("a")).image_pinned and not (await node.entry("b")).image_pinned
    await node.save(engines[2], specs[2])
    assert [(await node.entry(name)).has_image for name in "abc"] == [True, False, True]
    await node.client.unpin("a")
    await node.client.unpin("a")
    await node.load(engines[2], specs[2])
    await node.save(engines[1], specs[1])
    assert [(await node.entry(name)).has_image for name in "abc"] == [False, True, True]


async def test_pin_of_an_unknown_model_and_unpin_of_a_listed_pin_are_refused(node):
    with pytest.raises(NotFound, match="no model 'ghost'"):
        await node.client.pin("ghost")
    with pytest.raises(NotFound, match="no model 'ghost'"):
        await node.client.unpin("ghost")
    await node.add("c", str(node.checkpoint("c")), pinned=True)
    assert (await node.entry("c")).image_pinned
    with pytest.raises(Unmet, match="c is listed as pinned"):
        await node.client.unpin("c")
    await node.client.pin("a")
    await node.client.remove("a")
    node.reload()
    catalogue = await node.until(lambda catalogue: any(entry.model.name == "a" for entry in catalogue.entries))
    assert not any(entry.image_pinned for entry in catalogue.entries if entry.model.name == "a")
