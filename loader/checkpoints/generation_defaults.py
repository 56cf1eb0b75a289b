"""Defaults for sampling by a checkpoint's generation_config.json, for requests that do not say. SGLang's and vLLM's
servers take the same defaults; like them, this module does not look at `do_sample`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from loader.checkpoints.config_values import TOKENS, check_given
from loader.checkpoints.errors import BrokenCheckpoint
from loader.checkpoints.weight_files import read_json
from services.telemetry import log

FILE = "generation_config.json"
_log = log.get(__name__)
_HIGHEST_TEMPERATURE = 2.0
_MOST_TOKENS = 1 << 31


@dataclass(frozen=True)
class SamplingDefaults:
    """Values by the names of a request's fields; None: the file says nothing."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None
    min_p: float | None = None


def read(folder: Path) -> SamplingDefaults:
    """The defaults of a folder; none, where there is no such file. A value that no request could have is not used, with
    a warning: the model can be served without. Blocks on the file system. Raises BrokenCheckpoint for a file that
    cannot be read: it also says where answers end."""
    if not (folder / FILE).is_file():
        return SamplingDefaults()
    told = read_json(folder / FILE)
    if not isinstance(told, dict):
        raise BrokenCheckpoint(f"{FILE} is not a JSON object")
    check_given(FILE, told, {"eos_token_id": TOKENS})  # it says where answers end, and engines read it
    found = _said(told)
    for name, value in found.items():
        if not _usable(name, value):
            _log.warning("not used as a default for sampling", folder=str(folder), why=f"{FILE}: {name} = {value!r}")
    return SamplingDefaults(**{name: value for name, value in found.items() if _usable(name, value)})


def _said(told: Mapping[str, Any]) -> dict[str, Any]:
    said = {field.name: told.get(field.name) for field in fields(SamplingDefaults)}
    if said["top_k"] in (0, -1):  # no limit
        said["top_k"] = None
    return {name: value for name, value in said.items() if value is not None}


def _usable(name: str, value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    match name:
        case "temperature":
            return 0 <= value <= _HIGHEST_TEMPERATURE
        case "top_p":
            return 0 < value <= 1
        case "min_p":
            return 0 <= value <= 1
        case "top_k":
            return isinstance(value, int) and 0 < value < _MOST_TOKENS
        case _:
            return 0 < value <= 2
