"""Values in a checkpoint's JSON files, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loader.checkpoints.errors import BrokenCheckpoint
from services.wording.json_values import ValueKind, fault, first_fault

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
