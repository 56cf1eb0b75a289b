"""Models whose files are whole and whose tokenizer, chat template or configuration cannot be used are in error."""

import asyncio

import pytest

from loader.catalogue.catalogue import CatalogueEntry
from loader.catalogue.models import NodeModels, Sizes
from loader.checkpoints.errors import BrokenCheckpoint, PassingFault
from loader.checkpoints.text_trials import TextFault
from tests.loader import checkpoint_files
from tests.loader.fakes import FakeKeeper

SIZES = Sizes(dtype_bytes=4, kv_extent_bytes=10_000, quota_bytes=0)


class Catalogue:
    """One with a trial whose verdicts a test sets, by the name of the folder."""

    def __init__(self):
        self.faults = {}
        self.tried = []
        self.changed = asyncio.Event()
        self.models = NodeModels(SIZES, self.changed.set, FakeKeeper(), text_fault=self.fault)

    async def fault(self, path, generation, present):
        self.tried.append((path, generation))
        assert present() == generation
        return self.faults.get(path.rsplit("/")[-1])

    async def until(self, name, error):
        while self.models.get(name).error != error:
            self.changed.clear()
            await self.changed.wait()


@pytest.fixture
def catalogue():
    return Catalogue()


def listed(folder):
    return CatalogueEntry(name=folder.name, path=str(folder))


async def test_model_with_a_text_fault_is_refused_with_the_reason_by_add_and_inspect(catalogue, tmp_path):
    folder = checkpoint_files.write(tmp_path / "m")
    catalogue.faults["m"] = TextFault("its chat template does not compile")
    for call in (catalogue.models.inspect, catalogue.models.add):
        with pytest.raises(BrokenCheckpoint, match="its chat template does not compile"):
            await call(listed(folder))
    assert catalogue.models.all() == []
    catalogue.faults["m"] = TextFault("its folder is not there", may_pass=True)
    with pytest.raises(PassingFault):
        await catalogue.models.inspect(listed(folder))
    del catalogue.faults["m"]
    assert (await catalogue.models.add(listed(folder))).error == ""


async def test_models_of_the_catalogue_file_are_listed_at_once_and_in_error_after_their_trial(catalogue, tmp_path):
    folders = [checkpoint_files.write(tmp_path / name) for name in ("good", "bad")]
    catalogue.faults["bad"] = TextFault("its tokenizer cannot be used")
    file = tmp_path / "catalogue.toml"
    file.write_text("".join(f'[[model]]\nname = "{folder.name}"\npath = "{folder}"\n' for folder in folders))
    await catalogue.models.reload(str(file))
    assert [model.error for model in catalogue.models.all()] == ["", ""]
    await catalogue.until("bad", "its tokenizer cannot be used")
    assert catalogue.models.get("good").error == ""
    assert catalogue.models.get("bad").checkpoint is None


async def test_folder_that_goes_away_during_its_trial_is_in_the_error_that_a_look_finds(catalogue, tmp_path):
    folder = checkpoint_files.write(tmp_path / "m")

    async def goes_away(path, generation, present):
        folder.rename(tmp_path / "away")
        return TextFault("its tokenizer is not there", may_pass=True)

    catalogue.models._text_fault = goes_away
    file = tmp_path / "catalogue.toml"
    file.write_text(f'[[model]]\nname = "m"\npath = "{folder}"\n')
    await catalogue.models.reload(str(file))
    before = catalogue.models.get("m")
    await catalogue.until("m", "its folder does not exist")
    found = (await catalogue.models.look("m")).model
    assert found is catalogue.models.get("m") and found.may_pass and found.checkpoint == before.checkpoint
    catalogue.models._text_fault = catalogue.fault
    (tmp_path / "away").rename(folder)
    assert (await catalogue.models.look("m")).model.error == ""


async def test_look_at_a_model_with_a_text_fault_tries_again_and_serves_it_only_on_success(catalogue, tmp_path):
    folder = checkpoint_files.write(tmp_path / "m")
    model = await catalogue.models.add(listed(folder))
    catalogue.faults["m"] = TextFault("its tokenizer cannot be used")
    file = tmp_path / "catalogue.toml"
    file.write_text(f'[[model]]\nname = "m"\npath = "{folder}"\n')
    await catalogue.models.reload(str(file))
    await catalogue.until("m", "its tokenizer cannot be used")
    before = catalogue.models.get("m")
    assert (await catalogue.models.look("m", thorough=True)).model is before
    del catalogue.faults["m"]
    (folder / "tokenizer_config.json").write_text("{}")
    found = (await catalogue.models.look("m")).model
    assert found.error == "" and found.generation != model.generation


async def test_text_fault_of_an_earlier_reading_does_not_reach_a_model_read_anew(catalogue, tmp_path):
    folder = checkpoint_files.write(tmp_path / "m")
    go = asyncio.Event()

    async def slow(path, generation, present):
        await go.wait()
        return TextFault("old news")

    catalogue.models._text_fault = slow
    file = tmp_path / "catalogue.toml"
    file.write_text(f'[[model]]\nname = "m"\npath = "{folder}"\n')
    await catalogue.models.reload(str(file))
    catalogue.models._text_fault = None
    await catalogue.models.reload(str(file))
    now = catalogue.models.get("m")
    go.set()
    for _ in range(5):
        await asyncio.sleep(0)
    assert catalogue.models.get("m") is now and not now.error
