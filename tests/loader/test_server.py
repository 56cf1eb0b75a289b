"""The loader as other services meet it: real processes, real gRPC, real extents of a real balloond."""

import asyncio
import os

import pytest

from protos import common_pb2
from services.errors import Exists, Invalid, NotFound, Refused, Unavailable, Unmet
from tests.loader import checkpoint_files
from tests.loader.fakes import manifest

CONTENT = os.urandom(1_300_000)
"""Five extents and a part of a sixth, which is padded to a page."""


async def test_catalogue_of_the_loader_has_its_models_with_values_of_their_checkpoints(node):
    catalogue = await node.until(lambda catalogue: True)
    a, b = catalogue.entries
    assert (a.model.name, b.model.name) == ("a", "b")
    assert (a.model.context_tokens, b.model.context_tokens) == (64, 128)
    assert a.model.path == str(node.folder / "models" / "a") and a.model.generation > 0
    assert a.model.kv_bytes_per_token == 256 and a.model.floor_bytes == 256 << 10 and a.model.devices == 1
    assert a.error == "" and not a.has_image
    assert (catalogue.host_capacity_bytes, catalogue.host_used_bytes) == (16 << 20, 0)


async def test_models_are_inspected_added_and_removed(node):
    path = str(node.checkpoint("c"))
    request = common_pb2.ModelListing(name="c", path=path, pinned=True, engine="echo", context_tokens=32, quota_bytes=0)
    request.default_slo.ttft_ms = 9
    inspected = await node.client.inspect(request)
    added = await node.client.add(request)
    assert added == inspected and added.weights_bytes > 0 and (added.context_tokens, added.quota_bytes) == (32, 0)
    entry = await node.entry("c")
    assert entry.model == added and entry.change == 1
    request.devices = 1
    assert entry.listing == request
    assert added.pinned and added.engine == "echo"
    assert (await node.add("c", path)).generation == added.generation
    with pytest.raises(Exists, match="'c' is taken"):
        await node.add("c", str(node.checkpoint("d")))
    with pytest.raises(Exists, match="'a' is taken"):
        await node.add("a", path)
    await node.client.remove("c")
    with pytest.raises(NotFound, match="no model 'c'"):
        await node.client.remove("c", 5)
    await node.until(lambda catalogue: catalogue.removed == {"c": 5})


@pytest.mark.parametrize(
    ("name", "path", "reason"),
    [
        ("c", "models/c", "path: 'models/c' is not absolute"),
        ("a b", "/x", "name: 'a b' cannot be a model's name: letters, digits and"),
        ("a//b", "/x", "name: 'a//b' cannot be a model's name: there is nothing before, after or between slashes"),
        ("", "/x", "name: "),
    ],
)
async def test_impossible_listing_is_invalid_by_its_field(node, name, path, reason):
    with pytest.raises(Invalid, match=reason):
        await node.add(name, path)


async def test_a_broken_checkpoint_is_refused_when_it_is_added_with_its_reason(node):
    path = node.checkpoint("broken")
    os.truncate(path / checkpoint_files.SINGLE, 3000)
    for call in (node.client.inspect, node.client.add):
        with pytest.raises(Unmet, match="model.safetensors is truncated"):
            await call(common_pb2.ModelListing(name="broken", path=str(path)))


async def test_a_reload_shows_changed_and_broken_checkpoints_and_serves_the_others(node):
    before = {name: (await node.entry(name)).model.generation for name in "ab"}
    os.truncate(node.folder / "models" / "a" / checkpoint_files.SINGLE, 3000)
    checkpoint_files.change_config(node.folder / "models" / "b", max_position_embeddings=32)
    node.reload()
    catalogue = await node.until(lambda catalogue: catalogue.entries[0].error)
    a, b = catalogue.entries
    assert "is truncated" in a.error and a.model.generation == 0 and a.model.name == "a"
    assert b.error == "" and b.model.context_tokens == 32 and b.model.generation not in (0, before["b"])
    # A file that cannot be used changes nothing; the next one that can does.
    node.catalogue.write_text("nonsense = 1")
    node.reload()
    node.list_models("b")
    node.reload()
    catalogue = await node.until(lambda catalogue: len(catalogue.entries) == 1)
    assert catalogue.entries[0].model.name == "b"


async def test_folder_that_goes_away_is_reported_by_a_look_and_noticed_when_it_is_back(node):
    before = await node.entry("a")
    assert (await node.client.look("a")).entry == before and before.reading
    folder = node.folder / "models" / "a"
    folder.rename(folder.with_name("away"))
    entry = (await node.client.look("a")).entry
    assert (entry.error, entry.retry_s) == ("its folder does not exist", 1.0)
    shown = await node.entry("a")
    assert shown.retry_s >= entry.retry_s  # the loader may have looked again before it was asked
    shown.retry_s = entry.retry_s
    assert entry.model == before.model and entry == shown
    await node.until(lambda catalogue: catalogue.entries[0].retry_s > 1.0)
    folder.with_name("away").rename(folder)
    catalogue = await node.until(lambda catalogue: not catalogue.entries[0].error)
    after = catalogue.entries[0]
    assert after.model == before.model and after.reading != before.reading and not after.retry_s
    with pytest.raises(NotFound):
        await node.client.look("nobody")


async def test_folder_missing_at_the_start_of_the_loader_is_noticed_when_it_is_there(node):
    folder = node.folder / "models" / "a"
    folder.rename(folder.with_name("away"))
    node.kill("loader")
    node.start("loader")
    await node.healthy()
    assert (await node.entry("a")).error == "its folder does not exist"
    folder.with_name("away").rename(folder)
    await node.until(lambda catalogue: len(catalogue.entries) == 2 and not catalogue.entries[0].error)


async def test_a_model_that_can_have_no_image_says_so_and_is_not_pinned(node):
    folder = checkpoint_files.write(node.folder / "models" / "wide", intermediate_size=48_000)
    spec = await node.add("wide", str(folder))
    assert spec.weights_bytes > 16 << 20
    entry = await node.entry("wide")
    mib = spec.weights_bytes / (1 << 20)
    assert entry.no_image == f"its weights take {mib:,.1f} MiB, all images together may take 16.0 MiB"
    assert (await node.client.state("wide")).entry.no_image == entry.no_image and not (await node.entry("a")).no_image
    with pytest.raises(Refused, match="wide is not pinned, since it can have no image to stay: its weights take"):
        await node.client.pin("wide")
    assert not (await node.entry("wide")).image_pinned


async def test_weights_are_saved_into_an_image_and_loaded_into_new_extents(node):
    spec = (await node.entry("a")).model
    engine = await node.engine("a", CONTENT)
    saved = await node.save(engine, spec)
    assert (saved.checksum, saved.image_bytes) == (engine.checksum, len(CONTENT))
    assert saved.progress.done == saved.progress.total == len(CONTENT)
    entry = await node.entry("a")
    assert (entry.has_image, entry.image_bytes, entry.image_checksum) == (True, len(CONTENT), engine.checksum)

    # Hibernation: every extent goes back, the lease and the addresses stay. Waking: new extents, empty.
    await asyncio.to_thread(engine.range.leave)
    await asyncio.to_thread(engine.map)
    assert not any(engine.content())
    told = []
    loaded = await node.load(engine, spec, on_progress=told.append)
    assert engine.content() == CONTENT
    assert loaded.checksum == engine.checksum
    assert told[-1].done == told[-1].total == len(CONTENT) and told[-1].unit == "bytes"


async def test_save_or_load_that_is_impossible_is_refused_by_kind_of_error(node):
    spec = (await node.entry("a")).model
    engine = await node.engine("a", CONTENT)
    with pytest.raises(Unmet, match="no image of a"):
        await node.load(engine, spec)
    with pytest.raises(NotFound, match="no model 'ghost'"):
        await node.client.save_image("ghost", 1, engine.lease.lease_id, engine.manifest)
    with pytest.raises(NotFound):
        await node.client.save_image("a", spec.generation, "gone", engine.manifest)
    with pytest.raises(Unmet, match="the engine's weights are of 5"):
        await node.client.save_image("a", 5, engine.lease.lease_id, engine.manifest)
    with pytest.raises(Invalid, match="manifest"):
        await node.client.save_image("a", spec.generation, engine.lease.lease_id, b"\xff")
    with pytest.raises(Invalid, match="manifest: total_bytes 0"):
        await node.client.save_image("a", spec.generation, engine.lease.lease_id, b"")
    with pytest.raises(Unmet, match="their engine computed rows:00000001"):
        await node.client.save_image("a", spec.generation, engine.lease.lease_id, engine.manifest, "rows:00000001")
    with pytest.raises(Unmet, match="do not hold"):
        too_much = manifest(2 * len(CONTENT))
        await node.client.save_image("a", spec.generation, engine.lease.lease_id, too_much)
    with pytest.raises(Refused, match="of 16777216 for images 0 are used"):
        huge = await node.engine("b", bytes(20 << 20))
        await node.save(huge, (await node.entry("b")).model)
    assert not (await node.entry("a")).has_image
    await node.save(engine, spec)
    with pytest.raises(Unmet, match="lays its weights out in another way"):
        other = manifest(len(CONTENT), "other")
        await node.client.load_image("a", spec.generation, engine.lease.lease_id, other)
    with pytest.raises(NotFound):
        await node.client.load_image("a", spec.generation, "gone", engine.manifest)


async def test_dropped_image_frees_its_memory_and_a_second_drop_does_nothing(node):
    spec = (await node.entry("a")).model
    engine = await node.engine("a", CONTENT)
    await node.save(engine, spec)
    await node.client.drop_image("a")
    await node.client.drop_image("a")
    catalogue = await node.until(lambda catalogue: not catalogue.entries[0].has_image)
    assert catalogue.host_used_bytes == 0


async def test_image_of_changed_files_is_not_listed_but_still_loads_into_its_engine(node):
    spec = (await node.entry("a")).model
    engine = await node.engine("a", CONTENT)
    await node.save(engine, spec)
    checkpoint_files.change_config(node.folder / "models" / "a", max_position_embeddings=32)
    node.reload()
    catalogue = await node.until(lambda catalogue: catalogue.entries[0].model.generation != spec.generation)
    assert not catalogue.entries[0].has_image
    await node.load(engine, spec)
    with pytest.raises(Unmet, match=f"is of generation {spec.generation}"):
        await node.load(engine, catalogue.entries[0].model)


async def test_save_of_files_that_changed_since_the_catalogue_was_read_is_refused(node):
    spec = (await node.entry("a")).model
    engine = await node.engine("a", CONTENT)
    os.utime(node.folder / "models" / "a" / checkpoint_files.SINGLE)
    with pytest.raises(Unmet, match="the files of a have changed since the catalogue was read"):
        await node.save(engine, spec)
    catalogue = await node.until(lambda catalogue: True)
    assert catalogue.host_used_bytes == 0
    node.reload()
    catalogue = await node.until(lambda catalogue: catalogue.entries[0].model.generation != spec.generation)
    assert (await node.save(engine, catalogue.entries[0].model)).checksum == engine.checksum


async def test_loads_of_two_models_run_at_the_same_time(node):
    engines = [await node.engine(name, os.urandom(1_000_000)) for name in "ab"]
    specs = [(await node.entry(name)).model for name in "ab"]
    contents = [engine.content() for engine in engines]
    await asyncio.gather(*(node.save(engine, spec) for engine, spec in zip(engines, specs, strict=True)))
    for engine in engines:
        await asyncio.to_thread(engine.range.leave)
        await asyncio.to_thread(engine.map)
    await asyncio.gather(*(node.load(engine, spec) for engine, spec in zip(engines, specs, strict=True)))
    assert [engine.content() for engine in engines] == contents


async def test_lease_on_another_device_is_a_source_while_it_has_its_weights_and_the_loader_lives(node):
    spec = (await node.entry("a")).model
    source = await node.engine("a", CONTENT)
    await node.save(source, spec)
    target = await node.engine("a", bytes(len(CONTENT)), "cpu:1")
    told = []
    loaded = await node.load(target, spec, on_progress=told.append)
    assert (loaded.source, loaded.checksum, loaded.image_bytes) == ("cpu:0", source.checksum, len(CONTENT))
    assert "copying from cpu:0" in {progress.step for progress in told} and told[-1].done == told[-1].total
    assert target.content() == CONTENT
    await node.asleep(target)
    assert (await node.load(target, spec, image_only=True)).source == "image" and target.content() == CONTENT
    # Who comes new does not know what was there before it.
    node.kill("loader")
    node.start("loader")
    await node.healthy()
    await node.asleep(target)
    assert (await node.load(target, spec)).source == "image" and target.content() == CONTENT
    assert (await node.load(source, spec)).source == "cpu:1" and source.content() == CONTENT


async def test_a_save_cancelled_by_its_caller_leaves_no_memory_behind(node):
    content = os.urandom(12 << 20)
    engine = await node.engine("a", content)
    spec = (await node.entry("a")).model
    begun = asyncio.Event()
    saving = asyncio.get_running_loop().create_task(node.save(engine, spec, on_progress=lambda progress: begun.set()))
    await begun.wait()
    saving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await saving
    await node.until(lambda catalogue: catalogue.entries[0].has_image or not catalogue.host_used_bytes)
    # And nothing is in the way of the next one.
    assert (await node.save(engine, spec)).checksum == engine.checksum


async def test_a_killed_loader_comes_back_with_the_models_that_were_added(node):
    path = str(node.checkpoint("c"))
    added = await node.add("c", path, pinned=True)
    node.kill("loader")
    node.start("loader")
    assert (await node.entry("c")).model == added
    await node.client.remove("c")
    node.kill("loader")
    node.start("loader")
    catalogue = await node.until(lambda catalogue: True)
    assert [entry.model.name for entry in catalogue.entries] == ["a", "b"]


async def test_a_killed_loader_comes_back_with_its_images(node):
    spec = (await node.entry("a")).model
    engine = await node.engine("a", CONTENT)
    await node.save(engine, spec)
    node.kill("loader")
    await asyncio.to_thread(engine.range.leave)
    await asyncio.to_thread(engine.map)
    node.start("loader")
    entry = await node.entry("a")
    assert (entry.has_image, entry.image_checksum) == (True, engine.checksum)
    assert entry.model == spec  # the generation too: no file has changed
    await node.load(engine, spec)
    assert engine.content() == CONTENT


async def test_a_killed_keeper_is_given_the_images_back(node):
    spec = (await node.entry("a")).model
    engine = await node.engine("a", CONTENT)
    await node.save(engine, spec)
    node.kill("keeper")
    node.start("keeper")
    # A save ends when the keeper holds it, and what it lost was put back before.
    other = await node.engine("b", CONTENT[:1000])
    await node.save(other, (await node.entry("b")).model)
    node.kill("loader")
    node.start("loader")
    assert (await node.entry("a")).has_image and (await node.entry("b")).has_image


async def test_a_killed_balloond_is_found_again_by_loader_and_engine(node):
    spec = (await node.entry("a")).model
    engine = await node.engine("a", CONTENT)
    await node.save(engine, spec)
    node.kill("balloond")
    loading = asyncio.get_running_loop().create_task(node.load(engine, spec))
    node.start("balloond")
    await node.healthy()
    await loading
    assert engine.content() == CONTENT
    await asyncio.to_thread(engine.range.leave)
    await asyncio.to_thread(engine.map)
    await node.load(engine, spec)
    assert engine.content() == CONTENT


async def test_copy_without_the_loader_is_unavailable(node):
    spec = (await node.entry("a")).model
    engine = await node.engine("a", CONTENT)
    node.kill("loader")
    with pytest.raises(Unavailable, match=f"the loader at {node.address}: "):
        await node.load(engine, spec)
