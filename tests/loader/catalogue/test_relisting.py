"""Models in error are looked at again by themselves: what was away is noticed when it is back."""

import asyncio
import os

import pytest
import structlog.testing

from loader.catalogue.catalogue import CatalogueEntry
from loader.catalogue.models import NodeModels, Sizes
from loader.catalogue.relisting import Relisting
from loader.checkpoints import checkpoint
from services.runtime import tasks
from tests.loader import checkpoint_files
from tests.loader.fakes import FakeKeeper


class Catalogue:
    """Models of folders under one volume, looked at on a clock that the test moves."""

    def __init__(self, volume):
        self.volume = volume
        self.now = 0.0
        self.told = []
        sizes = Sizes(dtype_bytes=4, kv_extent_bytes=10_000, quota_bytes=0)
        self.models = NodeModels(sizes, self.changed, FakeKeeper())
        self.looking = Relisting(self.models, lambda: self.now, self.changed)

    def changed(self):
        self.looking.catalogue_changed()
        self.told.append({m.listed.name: (m.error, self.looking.retry_s(m)) for m in self.models.all()})

    async def list(self, *names):
        file = self.volume.parent / "catalogue.toml"
        file.write_text("".join(f'[[model]]\nname = "{name}"\npath = "{self.volume / name}"\n' for name in names))
        await self.models.reload(str(file))

    async def at(self, now):
        """Everything that is due then has been looked at."""
        self.now = now
        await asyncio.gather(*self.looking.begin_due())

    def state(self, name="m"):
        model = self.models.get(name)
        return model.error, self.looking.retry_s(model)

    def away(self):
        self.volume.rename(self.volume.with_name("away"))

    def back(self):
        self.volume.with_name("away").rename(self.volume)


@pytest.fixture
def catalogue(tmp_path):
    checkpoint_files.write(tmp_path / "volume" / "m")
    return Catalogue(tmp_path / "volume")


GONE = "its folder does not exist"


async def test_a_folder_that_is_away_at_the_start_is_noticed_when_it_is_back(catalogue):
    catalogue.away()
    await catalogue.list("m")
    assert catalogue.state() == (GONE, 1.0)
    await catalogue.at(0.9)
    assert catalogue.state() == (GONE, 1.0)
    for now, pause in ((1.0, 2.0), (3.0, 4.0), (7.0, 8.0), (15.0, 16.0), (31.0, 30.0), (61.0, 30.0)):
        await catalogue.at(now)
        assert catalogue.state() == (GONE, pause) and catalogue.told[-1] == {"m": (GONE, pause)}
    catalogue.back()
    before = catalogue.models.get("m").reading
    with structlog.testing.capture_logs() as said:
        await catalogue.at(91.0)
    assert catalogue.state() == ("", 0.0) and catalogue.told[-1] == {"m": ("", 0.0)}
    assert catalogue.models.get("m").reading != before and catalogue.models.get("m").generation
    assert [(each["event"], each["path"]) for each in said] == [
        ("model can be served again", str(catalogue.volume / "m"))
    ]
    catalogue.told.clear()
    await catalogue.at(1000.0)
    assert catalogue.told == [], "nobody looks any more"


async def test_model_whose_folder_goes_away_keeps_its_generation_until_it_is_back(catalogue):
    await catalogue.list("m")
    before = catalogue.models.get("m")
    catalogue.away()
    found = (await catalogue.models.look("m")).model
    assert (found.error, found.may_pass, found.generation) == (GONE, True, before.generation)
    assert found.context_tokens == before.context_tokens and catalogue.state() == (GONE, 1.0)
    await catalogue.at(1.0)
    catalogue.back()
    await catalogue.at(3.0)
    after = catalogue.models.get("m")
    assert catalogue.state() == ("", 0.0) and after.generation == before.generation and after.reading != before.reading


async def test_checkpoint_that_is_being_written_is_looked_at_more_often(catalogue):
    weights = catalogue.volume / "m" / checkpoint_files.SINGLE
    whole = weights.read_bytes()
    weights.write_bytes(whole[:1000])
    await catalogue.list("m")
    for now in (1.0, 3.0, 7.0):
        await catalogue.at(now)
    assert catalogue.state()[1] == 8.0 and "truncated" in catalogue.state()[0]
    weights.write_bytes(whole[:2000])
    await catalogue.at(15.0)
    assert catalogue.state()[1] == 1.0, "it grows"
    weights.write_bytes(whole)
    await catalogue.at(16.0)
    assert catalogue.state() == ("", 0.0)


async def test_invalid_files_are_not_read_again_before_they_change(catalogue, monkeypatch):
    folder = catalogue.volume / "m"
    checkpoint_files.change_config(folder, architectures=["NoSuchModel"])
    await catalogue.list("m")
    error, retry_s = catalogue.state()
    assert "NoSuchModel is not supported" in error and retry_s == 0.0, "it will not pass"
    read = []
    read_it = checkpoint.read
    monkeypatch.setattr(checkpoint, "read", lambda *asked, **how: read.append(1) or read_it(*asked, **how))
    catalogue.told.clear()
    for now in (1.0, 3.0, 7.0):
        await catalogue.at(now)
    assert not read and catalogue.told == []
    checkpoint_files.change_config(folder, architectures=["LlamaForCausalLM"])
    await catalogue.at(15.0)
    assert read == [1] and catalogue.state() == ("", 0.0)


async def test_model_with_a_passing_and_a_lasting_fault_ends_with_the_lasting_one(catalogue):
    checkpoint_files.change_config(catalogue.volume / "m", num_hidden_layers=3)
    catalogue.away()
    await catalogue.list("m")
    catalogue.back()
    await catalogue.at(1.0)
    assert "the weights lack" in catalogue.state()[0] and catalogue.state()[1] == 0.0


async def test_whole_files_that_changed_leave_the_model_unchanged_before_a_reload(catalogue):
    await catalogue.list("m")
    before = catalogue.models.get("m")
    checkpoint_files.change_config(catalogue.volume / "m", max_position_embeddings=32)
    for thorough in (False, True):
        looked = await catalogue.models.look("m", thorough)
        assert looked.model is before and looked.changed


async def test_files_that_an_engine_refused_are_read_afresh_once_they_change(catalogue):
    await catalogue.list("m")
    before = catalogue.models.get("m")
    looked = await catalogue.models.look("m", thorough=True, refused=True)
    assert looked.model is before and not looked.changed and catalogue.state() == ("", 0.0)
    for now in (1.0, 3.0):
        await catalogue.at(now)
        assert catalogue.models.get("m") is before
    checkpoint_files.change_config(catalogue.volume / "m", max_position_embeddings=32)
    await catalogue.at(7.0)
    after = catalogue.models.get("m")
    assert after.context_tokens == 32 and after.reading != before.reading and not after.error
    checkpoint_files.change_config(catalogue.volume / "m", max_position_embeddings=16)
    await catalogue.at(1000.0)
    assert catalogue.models.get("m") is after, "nobody has refused these"


async def test_files_that_change_before_an_engine_has_refused_them_are_read_afresh_at_once(catalogue):
    await catalogue.list("m")
    before = catalogue.models.get("m")
    checkpoint_files.change_config(catalogue.volume / "m", max_position_embeddings=32)
    looked = await catalogue.models.look("m", thorough=True, refused=True)
    assert looked.changed and looked.model.context_tokens == 32 and looked.model.reading != before.reading


async def test_refused_files_that_were_added_again_are_looked_at_no_more(catalogue):
    await catalogue.list("m")
    await catalogue.models.look("m", thorough=True, refused=True)
    await catalogue.models.add(CatalogueEntry(name="m", path=str(catalogue.volume / "m")))
    assert not catalogue.models.is_refused("m")
    assert await asyncio.gather(*catalogue.looking.begin_due()) == []
    catalogue.now = 1000.0
    assert catalogue.looking.begin_due() == []


async def test_fault_that_only_reading_shows_is_found_by_a_thorough_look(catalogue):
    await catalogue.list("m")
    weights = catalogue.volume / "m" / checkpoint_files.SINGLE
    stat = weights.stat()
    with weights.open("r+b") as file:
        file.seek(8)
        file.write(b"?")
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert not (await catalogue.models.look("m")).model.error
    assert "its header is not JSON" in (await catalogue.models.look("m", thorough=True)).model.error


async def test_scheduled_looks_at_a_model_end_when_it_is_added_again_removed_or_reloaded(catalogue):
    catalogue.away()
    await catalogue.list("m")
    catalogue.back()
    await catalogue.models.add(CatalogueEntry(name="m", path=str(catalogue.volume / "m")))
    assert catalogue.state() == ("", 0.0), "at once"
    catalogue.away()
    await catalogue.models.look("m")
    await catalogue.at(1.0)
    assert catalogue.state() == (GONE, 2.0)
    await catalogue.list("m")
    assert catalogue.state() == (GONE, 1.0), "somebody asked: it is looked at soon"
    await catalogue.models.remove("m")
    catalogue.told.clear()
    await catalogue.at(1000.0)
    assert catalogue.told == []


async def test_look_at_a_model_that_hangs_does_not_delay_those_at_others(catalogue, monkeypatch):
    checkpoint_files.write(catalogue.volume / "n")
    catalogue.away()
    await catalogue.list("m", "n")
    catalogue.back()
    looking = catalogue.models.look
    hangs = asyncio.Event()

    async def look(name):
        if name == "m":
            await hangs.wait()
        return await looking(name)

    monkeypatch.setattr(catalogue.models, "look", look)
    catalogue.now = 1.0
    one, other = catalogue.looking.begin_due()
    await other
    assert catalogue.state("n") == ("", 0.0) and not one.done()
    catalogue.now = 100.0
    assert catalogue.looking.begin_due() == [], "it is being looked at"
    hangs.set()
    await one
    assert catalogue.state("m") == ("", 0.0)


async def test_relisting_task_looks_when_a_model_is_due_and_sleeps_when_none_is(catalogue):
    catalogue.away()
    running = tasks.spawn(catalogue.looking.run(), "looks")
    await asyncio.sleep(0)
    await catalogue.list("m")
    catalogue.back()
    catalogue.now = 1.0
    catalogue.looking.catalogue_changed()  # it looks at the clock again
    while catalogue.state() != ("", 0.0):
        assert not running.done()
        await asyncio.sleep(0)
    await tasks.cancel(running)
