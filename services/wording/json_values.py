"""Kinds of values that a JSON object may have. For any other value a message says in one line where it is, what it is,
and what is allowed."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 80
"""The most characters of a value in a message."""


@dataclass(frozen=True)
class ValueKind:
    """A kind of values. `allowed` is the text after "is not" that describes them."""

    allowed: str
    holds: Callable[[Any], bool]


def is_number(value: Any) -> bool:
    """Whether a value is a number that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def at_least(least: float) -> ValueKind:
    return ValueKind(f"a number of {least:g} or more", lambda value: is_number(value) and value >= least)


def one_of(*names: str) -> ValueKind:
    return ValueKind(", ".join(names[:-1]) + " or " * (len(names) > 1) + names[-1], lambda value: value in names)


COUNT = ValueKind("a positive whole number", lambda value: type(value) is int and value > 0)
COUNT_OR_NONE = ValueKind("a whole number of 0 or more", lambda value: type(value) is int and value >= 0)
FLAG = ValueKind("true or false", lambda value: isinstance(value, bool))
FRACTION = ValueKind("a number above 0, at most 1", lambda value: is_number(value) and 0 < value <= 1)
POSITIVE = ValueKind("a number above 0", lambda value: is_number(value) and value > 0)
TEXT = ValueKind("a text", lambda value: isinstance(value, str))
NAMES = ValueKind(
    "a list of names", lambda value: isinstance(value, list) and all(isinstance(one, str) for one in value)
)


def fault(key: str, value: Any, kind: ValueKind) -> str | None:
    """The message about a value that is not of the kind; None if it is."""
    return None if kind.holds(value) else f"{key} = {_SHORT.repr(value)} is not {kind.allowed}"


def first_fault(values: Mapping[str, Any], kinds: Mapping[str, ValueKind], of: str = "") -> str | None:
    """The message about the first value that is not of its key's kind; None if there is none. A null counts as no
    value. `of`: the key whose value `values` are."""
    given = ((key, values[key], kind) for key, kind in kinds.items() if values.get(key) is not None)
    found = (fault(f"{of}.{key}" if of else key, value, kind) for key, value, kind in given)
    return next((each for each in found if each is not None), None)
