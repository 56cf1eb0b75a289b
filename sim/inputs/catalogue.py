"""The models of a replay, from a TOML file.

    [[model]]
    name = "chat-*"            # a name of the trace, or a pattern: every name that it matches is a model of its own
    folder = "/models/chat"    # its checkpoint, relative to this file, or a folder with its config.json alone: weights,
                               # experts, layers, KV and context are the folder's then (`prismctl plan` only)
    kv_dtype = "fp8"           # with folder, like unverified = true: as in the services' catalogue
    ttft_ms = 1000             # targets; left out: best effort
    tpot_ms = 50
    devices = 1                # tensor parallel over so many
    context_tokens = 16384     # longer requests are clipped to it, and the report counts them; left out: the folder's,
                               # or 16384
    pinned = false

    [[model]]
    name = "*"
    shape = "8b"               # instead of a folder one of the shapes below, or weights_bytes and the KV by its kinds
    weights_bytes = 16060556368
    active_bytes = 4000000000  # of a mixture of experts: bytes of weights for one token; left out: the shape's, or all
    layers = 32                # left out: the shape's, or 32
    kv_bytes_per_token = 131072      # keys and values, or latent rows, of all tokens; latent rows count for each
                                     # device, as each has all of them
    window_bytes_per_token = 819200  # KV of layers with windows, if that has a pool of its own; with window_tokens
    window_tokens = 1024
    state_bytes = 67108864     # of a request's state of linear attention, in whole extents of the engines

Bytes are of all devices together. A row needs one of the kinds of KV, not each. With a folder, weights_bytes,
active_bytes and layers replace what the folder says. The first entry that matches a name counts; one to
which those before it leave no name is refused.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import inf
from pathlib import Path
from typing import Any

from kv_kinds.layout import BEYOND_WINDOW_TOKENS, KvKind, KvLayout, state, window
from sim.engines.cost import Shape

SHAPES = {
    "1b": Shape(2_471_645_608, 32_768, layers=16),
    "3b": Shape(6_425_499_648, 114_688, layers=28),
    "8b": Shape(16_060_556_368, 131_072, layers=32),
    "14b": Shape(29_540_000_000, 196_608, layers=48),
    "32b": Shape(65_530_000_000, 262_144, layers=64),
    "70b": Shape(141_106_905_088, 327_680, layers=80),
    "8b-fp8": Shape(9_081_257_984, 131_072, layers=32),
    "32b-fp8": Shape(34_326_243_328, 262_144, layers=64),
    "70b-fp8": Shape(72_669_806_592, 327_680, layers=80),
    "30b-a3b": Shape(61_064_245_248, 98_304, layers=48, active_bytes=6_706_065_408, expert_share=8 / 128),
    "30b-a3b-fp8": Shape(31_176_904_704, 98_304, layers=48, active_bytes=3_988_967_424, expert_share=8 / 128),
    "gpt-oss-20b": Shape(
        15_031_983_872,
        24_576,
        layers=24,
        active_bytes=4_866_367_232,
        expert_share=4 / 32,
        other_kinds=(window(24_576, 128, BEYOND_WINDOW_TOKENS),),
    ),
}
"""Shapes in bf16: Llama 3's, and Qwen 2.5's of 14B and 32B."""
_KV = ("kv_bytes_per_token", "window_bytes_per_token", "state_bytes")
"""Fields of which each is a kind of KV."""
_NUMBERS = (
    *("weights_bytes", "active_bytes", *_KV, "window_tokens"),
    *("devices", "layers", "ttft_ms", "tpot_ms", "context_tokens"),
)
_FLAGS = ("pinned", "unverified")
_OF_FOLDERS = ("kv_dtype", "unverified")
_FIELDS = {"name", "shape", "folder", *_NUMBERS, *_FLAGS, *_OF_FOLDERS}
_CONTEXT_TOKENS = 16_384
_INSTEAD = f"a shape, or weights_bytes and its KV ({', '.join(_KV)})"


class CatalogueError(ValueError):
    """A fault in a catalogue, with its place."""


@dataclass(frozen=True, slots=True)
class FolderQuestion:
    """A folder that a row names, with the row's settings by which it is read."""

    path: Path
    devices: int
    weights_bytes: int
    """Bytes of weights that the row gives, of all devices together; 0: those of the folder count."""
    kv_dtype: str
    unverified: bool


@dataclass(frozen=True, slots=True)
class FolderModel:
    """The model in a folder. Bytes are of all devices together."""

    weights_bytes: int
    active_bytes: int
    layers: int
    expert_share: float
    """Share of a layer's experts that a token goes through; 1: it has none."""
    kv: KvLayout
    context_tokens: int


Folders = Callable[[FolderQuestion], FolderModel]
"""Reads a folder. Raises ValueError with what is wrong with it, in one line."""


@dataclass(frozen=True, slots=True)
class Spec:
    """One model. Bytes are of all devices together."""

    name: str
    shape: Shape
    ttft_s: float = inf
    tpot_s: float = inf
    context_tokens: int = _CONTEXT_TOKENS
    pinned: bool = False
    begins_on: str = ""
    """Under Prism, name of the group on which the model comes up the first time, as in a run that is replayed; "":
    placement chooses."""

    @property
    def parts(self) -> int:
        return self.shape.devices


class ModelSet:
    """The catalogue's entries, in the order of the file."""

    def __init__(self, entries: list[Spec]) -> None:
        self._entries = entries
        self._found: dict[str, Spec | None] = {}

    def find(self, name: str) -> Spec | None:
        """The model of that name, or None."""
        if name not in self._found:
            entry = self._entry(name)
            self._found[name] = entry and replace(entry, name=name)
        return self._found[name]

    def unused(self, names: Iterable[str]) -> list[str]:
        """Names or patterns of the entries that describe none of the models with these `names`."""
        found = {id(self._entry(name)) for name in names}
        return [entry.name for entry in self._entries if id(entry) not in found]

    def _entry(self, name: str) -> Spec | None:
        """The first entry that matches a model's name, or None."""
        return next((entry for entry in self._entries if fnmatchcase(name, entry.name)), None)


def read(path: Path, slo_scale: float = 1.0, folders: Folders | None = None) -> ModelSet:
    """The catalogue of a file. `slo_scale` multiplies all targets; `folders` reads the folders that rows name, which
    are refused without it. Raises CatalogueError, OSError."""
    try:
        document = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise CatalogueError(f"{path}: {error}") from None
    rows = document.get("model")
    if not isinstance(rows, list) or not rows:
        others = ", ".join(sorted(document))
        raise CatalogueError(f"{path}: no [[model]] in it" + (f", only {others}" if others else ""))
    if set(document) != {"model"}:
        raise CatalogueError(f"{path}: unknown {', '.join(sorted(set(document) - {'model'}))}")
    entries: list[Spec] = []
    for number, row in enumerate(rows, start=1):
        where = _checked(row, f"{path}, model {number}")
        if earlier := next((entry.name for entry in entries if _covers(entry.name, row["name"])), None):
            raise CatalogueError(f"{where}: no model is left to it, as {earlier!r} before it matches them all")
        if "folder" in row:
            shape, context_tokens = _of_folder(row, where, path.parent, folders)
        else:
            shape, context_tokens = _of_row(row, where), row.get("context_tokens", _CONTEXT_TOKENS)
        ttft_s, tpot_s = (slo_scale * row[key] / 1e3 if key in row else inf for key in ("ttft_ms", "tpot_ms"))
        entries.append(Spec(row["name"], shape, ttft_s, tpot_s, context_tokens, row.get("pinned", False)))
    return ModelSet(entries)


def _covers(earlier: str, name: str) -> bool:
    """Whether a pattern matches every name that `name`, a name or a pattern, does; False for patterns that leave it
    open."""
    literal = not set(name) & set("*?[")
    return earlier == name or ((literal or not set(earlier) & set("?[")) and fnmatchcase(name, earlier))


def _checked(row: Any, where: str) -> str:
    """The place of a row in words, with its name. Raises CatalogueError for a field that is not known, or not what it
    has to be."""
    if not isinstance(row, dict):
        raise CatalogueError(f"{where}: it is {row!r}, not a table")
    name = row.get("name")
    if not isinstance(name, str) or not name:
        raise CatalogueError(f"{where}: it has no name")
    where += f" ({name})"
    if unknown := set(row) - _FIELDS:
        other = "; the path of the services' catalogue is folder here" if "path" in unknown else ""
        keys, known = ", ".join(sorted(unknown)), ", ".join(sorted(_FIELDS))
        raise CatalogueError(f"{where}: unknown {keys}; known are {known}{other}")
    for field in _NUMBERS:
        value = row.get(field, 1)
        kinds = (int, float) if field.endswith("_ms") else (int,)
        if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value < inf:
            raise CatalogueError(f"{where}: {field} has to be a number above zero, not {value!r}")
    if row.get("context_tokens", 2) < 2:
        raise CatalogueError(f"{where}: context_tokens has to be 2 or more, room for a prompt and an answer")
    for field in _FLAGS:
        if not isinstance(row.get(field, False), bool):
            raise CatalogueError(f"{where}: {field} has to be true or false, not {row[field]!r}")
    if row.get("kv_dtype", "fp8") != "fp8":
        raise CatalogueError(f'{where}: kv_dtype is "fp8" or left out, not {row["kv_dtype"]!r}')
    if "folder" not in row and (only := next((field for field in _OF_FOLDERS if field in row), None)):
        raise CatalogueError(f"{where}: {only} is for a row with a folder")
    return where


def _of_folder(row: dict[str, Any], where: str, beside: Path, folders: Folders | None) -> tuple[Shape, int]:
    """(shape, tokens of context) of the model in a row's folder. `beside`: the folder that paths are relative to."""
    if folders is None:
        raise CatalogueError(f"{where}: folder is read by prismctl plan only: give it {_INSTEAD}")
    if not isinstance(row["folder"], str) or not row["folder"]:
        raise CatalogueError(f"{where}: folder has to be the path of one, not {row['folder']!r}")
    if said := [field for field in ("shape", *_KV, "window_tokens") if field in row]:
        raise CatalogueError(f"{where}: {' and '.join(said)} beside folder, which says it: leave out one of them")
    path = beside / os.path.expanduser(row["folder"])
    weights = row.get("weights_bytes", 0)
    question = FolderQuestion(
        path, row.get("devices", 1), weights, row.get("kv_dtype", ""), row.get("unverified", False)
    )
    try:
        found = folders(question)
    except ValueError as error:
        raise CatalogueError(f"{where}: folder {path}: {error}") from None
    context = row.get("context_tokens", found.context_tokens)
    if context > found.context_tokens:
        raise CatalogueError(f"{where}: context_tokens {context} are more than the {found.context_tokens} of {path}")
    every = KvLayout(tuple(kind for kind in found.kv.kinds if kind.bytes_per_token and not kind.window_tokens))
    shape = Shape(
        found.weights_bytes,
        every.marginal(0),
        question.devices,
        row.get("layers", found.layers),
        _active(row.get("active_bytes", found.active_bytes), found.weights_bytes, where),
        # Bytes that the row gives are those of experts, also of a class whose experts are not known.
        0.0 if "active_bytes" in row and found.expert_share == 1 else found.expert_share,
        tuple(kind for kind in found.kv.kinds if kind not in every.kinds),
    )
    return shape, context


def _of_row(row: dict[str, Any], where: str) -> Shape:
    """The shape that a row's own numbers make, or the one that it names, as far as they do not change it."""
    if "shape" in row:
        if not isinstance(row["shape"], str) or row["shape"] not in SHAPES:
            raise CatalogueError(f"{where}: no shape {row['shape']!r}; there are {', '.join(SHAPES)}")
        shape = SHAPES[row["shape"]]
    elif "weights_bytes" in row and any(field in row for field in _KV):
        shape = Shape(0, 0)
    elif "weights_bytes" in row:
        raise CatalogueError(f"{where}: weights_bytes without its KV: give it {', '.join(_KV[:-1])} or {_KV[-1]}")
    else:
        raise CatalogueError(f"{where}: it needs a folder, {_INSTEAD}")
    weights, others = row.get("weights_bytes", shape.weights_bytes), _other_kinds(row, where)
    return Shape(
        weights,
        row.get("kv_bytes_per_token", shape.kv_bytes_per_token),
        row.get("devices", 1),
        row.get("layers", shape.layers),
        _active(row.get("active_bytes", shape.active_bytes), weights, where),
        shape.expert_share,
        others if any(field in row for field in _KV) else shape.other_kinds,
    )


def _active(active: int, weights: int, where: str) -> int:
    if active > weights:
        raise CatalogueError(f"{where}: active_bytes {active} are more than weights_bytes {weights}")
    return active


def _other_kinds(row: dict[str, Any], where: str) -> tuple[KvKind, ...]:
    """Kinds of KV beside attention over all tokens."""
    kinds: list[KvKind] = []
    each, tokens = row.get("window_bytes_per_token"), row.get("window_tokens")
    if (each is None) != (tokens is None):
        raise CatalogueError(f"{where}: window_bytes_per_token and window_tokens are given together")
    if each is not None and tokens is not None:
        kinds.append(window(each, tokens, BEYOND_WINDOW_TOKENS))
    if "state_bytes" in row:
        kinds.append(state(row["state_bytes"]))
    return tuple(kinds)
