"""What the catalogue says together with what the checkpoints say."""

import json
import os

import pytest

from kv_kinds.layout import BESIDE_TOKENS
from loader.catalogue.catalogue import CatalogueEntry
from loader.catalogue.models import NodeModels, Sizes, read_model
from loader.checkpoints import checkpoint
from loader.checkpoints.errors import BrokenCheckpoint
from protos import keeper_pb2
from services.errors import Exists, NotFound
from tests.loader import checkpoint_files
from tests.loader.fakes import FakeKeeper

SIZES = Sizes(dtype_bytes=4, kv_extent_bytes=10_000, quota_bytes=77)
KV = 2 * 2 * 2 * 8 * 4
"""Bytes per token of the test checkpoint; its context is 64 tokens."""


def listed(folder, name="m", **keys):
    return CatalogueEntry(name=name, path=str(folder), **keys)


@pytest.fixture
def folder(tmp_path):
    return checkpoint_files.write(tmp_path / "m")


@pytest.fixture
def models():
    changes = []
    keeper = FakeKeeper()
    models = NodeModels(SIZES, lambda: changes.append(None), keeper)
    models.changes, models.keeper = changes, keeper
    return models


def write_catalogue(tmp_path, *folders):
    path = tmp_path / "catalogue.toml"
    path.write_text("".join(f'[[model]]\nname = "{folder.name}"\npath = "{folder.name}"\n' for folder in folders))
    return str(path)


def test_floor_of_a_model_is_its_longest_request_in_whole_extents(folder):
    model = read_model(listed(folder), SIZES)
    assert 64 * KV == 16_384 and (64 + BESIDE_TOKENS) * KV == 65_536 and model.floor_bytes == 70_000
    assert model.quota_bytes == 77


def test_catalogue_entry_may_shorten_the_context_raise_the_floor_and_set_the_quota(folder):
    assert read_model(listed(folder, context_tokens=30), SIZES).floor_bytes == 60_000
    assert read_model(listed(folder, floor_tokens=128), SIZES).floor_bytes == 70_000
    assert read_model(listed(folder, floor_tokens=512), SIZES).floor_bytes == 140_000
    assert read_model(listed(folder, quota_bytes=0), SIZES).quota_bytes == 0


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"context_tokens": 65}, "context_tokens 65, its checkpoint has 64"),
        ({"floor_tokens": 63}, "floor_tokens 63, less than one request of 64 tokens"),
    ],
)
def test_token_counts_that_the_checkpoint_cannot_have_are_an_error_of_the_model(folder, keys, reason):
    model = read_model(listed(folder, **keys), SIZES)
    assert reason in model.error and model.checkpoint is None and model.generation == 0


async def test_a_broken_checkpoint_is_an_error_of_its_model_and_the_others_are_read(tmp_path, models):
    good, bad = checkpoint_files.write(tmp_path / "good"), checkpoint_files.write(tmp_path / "bad")
    os.truncate(bad / checkpoint_files.SINGLE, 100)
    await models.reload(write_catalogue(tmp_path, good, bad))
    assert models.get("good").error == "" and models.get("good").generation > 0
    assert "is truncated" in models.get("bad").error
    assert len(models.changes) == 1


async def test_model_added_again_with_the_same_path_is_read_afresh(folder, models):
    first = await models.add(listed(folder))
    os.truncate(folder / "tokenizer.json", 2)
    (folder / "tokenizer.json").write_text("{}")
    second = await models.add(listed(folder, pinned=True))
    assert second.generation != first.generation and second.listed.pinned
    assert models.get("m") == second


async def test_model_added_with_another_path_under_a_taken_name_is_refused(tmp_path, folder, models):
    await models.add(listed(folder))
    other = checkpoint_files.write(tmp_path / "other")
    with pytest.raises(Exists, match=f"taken by the model at {folder}"):
        await models.add(listed(other))
    link = tmp_path / "link"
    link.symlink_to(folder)
    await models.add(listed(link))  # the same folder by another name


async def test_model_added_with_a_name_or_alias_of_another_is_refused_and_its_own_may_change(tmp_path, folder, models):
    other = checkpoint_files.write(tmp_path / "other")
    await models.add(listed(folder, aliases=("x", "y")))
    for name, aliases in (("x", ()), ("other", ("m",)), ("other", ("y",))):
        with pytest.raises(Exists, match="alias '[xym]' of"):
            await models.add(listed(other, name, aliases=aliases))
    assert (await models.add(listed(folder, aliases=("y", "z")))).listed.aliases == ("y", "z")
    await models.add(listed(other, "x"))
    await models.remove("m")
    await models.add(listed(other, "x", aliases=("m", "z")))


async def test_setting_of_a_model_in_the_file_is_changed_there_alone(tmp_path, models):
    folder = checkpoint_files.write(tmp_path / "one")
    await models.reload(write_catalogue(tmp_path, folder))
    first = models.get("one")
    with pytest.raises(Exists, match="'one' is in the catalogue file: change its 'pinned' there"):
        await models.add(listed(folder, "one", pinned=True))
    assert models.get("one") is first
    again = await models.add(listed(folder, "one"))
    assert again.listed == first.listed and not again.added, "its files are read afresh"


async def test_names_of_the_file_go_before_aliases_of_added_models(tmp_path, folder, models):
    one = checkpoint_files.write(tmp_path / "one")
    await models.add(listed(folder, aliases=("one", "x")))
    with pytest.raises(ValueError, match="catalogue.toml: the alias 'one' of 'm' is the name of a model, beside"):
        await models.reload(write_catalogue(tmp_path, one))
    assert [model.listed.name for model in models.all()] == ["m"]
    again = successor(models)
    await again.reload(write_catalogue(tmp_path, one))
    await again.restore(models.keeper.records.values())
    assert {model.listed.name: model.listed.aliases for model in again.all()} == {"one": (), "m": ("x",)}


async def test_a_broken_checkpoint_is_not_added(folder, models):
    os.unlink(folder / "tokenizer.json")
    with pytest.raises(BrokenCheckpoint, match="no tokenizer"):
        await models.add(listed(folder))
    assert models.all() == []


async def test_inspected_model_is_read_and_the_catalogue_stays_unchanged(folder, models):
    assert (await models.inspect(listed(folder))).checkpoint.layers == 2
    assert models.all() == [] and models.changes == []


async def test_model_added_by_a_call_survives_a_reload_and_one_that_left_the_file_does_not(tmp_path, folder, models):
    one, two = checkpoint_files.write(tmp_path / "one"), checkpoint_files.write(tmp_path / "two")
    await models.reload(write_catalogue(tmp_path, one, two))
    await models.add(listed(folder, "added"))
    await models.reload(write_catalogue(tmp_path, two))
    assert {model.listed.name for model in models.all()} == {"two", "added"}


async def test_a_reload_notices_changed_files(tmp_path, models):
    one = checkpoint_files.write(tmp_path / "one")
    path = write_catalogue(tmp_path, one)
    await models.reload(path)
    before = models.get("one").generation
    checkpoint_files.change_config(one, max_position_embeddings=32)
    await models.reload(path)
    assert models.get("one").generation != before and models.get("one").context_tokens == 32


async def test_reload_of_an_invalid_catalogue_file_changes_nothing(tmp_path, models):
    one = checkpoint_files.write(tmp_path / "one")
    path = write_catalogue(tmp_path, one)
    await models.reload(path)
    (tmp_path / "catalogue.toml").write_text("nonsense = 1")
    with pytest.raises(ValueError, match="nonsense: unknown key"):
        await models.reload(path)
    assert models.get("one").error == ""


async def test_model_removed_twice_is_not_found_the_second_time(folder, models):
    await models.add(listed(folder))
    await models.remove("m")
    with pytest.raises(NotFound, match="no model 'm'"):
        await models.remove("m")


def successor(models):
    """Another process, with the same keeper."""
    return NodeModels(SIZES, lambda: None, models.keeper)


async def test_model_added_by_a_call_is_restored_in_the_next_process_with_its_settings(folder, models):
    asked = listed(folder, pinned=True, ttft_ms=7, context_tokens=30)
    await models.add(asked)
    again = successor(models)
    await again.restore(models.keeper.records.values())
    assert again.get("m") == models.get("m") and again.get("m").listed == asked
    assert [record.id for record, _ in again.everything()] == ["model/m"]
    await again.remove("m")
    assert models.keeper.records == {} and list(again.everything()) == []


async def test_change_numbers_survive_with_the_names_of_removed_models(tmp_path, folder, models):
    other = checkpoint_files.write(tmp_path / "other")
    await models.add(listed(folder), 7)
    await models.add(listed(other, "other"))
    assert (models.change("m"), models.change("other"), models.removed) == (7, 8, {})
    await models.remove("m", 9)
    with pytest.raises(NotFound):
        await models.remove("never", 10)
    again = successor(models)
    await again.restore(list(models.keeper.records.values()))
    assert again.removed == models.removed == {"m": 9, "never": 10}
    assert [model.listed.name for model in again.all()] == ["other"] and again.change("other") == 8
    await again.add(listed(folder))
    assert again.change("m") == 11 and again.removed == {"never": 10}


async def test_model_of_the_file_has_change_number_0_and_undoes_its_removal_by_a_call(tmp_path, models):
    one = checkpoint_files.write(tmp_path / "one")
    path = write_catalogue(tmp_path, one)
    with pytest.raises(NotFound):
        await models.remove("one", 3)
    await models.reload(path)
    assert models.change("one") == 0 and models.removed == {} and models.keeper.records == {}
    await models.remove("one", 4)
    assert models.removed == {} and models.keeper.records == {}, "it is back with the next reading"


async def test_record_without_a_change_number_is_read_as_change_1(folder, models):
    detail = listed(folder).model_dump_json().encode()
    await models.restore([keeper_pb2.Record(id="model/m", owner="loader", kind="model", detail=detail)])
    assert models.get("m").added and models.change("m") == 1


async def test_record_has_only_given_fields_so_that_older_versions_read_it(folder, models):
    await models.add(listed(folder, pinned=True))
    (record,) = models.keeper.records.values()
    assert json.loads(record.detail).keys() == {"name", "path", "pinned", "change"}


async def test_model_added_by_a_call_and_later_named_by_the_file_has_the_settings_of_the_file(tmp_path, models):
    one = checkpoint_files.write(tmp_path / "one")
    await models.add(listed(one, "one", pinned=True))
    again = successor(models)
    await again.reload(write_catalogue(tmp_path, one))
    await again.restore(list(models.keeper.records.values()))
    assert not again.get("one").added and not again.get("one").listed.pinned
    assert models.keeper.records == {}


async def test_an_added_model_whose_folder_is_gone_comes_back_with_its_error(folder, models):
    await models.add(listed(folder))
    os.unlink(folder / "tokenizer.json")
    again = successor(models)
    await again.restore(models.keeper.records.values())
    assert "no tokenizer" in again.get("m").error


async def test_a_record_of_another_version_is_forgotten(models):
    record = keeper_pb2.Record(id="model/x", owner="loader", kind="model", detail=b'{"nom": "x"}')
    models.keeper.records[record.id] = record
    await models.restore([record])
    assert models.all() == [] and models.keeper.records == {}


async def test_removed_names_beyond_the_bound_are_forgotten_oldest_first(folder):
    keeper = FakeKeeper()
    models = NodeModels(SIZES, lambda: None, keeper, most_removed=2)
    await models.add(listed(folder, "stays"), 1)
    for number in (3, 2, 4, 5):
        with pytest.raises(NotFound):
            await models.remove(f"gone-{number}", number)
    assert models.removed == {"gone-4": 4, "gone-5": 5}
    assert keeper.records.keys() == {"model/stays", "model/gone-4", "model/gone-5"}


def test_model_files_that_raise_an_unexpected_exception_are_an_error_of_their_model(folder, monkeypatch):
    def read(*_given, **_options):
        raise IndexError("no \ud800 here")

    monkeypatch.setattr(checkpoint, "read", read)
    found = read_model(listed(folder), SIZES)
    assert found.checkpoint is None
    assert found.error.encode() == b"its files were not understood: IndexError: no \\ud800 here"


def test_error_of_a_model_is_one_line_of_bounded_length_without_control_characters(folder):
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**written, "rope_scaling": ["\x1b]0;owned\x07" * 1000]}))
    error = read_model(CatalogueEntry(name="m", path=str(folder)), SIZES).error
    assert error.startswith("config.json: rope_scaling = ") and len(error) < 8 * 1024
    assert error.isprintable()
