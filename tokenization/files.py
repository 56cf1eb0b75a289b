"""The files of a checkpoint's folder that say how its text is made. An error is one line that names the file at fault
and not the folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.errors import Unmet
from services.wording.json_values import FLAG, NAMES, TEXT, ValueKind, first_fault

POINTER = b"version https://git-lfs.github.com/spec/"
"""First bytes of what Git LFS puts in place of a file that was not fetched."""
NOT_FETCHED = "is a Git LFS pointer: run git lfs pull"

CONFIG = "config.json"
SETTINGS = "tokenizer_config.json"
TOKENIZER = "tokenizer.json"
OLDER_TOKENIZERS = ("tokenizer.model", "vocab.json", "vocab.txt")
"""Files that have the vocabulary where there is no tokenizer.json."""
_BESIDE_OLDER = "merges.txt"
_TEMPLATE = "chat_template.jinja"
_MORE_TEMPLATES = "additional_chat_templates"
_LEGACY = ("special_tokens_map.json", "added_tokens.json")
"""Files of special tokens, where the settings have no `added_tokens_decoder`."""


class UnreadableNow(Unmet):
    """The folder cannot be read at the moment: a volume is away, a file is being written, memory or descriptors are
    short."""


def _is_template(value: Any) -> bool:
    if isinstance(value, list):
        return all(isinstance(one, dict) and all(map(TEXT.holds, map(one.get, ("name", "template")))) for one in value)
    return TEXT.holds(value) or (isinstance(value, dict) and all(map(TEXT.holds, value.values())))


def _is_tokens(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(token, dict) for token in value.values())


_KINDS: Mapping[str, ValueKind] = {
    "tokenizer_class": TEXT,
    "chat_template": ValueKind("a text, or a list of objects with name and template", _is_template),
    "added_tokens_decoder": ValueKind("an object with one of each token", _is_tokens),
    "auto_map": ValueKind("an object or a list", lambda value: isinstance(value, (dict, list))),
    "fast_tokenizer_files": NAMES,
    "add_bos_token": FLAG,
    "add_eos_token": FLAG,
    "split_special_tokens": FLAG,
}
"""Kinds of values in the settings, for keys where Transformers fails at another kind without naming the key, or does
not fail."""


def settings(folder: Path) -> Mapping[str, Any]:
    """The object in a folder's tokenizer_config.json; empty where there is no such file. Raises Unmet, OSError."""
    if not (folder / SETTINGS).is_file():
        return {}
    told = read_object(folder, SETTINGS)
    if (why := first_fault(told, _KINDS)) is not None:
        raise Unmet(f"{SETTINGS}: {why}")
    return told


def check(folder: Path, told: Mapping[str, Any]) -> None:
    """Checks the files that are read beside tokenizer_config.json, whose object is `told`. A tokenizer.json, which is
    large, is only checked for being there, fetched and not empty. Raises Unmet, OSError."""
    whole = (folder / TOKENIZER).is_file()
    for name in (TOKENIZER,) if whole else (*OLDER_TOKENIZERS, _BESIDE_OLDER):
        if (folder / name).is_file():
            check_fetched(folder, name)
    for name in () if "added_tokens_decoder" in told else _LEGACY:
        if (folder / name).is_file():
            read_object(folder, name)
    for name in template_places(folder).values():
        if (folder / name).is_file():
            _read_text(folder, name)


def template_places(folder: Path) -> dict[str, str]:
    """Files that hold a folder's chat templates, by the templates' names. Templates inside other files are left out."""
    more = {path.stem: f"{_MORE_TEMPLATES}/{path.name}" for path in sorted((folder / _MORE_TEMPLATES).glob("*.jinja"))}
    return {"default": _TEMPLATE, **more} if (folder / _TEMPLATE).is_file() else more


def check_fetched(folder: Path, name: str) -> None:
    """Raises Unmet for a file that is a Git LFS pointer to another one, or is empty."""
    with open(folder / name, "rb") as file:
        first = file.read(len(POINTER))
    if not first:
        raise UnreadableNow(f"{name} is empty")
    if first == POINTER:
        raise Unmet(f"{name} {NOT_FETCHED}")


def read_object(folder: Path, name: str) -> dict[str, Any]:
    """The object in a JSON file. Raises Unmet for a file that is not JSON, or no object, OSError."""
    text = _read_text(folder, name)
    if not text:
        raise UnreadableNow(f"{name} is empty")
    try:
        told = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Unmet(f"{name} is not JSON: {error}") from None
    if not isinstance(told, dict):
        raise Unmet(f"{name} is not a JSON object")
    return told


def _read_text(folder: Path, name: str) -> str:
    data = (folder / name).read_bytes()
    if data.startswith(POINTER):
        raise Unmet(f"{name} {NOT_FETCHED}")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise Unmet(f"{name} is not text in UTF-8: {error}") from None
