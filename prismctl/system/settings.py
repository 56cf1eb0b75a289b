"""The settings of a class that checks configurations, as rows for people. Pure: they are made of the class and its
source alone, so they cannot be older than it."""

from __future__ import annotations

import dataclasses
import json
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import annotated_types
import pydantic
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from services.runtime import docstrings

REQUIRED = "required"
NONE = "none"
_UNITS = {"_bytes": "bytes", "_ms": "milliseconds", "_s": "seconds"}
_BOUNDS: dict[type, tuple[str, str]] = {
    annotated_types.Ge: (">=", "ge"),
    annotated_types.Gt: (">", "gt"),
    annotated_types.Le: ("<=", "le"),
    annotated_types.Lt: ("<", "lt"),
    annotated_types.MultipleOf: ("a multiple of", "multiple_of"),
    annotated_types.MinLen: ("of at least", "min_length"),
    annotated_types.MaxLen: ("of at most", "max_length"),
}
"""Kind of bound -> (its words, attribute that has the number)."""
_BINARY = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


@dataclass(frozen=True)
class SettingRow:
    """One setting."""

    key: str
    """Key with those of the tables around it: "engines.warm", and "devices[].name" in each of a list of tables."""
    type: str
    """Type in words, with its bounds."""
    default: str
    """Default as TOML has it, or NONE, or REQUIRED."""
    aside: str
    """Remark on the default: "8 MiB"; empty: none."""
    description: str
    """Docstring of the setting; empty if the source has none."""


def rows(kind: type[Any], within: str = "") -> list[SettingRow]:
    """The settings of a pydantic model or a dataclass, in the order in which a file may have them: those of base
    classes first, those of a table behind its own row. `within` stands before each key."""
    return list(_rows(kind, within))


class _Field(NamedTuple):
    name: str
    annotation: Any
    metadata: Iterable[Any]
    default: Any


def _rows(kind: type[Any], within: str) -> Iterator[SettingRow]:
    found = docstrings.of_fields(kind)
    for field in _fields(kind):
        key = within + field.name
        section, listed = _section(field.annotation)
        if not getattr(section, "IN_REFERENCE", True):
            continue
        description = found.get(field.name, "") or (docstrings.of_class(section) if section is not None else "")
        yield SettingRow(key, _type(field), _default(field.default), _aside(field), description)
        if section is not None:
            yield from _rows(section, f"{key}[]." if listed else f"{key}.")


def _fields(kind: type[Any]) -> list[_Field]:
    if issubclass(kind, pydantic.BaseModel):
        return [
            _Field(name, field.annotation, field.metadata, field.get_default(call_default_factory=True))
            for name, field in kind.model_fields.items()
        ]
    hints = get_type_hints(kind, include_extras=True)
    return [_Field(field.name, *_bare(hints[field.name]), _default_of(field)) for field in dataclasses.fields(kind)]


def _default_of(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return PydanticUndefined if field.default is dataclasses.MISSING else field.default


# Types, in words.


def _bare(annotation: Any) -> tuple[Any, tuple[Any, ...]]:
    """(annotation without its metadata, the metadata)."""
    metadata = getattr(annotation, "__metadata__", ())
    return (annotation.__origin__, metadata) if metadata else (annotation, ())


def _section(annotation: Any) -> tuple[type[pydantic.BaseModel] | None, bool]:
    """The model that checks a field's tables, None if it has no tables; and whether they are a list."""
    for each in _alternatives(annotation):
        listed = get_origin(each) in (list, tuple)
        (inner, *_) = get_args(each) if listed else (each,)
        inner, _ = _bare(inner)
        if isinstance(inner, type) and issubclass(inner, pydantic.BaseModel):
            return inner, listed
    return None, False


def _alternatives(annotation: Any) -> list[Any]:
    """The alternatives of a union without None, which a default stands for."""
    if get_origin(annotation) in (Union, types.UnionType):
        return [each for each in get_args(annotation) if each is not types.NoneType]
    return [annotation]


def _type(field: _Field) -> str:
    metadata = list(_flat(field.metadata))
    said = " or ".join(_words(each, metadata, field.name) for each in _alternatives(field.annotation))
    return " ".join(filter(None, (said, " and ".join(_bounds(metadata)))))


def _words(annotation: Any, metadata: Iterable[Any], name: str) -> str:
    annotation, more = _bare(annotation)
    metadata = [*metadata, *_flat(more)]
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        *others, last = map(_toml, inner)
        return " or ".join(filter(None, (", ".join(others), last)))
    if origin in (list, tuple):
        return f"list of {_several(_words(inner[0], (), ''))}"
    if origin is dict:
        return f"table of {_words(inner[1], (), '')}"
    unit = next((_UNITS[end] for end in _UNITS if name.endswith(end) and not name.endswith(f"_per{end}")), "")
    if annotation is bool:
        return "true or false"
    if annotation is int:
        return unit if unit == "bytes" else f"whole {unit or 'number'}"
    if annotation is float:
        return unit or "number"
    if annotation is str:
        # An alias may name the kind of text, by a string beside its check.
        return next((each for each in metadata if isinstance(each, str)), "text")
    return "table"


def _several(words: str) -> str:
    return words if words == "text" else f"{words}es" if words.endswith("s") else f"{words}s"


def _flat(metadata: Iterable[Any]) -> Iterator[Any]:
    for each in metadata:
        if isinstance(each, FieldInfo):
            yield from each.metadata
        else:
            yield each


def _bounds(metadata: Iterable[Any]) -> Iterator[str]:
    for each in metadata:
        if (bound := _BOUNDS.get(type(each))) is not None:
            words, name = bound
            yield f"{words} {_toml(getattr(each, name))}"


# Defaults, as a file has them.


def _default(value: Any) -> str:
    return REQUIRED if value is PydanticUndefined else _toml(value)


def _aside(field: _Field) -> str:
    """A number of bytes in the largest unit in which it is whole; empty for other settings."""
    return binary(field.default) if field.name.endswith("_bytes") and isinstance(field.default, int) else ""


def binary(count: int) -> str:
    """The count in a binary unit; empty if no unit makes it shorter."""
    return next((f"{count // unit} {name}" for unit, name in _BINARY if count and not count % unit), "")


def _toml(value: Any) -> str:
    if value is None:
        return NONE
    if isinstance(value, pydantic.BaseModel):
        value = value.model_dump(exclude_defaults=True)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {_toml(each)}" for key, each in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, float):
        return f"{value:g}"
    return json.dumps(value, ensure_ascii=False)
