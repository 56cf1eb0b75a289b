"""Values in a checkpoint's JSON files, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loader.checkpoints.errors import BrokenCheckpoint
from services.wording.json_values import COUNT, ValueKind, fault, first_fault

CONFIG = "config.json"
_LARGEST_NUMBER = (1 << 31) - 1
"""Largest number of anything in a configuration: more than any model has, and no more than messages hold."""
TOKEN = ValueKind("the number of a token", lambda value: type(value) is int)
TOKENS = ValueKind(
    "the number of a token, or a list of such numbers",
    lambda value: all(map(TOKEN.holds, value)) if isinstance(value, list) else TOKEN.holds(value),
)


def check(file: str, key: str, value: Any, kind: ValueKind) -> None:
    """Raises BrokenCheckpoint for a value that is not of the kind."""
    if (why := fault(key, value, kind)) is not None:
        raise BrokenCheckpoint(f"{file}: {why}")


def check_given(file: str, values: Mapping[str, Any], kinds: Mapping[str, ValueKind], of: str = "") -> None:
    """Raises BrokenCheckpoint for the first value that is not of its key's kind; see `first_fault`."""
    if (why := first_fault(values, kinds, of)) is not None:
        raise BrokenCheckpoint(f"{file}: {why}")


def number(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """The number of one or more under a key of config.json, or `default` if the key is not there. Raises
    BrokenCheckpoint if there is neither, for a value of another kind, and for a number that no model has."""
    value = default if config.get(key) is None else config[key]
    if value is None:
        raise BrokenCheckpoint(f"{CONFIG} has no {key}")
    check(CONFIG, key, value, COUNT)
    if value > _LARGEST_NUMBER:
        raise BrokenCheckpoint(f"{CONFIG}: {key} is larger than {_LARGEST_NUMBER}")
    return int(value)
