"""Between the protocol and what the loader works with."""

from dataclasses import replace

import pytest

from kv_kinds import messages
from kv_kinds.layout import KvLayout, attention, latent, of_tokens, state, window
from loader import wire
from loader.catalogue.catalogue import CatalogueEntry
from loader.catalogue.models import CatalogueModel, Sizes
from loader.checkpoints.checkpoint import Checkpoint
from loader.checkpoints.embedding import Embedding
from loader.checkpoints.generation_defaults import SamplingDefaults
from loader.checkpoints.reranking import Reranker
from loader.copies.jobs import Result
from loader.images import image_memory
from protos import common_pb2, engine_pb2
from services.errors import Invalid

LISTED = CatalogueEntry(name="m", path="/models/m", ttft_ms=5, tpot_ms=6, pinned=True, engine="echo", context_tokens=10)
FOUND = Checkpoint(
    generation=9,
    architecture="LlamaForCausalLM",
    context_tokens=64,
    layers=2,
    kv_heads=2,
    head_dim=8,
    vocabulary=100,
    weights_bytes=1000,
    kv=of_tokens(256),
)
SIZES = Sizes(dtype_bytes=4, kv_extent_bytes=2000, quota_bytes=77)


@pytest.fixture
def image():
    image = image_memory.create("m", 9, 100, b"manifest")
    image.checksum = "rows:5"
    yield image
    image.close()


def test_listing_of_a_request_to_add_becomes_a_catalogue_entry():
    slo = common_pb2.Slo(ttft_ms=5, tpot_ms=6)
    request = common_pb2.ModelListing(name="m", path="/models/m", default_slo=slo, pinned=True, engine="echo")
    assert wire.listed(request) == LISTED.model_copy(update={"context_tokens": 0})
    request.context_tokens, request.floor_tokens, request.quota_bytes = 10, 20, 0
    request.tool_parser = "hermes"
    request.task = "embed"
    asked = LISTED.model_copy(update={"floor_tokens": 20, "quota_bytes": 0, "tool_parser": "hermes", "task": "embed"})
    assert wire.listed(request) == asked and wire.listed(wire.listing(asked)) == asked
    assert wire.model_spec(CatalogueModel(asked, SIZES, FOUND)).tool_parser == "hermes"


def test_listing_of_a_catalogue_entry_says_every_value_of_it():
    given = {
        "name": "n",
        "path": "/n",
        "ttft_ms": 1,
        "tpot_ms": 2,
        "pinned": True,
        "engine": "echo",
        "devices": 2,
        "quota_bytes": 3,
        "context_tokens": 4,
        "floor_tokens": 5,
        "tool_parser": "qwen3_coder",
        "reasoning_parser": "none",
        "task": "embed",
        "kv_dtype": "fp8",
        "unverified": True,
        "most_replicas": 3,
        "aliases": ("o", "p"),
    }
    entry, adapter = CatalogueEntry(**given), CatalogueEntry(name="a", path="/a", base="n")
    known = CatalogueEntry.model_fields.keys()
    assert given.keys() | {"base"} == known, "a new key of the catalogue goes through the wire too"
    assert wire.listed(wire.listing(entry)) == entry and wire.listed(wire.listing(adapter)) == adapter


def test_model_spec_has_only_the_sampling_defaults_of_its_checkpoint():
    assert not wire.model_spec(CatalogueModel(LISTED, SIZES, FOUND)).HasField("sampling")
    says = replace(FOUND, sampling=SamplingDefaults(temperature=0.0, top_k=20))
    told = wire.model_spec(CatalogueModel(LISTED, SIZES, says)).sampling
    assert {field.name: value for field, value in told.ListFields()} == {"temperature": 0.0, "top_k": 20}


def test_model_spec_has_the_reranker_of_its_checkpoint():
    assert not wire.model_spec(CatalogueModel(LISTED, SIZES, FOUND)).HasField("reranker")
    for reranker in (Reranker(), Reranker(5, 6)):
        told = wire.model_spec(CatalogueModel(LISTED, SIZES, replace(FOUND, reranker=reranker)))
        assert told.HasField("reranker")
        found = [told.reranker.HasField(name) and getattr(told.reranker, name) for name in vars(reranker)]
        assert found == [value or False for value in vars(reranker).values()]


def test_model_spec_has_the_embedding_of_its_checkpoint():
    assert not wire.model_spec(CatalogueModel(LISTED, SIZES, FOUND)).HasField("embedding")
    made = replace(FOUND, embedding=Embedding(32, True, (8, 16)))
    told = wire.model_spec(CatalogueModel(LISTED, SIZES, made)).embedding
    assert (told.dimensions, told.shortens, list(told.shorter)) == (32, True, [8, 16])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"path": "x"}, "path: 'x' is not absolute"), ({"engine": "x"}, "engine: "), ({"name": "/"}, "name: ")],
)
def test_impossible_listing_is_invalid_by_its_field(changes, reason):
    with pytest.raises(Invalid, match=reason):
        wire.listed(common_pb2.ModelListing(**{"name": "m", "path": "/x", **changes}))


def test_model_spec_has_sizes_and_settings():
    assert wire.model_spec(CatalogueModel(LISTED, SIZES, FOUND)) == common_pb2.ModelSpec(
        name="m",
        path="/models/m",
        architecture="LlamaForCausalLM",
        context_tokens=10,
        weights_bytes=1000,
        kv_bytes_per_token=256,
        floor_bytes=52_000,
        quota_bytes=77,
        quota_is_default=True,
        vocab_size=100,
        default_slo=common_pb2.Slo(ttft_ms=5, tpot_ms=6),
        pinned=True,
        generation=9,
        engine="echo",
        devices=1,
        kv_kinds=[common_pb2.KvKind(name="attention", bytes_per_token=256)],
    )


def test_entry_of_a_broken_model_has_its_reason_and_no_sizes():
    entry = wire.entry(CatalogueModel(LISTED, SIZES, None, "no tokenizer"), [])
    assert entry.error == "no tokenizer" and entry.model.name == "m"
    assert (entry.model.generation, entry.model.weights_bytes, entry.model.floor_bytes) == (0, 0, 0)


def test_entry_has_an_image_only_of_its_own_generation(image):
    entry = wire.entry(CatalogueModel(LISTED, SIZES, FOUND), [image])
    assert (entry.has_image, entry.image_bytes, entry.image_checksum) == (True, 100, "rows:5")
    image.generation = 8
    assert not wire.entry(CatalogueModel(LISTED, SIZES, FOUND), [image]).has_image


def test_model_spec_on_several_devices_has_the_bytes_of_all_of_them():
    spec = wire.model_spec(CatalogueModel(LISTED.model_copy(update={"devices": 2}), SIZES, FOUND))
    assert (spec.devices, spec.quota_bytes, spec.weights_bytes) == (2, 154, 2000)
    assert (spec.kv_bytes_per_token, spec.floor_bytes) == (512, 104_000)
    assert messages.layout(spec) == of_tokens(512)


def test_model_spec_of_several_kinds_has_states_in_whole_extents_of_each_device():
    found = replace(FOUND, kv=KvLayout((attention(256), latent(10), window(20, 30, 4), state(2001, 3))))
    spec = wire.model_spec(CatalogueModel(LISTED.model_copy(update={"devices": 2}), SIZES, found))
    kinds = (attention(512), replace(latent(10), bytes_per_token=20), window(40, 30, 4), state(8000, 3))
    assert messages.layout(spec) == KvLayout(kinds)
    assert spec.kv_bytes_per_token == 512 + 20 + 40, "for processes that know no kinds"
    assert spec.floor_bytes == 2 * (52_000 + 4_000 + 6_000 + 4 * 4_000)


def test_entry_has_an_image_once_the_parts_of_all_ranks_are_there(image):
    model = CatalogueModel(LISTED.model_copy(update={"devices": 2}), SIZES, FOUND)
    assert not wire.entry(model, [image]).has_image
    other = image_memory.create("m", 9, 50, b"manifest", rank=1)
    other.checksum = "rows:6"
    entry = wire.entry(model, [image, other])
    assert (entry.has_image, entry.image_bytes, entry.image_checksum) == (True, 150, "rows:5")
    assert list(entry.other_checksums) == ["rows:6"]
    other.generation = 8
    assert not wire.entry(model, [image, other]).has_image
    other.close()


def test_a_manifest_gives_the_size_of_its_range():
    assert wire.manifest_bytes(engine_pb2.Manifest(total_bytes=5).SerializeToString()) == 5
    for nonsense in (b"", b"\xff", engine_pb2.Manifest(total_bytes=-5).SerializeToString()):
        with pytest.raises(Invalid, match="manifest: "):
            wire.manifest_bytes(nonsense)


def test_the_last_message_of_a_copy_has_the_image_and_where_it_came_from():
    last = wire.image_progress(Result("rows:5", 100, "cuda:1"))
    assert (last.progress.done, last.progress.total, last.progress.unit) == (100, 100, "bytes")
    assert (last.checksum, last.image_bytes, last.source) == ("rows:5", 100, "cuda:1")


@pytest.mark.parametrize("number", [-1, (1 << 63) - 1])
def test_change_number_out_of_range_is_refused(number):
    with pytest.raises(Invalid, match="change"):
        wire.change(number)
    assert wire.change(1 << 62) == 1 << 62


@pytest.mark.parametrize("name", ["", "a b", "x" * 201])
def test_removal_of_an_impossible_model_name_is_refused(name):
    with pytest.raises(Invalid, match="name"):
        wire.removed_name(name)
