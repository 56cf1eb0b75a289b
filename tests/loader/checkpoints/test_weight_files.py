"""Safetensors headers: every way in which a file does not hold what it says is found and named."""

import json
import os
import struct

import pytest

from loader.checkpoints.errors import BrokenCheckpoint
from loader.checkpoints.weight_files import Tensor, read_header, tensors_of
from tests.loader import checkpoint_files
from tests.loader.checkpoint_files import INDEX, SINGLE

TWO = {
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
}


def test_a_header_is_read_with_types_and_shapes_and_without_metadata(tmp_path):
    path = tmp_path / SINGLE
    checkpoint_files.write_safetensors(path, {"__metadata__": {"format": "pt"}, **TWO}, 32)
    assert read_header(path) == {"a": Tensor("F32", (2, 3), SINGLE), "b": Tensor("BF16", (4,), SINGLE)}


def test_a_scalar_has_one_element_and_an_empty_tensor_none(tmp_path):
    path = tmp_path / SINGLE
    header = {
        "one": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]},
        "none": {"dtype": "F32", "shape": [0, 7], "data_offsets": [4, 4]},
    }
    checkpoint_files.write_safetensors(path, header)
    assert {name: tensor.elements for name, tensor in read_header(path).items()} == {"one": 1, "none": 0}


def test_padding_behind_a_safetensors_header_belongs_to_it(tmp_path):
    path = tmp_path / SINGLE
    checkpoint_files.write_safetensors(path, json.dumps(TWO).encode() + b"   ", 32)
    assert set(read_header(path)) == {"a", "b"}


@pytest.mark.parametrize(
    ("header", "data_bytes", "reason"),
    [
        pytest.param(TWO, 31, "is truncated: its header describes 32 bytes of data, it has 31", id="data cut short"),
        pytest.param(TWO, 33, "has 1 bytes beyond the 32", id="more data than described"),
        pytest.param(b"{not json", 0, "its header is not JSON", id="header not JSON"),
        pytest.param(b"\xff\xfe", 0, "its header is not JSON", id="header not text"),
        pytest.param(b"[1]", 0, "its header is not a JSON object", id="header not an object"),
        pytest.param(b'{"a": 1, "a": 2}', 0, "its header has a key twice", id="a name twice"),
        pytest.param({"a": {"dtype": "F32"}}, 0, "a is not described by", id="no offsets"),
        pytest.param({"a": 5}, 0, "a is not described by", id="no description"),
        pytest.param(
            {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, 4, "a of F32 [2] cannot have the 4 bytes",
            id="offsets do not fit the shape",
        ),
        pytest.param(
            {"a": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}, 4, "a has the unknown type 'F99'",
            id="unknown type",
        ),
        pytest.param(
            {"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, 4, "that are not whole numbers",
            id="negative size",
        ),
        pytest.param(
            {"a": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}}, 4, "that are not whole numbers",
            id="fractional size",
        ),
        pytest.param(
            {"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, 8, "a begins at 4, not at 0",
            id="gap before the first",
        ),
        pytest.param(
            {**TWO, "c": {"dtype": "F32", "shape": [1], "data_offsets": [28, 32]}}, 32, "a gap or an overlap",
            id="overlap",
        ),
    ],
)  # fmt: skip
def test_broken_safetensors_file_is_named_with_its_fault(tmp_path, header, data_bytes, reason):
    path = tmp_path / SINGLE
    checkpoint_files.write_safetensors(path, header, data_bytes)
    with pytest.raises(BrokenCheckpoint) as broken:
        read_header(path)
    assert SINGLE in str(broken.value) and reason in str(broken.value)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        pytest.param(b"", "is truncated: 0 bytes", id="empty"),
        pytest.param(b"\x10\0\0", "is truncated: 3 bytes", id="shorter than a length"),
        pytest.param(struct.pack("<Q", 1000) + b"{}", "do not hold its header", id="header cut short"),
        pytest.param(b"<!DOCTYPE html><html>", "is not a safetensors file", id="another kind of file"),
    ],
)
def test_safetensors_file_without_a_whole_header_is_named(tmp_path, content, reason):
    path = tmp_path / SINGLE
    path.write_bytes(content)
    with pytest.raises(BrokenCheckpoint, match=reason):
        read_header(path)


def test_a_sharded_folder_is_read_through_its_index(tmp_path):
    folder = checkpoint_files.write(tmp_path / "m", shards=3)
    whole = checkpoint_files.write(tmp_path / "n")
    found = tensors_of(folder)
    assert {name: tensor.shape for name, tensor in found.items()} == {
        name: tensor.shape for name, tensor in tensors_of(whole).items()
    }
    assert {tensor.file for tensor in found.values()} == {f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)}


@pytest.mark.parametrize(
    ("break_it", "reason"),
    [
        pytest.param(
            lambda folder: os.unlink(folder / "model-00002-of-00003.safetensors"),
            "index.json names model-00002-of-00003.safetensors, which does not exist",
            id="a shard is missing",
        ),
        pytest.param(
            lambda folder: os.truncate(folder / "model-00003-of-00003.safetensors", 2000),
            "model-00003-of-00003.safetensors is truncated",
            id="a shard is cut short",
        ),
        pytest.param(lambda folder: (folder / INDEX).write_text("{"), f"{INDEX} is not JSON", id="index not JSON"),
        pytest.param(lambda folder: (folder / INDEX).write_text("[]"), "no weight_map", id="index without a map"),
        pytest.param(
            lambda folder: (folder / INDEX).write_text('{"weight_map": {"a": "../other/model.safetensors"}}'),
            "which is not a file of the folder",
            id="index leads out of the folder",
        ),
        pytest.param(
            lambda folder: (folder / INDEX).write_text('{"weight_map": {"ghost": "model-00001-of-00003.safetensors"}}'),
            "places ghost in model-00001-of-00003.safetensors, which does not have it",
            id="index names a tensor that its shard lacks",
        ),
    ],
)
def test_broken_sharded_checkpoint_is_refused_with_its_fault(tmp_path, break_it, reason):
    folder = checkpoint_files.write(tmp_path, shards=3)
    break_it(folder)
    with pytest.raises(BrokenCheckpoint, match=reason):
        tensors_of(folder)


def test_folder_with_pickled_weights_only_is_refused_with_what_to_do(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(BrokenCheckpoint, match="convert them to safetensors"):
        tensors_of(tmp_path)
