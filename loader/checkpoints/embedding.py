"""The embedding that a folder's model makes, if it makes any, by the files that sentence-transformers puts beside a
checkpoint and by config.json.

For a decoder, engines take the hidden state of the last token; for an encoder that of the first token, or the mean of
all. The state is scaled to length 1. A model that needs another pooling is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loader.checkpoints.errors import BrokenCheckpoint
from loader.checkpoints.weight_files import read_json

MODULES = "modules.json"
_POOLINGS = {
    False: {"lasttoken": ""},
    True: {"mean_tokens": "mean", "mean": "mean", "cls_token": "cls", "cls": "cls"},
}
"""Names of poolings for engines, by their names in sentence-transformers' files, for decoders (False) and encoders
(True)."""
_UNDERSTOOD = ("Transformer", "Pooling", "Normalize")


@dataclass(frozen=True)
class Embedding:
    """The embedding that a model makes of a prompt."""

    dimensions: int
    shortens: bool = False
    """Whether the first numbers of a vector alone are an embedding too (`is_matryoshka` or `matryoshka_dimensions` of
    config.json)."""
    shorter: tuple[int, ...] = ()
    """How many numbers a shortened vector may have; empty: any."""
    pooling: str = ""
    """The way hidden states become one: "mean" or "cls" (the first token's) for an encoder; empty for a decoder, of
    which the last token's is taken; "pair" for a cross-encoder, which makes one number and no embedding."""


def embeds(folder: Path, task: str) -> bool:
    """Whether the folder's model makes embeddings. `task` is the catalogue's setting; if it is empty, a model that
    sentence-transformers can read does."""
    return task == "embed" or (not task and (folder / MODULES).is_file())


def read(folder: Path, config: Mapping[str, Any], hidden: int, encodes: bool = False) -> Embedding:
    """The embedding of a model that makes embeddings, with `hidden` values in a hidden state. `encodes`: it is an
    encoder. Raises BrokenCheckpoint."""
    pooling = None
    if (folder / MODULES).is_file():
        pooling = _pooling_of(folder, read_json(folder / MODULES), encodes)
    if encodes and pooling is None:
        raise BrokenCheckpoint(f"neither {MODULES} nor a module in it says how an encoder's states become one")
    shorter = config.get("matryoshka_dimensions") or []
    if not isinstance(shorter, list) or not all(type(one) is int and 0 < one <= hidden for one in shorter):
        raise BrokenCheckpoint(
            f"config.json: matryoshka_dimensions = {shorter!r} is not a list of numbers from 1 to {hidden}"
        )
    shortens = bool(shorter) or config.get("is_matryoshka") is True
    return Embedding(hidden, shortens, tuple(sorted(shorter)), pooling or "")


def _pooling_of(folder: Path, modules: Any, encodes: bool) -> str | None:
    """The pooling that the modules state; None if none of them does. Raises BrokenCheckpoint."""
    pooling = None
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise BrokenCheckpoint(f"{MODULES} is not a list of modules")
    for module in modules:
        kind = kind_of(module)
        if kind not in _UNDERSTOOD:
            raise BrokenCheckpoint(
                f"{MODULES}: a module of type {kind or '?'} is not supported; these are: {', '.join(_UNDERSTOOD)}"
            )
        if kind == "Pooling":
            pooling = _read_pooling(folder / str(module.get("path", "")) / "config.json", _POOLINGS[encodes])
    return pooling


def kind_of(module: Mapping[str, Any]) -> str:
    """The class of a module of sentence-transformers, without its package."""
    return str(module.get("type", "")).rpartition(".")[2]


def _read_pooling(path: Path, known: Mapping[str, str]) -> str:
    name = f"{path.parent.name}/{path.name}"
    pooling = read_json(path)
    if not isinstance(pooling, dict):
        raise BrokenCheckpoint(f"{name} is not a JSON object")
    before = "pooling_mode_"
    modes = [key.removeprefix(before) for key, value in pooling.items() if key.startswith(before) and value is True]
    if isinstance(pooling.get("pooling_mode"), str):
        modes.append(pooling["pooling_mode"])
    if len(modes) != 1 or modes[0] not in known:
        only = " or ".join(mode for mode in known if mode not in ("mean", "cls"))
        raise BrokenCheckpoint(f"{name}: pooling by {', '.join(modes) or 'nothing'} is not supported, only {only}")
    return known[modes[0]]
