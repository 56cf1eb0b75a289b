"""The safetensors files of a folder by their headers: which tensors there are, and whether the files are whole; and
what lies in a folder instead of them.

The format: 8 bytes little-endian length of the header; the header, a JSON object name -> {dtype, shape,
data_offsets}; the data, in which the tensors lie without gaps in the order of their offsets. No tensor is read here:
a file of 100 GB costs one read of its first kilobytes.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from loader.checkpoints.errors import BrokenCheckpoint, PassingFault
from tokenization.files import NOT_FETCHED, POINTER

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_LEFT_OUT = (SINGLE, "consolidated.safetensors")
"""Files of weights that engines know for what they are."""
_LONGEST_HEADER = 100_000_000
"""Most bytes of a header, by the format's own bound."""
_BITS = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip
FLOATS = frozenset({"F16", "BF16", "F32", "F64"})
_OTHERS = (
    ((".gguf",), "its weights are GGUF, which is not supported: give the Hugging Face folder with safetensors"),
    ((".bin", ".pt", ".pth"), "its weights are pickled files only: convert them to safetensors"),
    ((".h5", ".msgpack", ".onnx", ".npz"), "its weights are of another framework: give the folder with safetensors"),
)
"""(suffixes of files, what is wrong where weights are in such files only)."""


@dataclass(frozen=True)
class Tensor:
    """One tensor as its file's header describes it."""

    dtype: str
    shape: tuple[int, ...]
    file: str

    @property
    def elements(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return -(-self.elements * _BITS[self.dtype] // 8)


def read_json(path: Path) -> Any:
    """A small JSON file of a checkpoint, as Transformers takes it: of a key that is there twice the last counts. Raises
    BrokenCheckpoint."""
    try:
        check_regular(path)
        data = path.read_bytes()
    except OSError as error:
        raise PassingFault(f"{path.name}: {error.strerror}") from None
    check_fetched(data, path.name)
    if not data:
        raise PassingFault(f"{path.name} is empty")
    try:
        return json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise BrokenCheckpoint(f"{path.name} is not JSON: {error}") from None


def check_regular(path: Path) -> None:
    """Raises BrokenCheckpoint for what is no file: opening a pipe waits for ever, and some devices have no end. Raises
    OSError."""
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode):
        raise BrokenCheckpoint(
            f"{path.name} is {'a folder' if stat.S_ISDIR(mode) else 'no file but a pipe or a device'}"
        )


def check_fetched(data: bytes, name: str) -> None:
    """Raises BrokenCheckpoint if `data`, the first bytes of a file, is a Git LFS pointer to another one."""
    if data.startswith(POINTER):
        raise BrokenCheckpoint(f"{name} {NOT_FETCHED}")


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, from its one file or from those that its index names. Raises BrokenCheckpoint."""
    if (folder / INDEX).exists():
        return _sharded(folder)
    if (folder / SINGLE).exists():
        others = sorted(path.name for path in folder.glob("*.safetensors") if path.name not in _LEFT_OUT)
        if others:
            raise BrokenCheckpoint(f"{SINGLE} lies beside {others[0]} and there is no {INDEX}: engines would read both")
        return read_header(folder / SINGLE)
    if (why := other_weights(os.listdir(folder))) is not None:
        raise BrokenCheckpoint(why)
    raise PassingFault(f"no weights: neither {SINGLE} nor {INDEX}")


def has_safetensors(folder: Path) -> bool:
    """Whether a folder has any file of weights; one with its config.json and index alone has none."""
    return any(folder.glob("*.safetensors"))


def indexed_bytes(folder: Path) -> int:
    """Bytes of all tensors by the index of a folder, those that engines do not load included; 0: it has no index, or
    that does not say. Raises BrokenCheckpoint."""
    if not (folder / INDEX).exists():
        return 0
    index = read_json(folder / INDEX)
    told = index.get("metadata") if isinstance(index, dict) else None
    total = told.get("total_size") if isinstance(told, dict) else None
    return int(total) if isinstance(total, int | float) and 0 < total < inf else 0


def other_weights(names: Iterable[str]) -> str | None:
    """What is wrong with weights in files of these names that are not safetensors; None where there are none."""
    there = {os.path.splitext(name)[1] for name in names}
    return next((why for suffixes, why in _OTHERS if there.intersection(suffixes)), None)


def _sharded(folder: Path) -> dict[str, Tensor]:
    index = read_json(folder / INDEX)
    where = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(where, dict) or not all(isinstance(file, str) for file in where.values()):
        raise BrokenCheckpoint(f"{INDEX}: no weight_map of tensor names to file names")
    shards: dict[str, dict[str, Tensor]] = {}
    for file in sorted(set(where.values())):
        if os.path.basename(file) != file or file in ("", ".", ".."):
            raise BrokenCheckpoint(f"{INDEX} names {file!r}, which is not a file of the folder")
        if not (folder / file).exists():
            raise PassingFault(f"{INDEX} names {file}, which does not exist")
        shards[file] = read_header(folder / file)
    for name, file in where.items():
        if name not in shards[file]:
            raise BrokenCheckpoint(f"{INDEX} places {name} in {file}, which does not have it")
    return {name: shards[file][name] for name, file in where.items()}


def read_header(path: Path) -> dict[str, Tensor]:
    """The tensors of one file, whose header describes exactly the bytes that the file has. Raises BrokenCheckpoint."""
    try:
        check_regular(path)
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            first = file.read(len(POINTER))
            check_fetched(first, path.name)
            length = int.from_bytes(first[:8], "little")
            file.seek(8)
            if not length and size >= 8:
                raise PassingFault(f"{path.name} has no header yet: it begins with zeros")
            if length > _LONGEST_HEADER:  # this is no cut file but another kind of file
                raise BrokenCheckpoint(f"{path.name} is not a safetensors file: a header of {length} bytes")
            if size < 8 or length > size - 8:
                raise PassingFault(f"{path.name} is truncated: {size} bytes do not hold its header")
            header = _parse_header(file.read(length), f"{path.name}: its header")
    except OSError as error:
        raise PassingFault(f"{path.name}: {error.strerror}") from None
    if not isinstance(header, dict):
        raise BrokenCheckpoint(f"{path.name}: its header is not a JSON object")
    header.pop("__metadata__", None)
    tensors: dict[str, Tensor] = {}
    spans: list[tuple[int, int, str]] = []
    for name, described in header.items():
        tensor, begin, end = _described(path.name, name, described)
        tensors[name] = tensor
        spans.append((begin, end, name))
    _check_contiguous(path.name, spans, size - 8 - length)
    return tensors


def _described(file: str, name: str, described: Any) -> tuple[Tensor, int, int]:
    try:
        dtype, shape, (begin, end) = described["dtype"], described["shape"], described["data_offsets"]
        numbers = [*shape, begin, end]
    except (TypeError, KeyError, ValueError):
        raise BrokenCheckpoint(f"{file}: {name} is not described by dtype, shape and data_offsets") from None
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise BrokenCheckpoint(f"{file}: {name} has a shape or offsets that are not whole numbers")
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise BrokenCheckpoint(f"{file}: {name} has the unknown type {dtype!r}")
    tensor = Tensor(dtype, tuple(shape), file)
    if tensor.elements * _BITS[dtype] != 8 * (end - begin):
        raise BrokenCheckpoint(
            f"{file}: {name} of {dtype} {list(shape)} cannot have the {end - begin} bytes that its offsets say"
        )
    return tensor, begin, end


def _check_contiguous(file: str, spans: list[tuple[int, int, str]], data_bytes: int) -> None:
    at = 0
    for begin, end, name in sorted(spans):
        if begin != at:
            raise BrokenCheckpoint(f"{file}: {name} begins at {begin}, not at {at}: a gap or an overlap")
        at = end
    if at > data_bytes:
        raise PassingFault(f"{file} is truncated: its header describes {at} bytes of data, it has {data_bytes}")
    if at < data_bytes:
        raise BrokenCheckpoint(f"{file} has {data_bytes - at} bytes beyond the {at} that its header describes")


def _parse_header(data: bytes, what: str) -> Any:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise BrokenCheckpoint(f"{what} has a key twice")
        return found

    try:
        return json.loads(data, object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise BrokenCheckpoint(f"{what} is not JSON: {error}") from None
