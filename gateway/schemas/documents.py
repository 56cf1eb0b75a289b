"""A schema as a document: its places, the targets of `$ref`, and keywords, whose values must be of the right kind."""

from __future__ import annotations

import json
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence, Set
from typing import Any
from urllib.parse import unquote

TYPES = ("null", "boolean", "number", "string", "array", "object")
"""JSON's types. `integer` is no type of its own: it is a number that is whole."""


_MOST_SAID = 500


class SchemaRefused(ValueError):
    """A value that is no schema, or a schema that no grammar keeps; `str` says what is wrong and where."""

    def __init__(self, why: str) -> None:
        said = why.encode(errors="replace").decode()  # names may have halves of characters
        super().__init__(
            said if len(said) <= _MOST_SAID else f"{said[: _MOST_SAID // 2]} ... {said[-_MOST_SAID // 2 :]}"
        )


class Node:
    """One schema in a document. The same place always gives the same node."""

    __slots__ = ("_document", "_named", "_renamed", "pointer", "value")

    def __init__(self, document: Document, pointer: str, value: Any, renamed: bool) -> None:
        """`renamed`: the schema, or one around it, has an `$id`, so that references in it are relative to another
        place."""
        self._document = document
        self._renamed = renamed
        self._named: dict[str, Mapping[str, Node]] = {}
        self.pointer = pointer
        """Place of the schema as a fragment of a URI: `#/properties/a`."""
        self.value: Mapping[str, Any] | bool = value
        if not isinstance(value, (dict, bool)):
            raise SchemaRefused(f"'{pointer}' must be a schema, an object or a boolean")

    def __repr__(self) -> str:
        return self.pointer

    def __contains__(self, keyword: str) -> bool:
        return isinstance(self.value, dict) and keyword in self.value

    @property
    def keywords(self) -> Set[str]:
        return self.value.keys() if isinstance(self.value, dict) else frozenset()

    def get(self, keyword: str) -> Any:
        return self.value.get(keyword) if isinstance(self.value, dict) else None

    def wrong(self, keyword: str, must: str) -> SchemaRefused:
        """The error for a keyword whose value is of the wrong kind."""
        return SchemaRefused(f"'{keyword}' at '{self.pointer}' must be {must}")

    def unkept(self, keyword: str, why: str) -> SchemaRefused:
        """The error for a keyword that no grammar here keeps."""
        return SchemaRefused(f"'{keyword}' at '{self.pointer}' cannot be kept: {why}")

    def child(self, *keys: str | int) -> Node:
        return self._document.at(self.pointer + "".join(f"/{_escaped(str(key))}" for key in keys))

    def schema(self, keyword: str) -> Node | None:
        return self.child(keyword) if keyword in self else None

    def row(self, keyword: str) -> Sequence[Node]:
        """The schemas of a keyword that has a list of them; empty if the keyword is missing. Raises SchemaRefused."""
        if keyword not in self:
            return ()
        value = self.get(keyword)
        if not isinstance(value, list):
            raise self.wrong(keyword, "a list of schemas")
        return [self.child(keyword, index) for index in range(len(value))]

    def several(self, keyword: str) -> Sequence[Node]:
        """The schemas of a keyword that has a list of at least one; empty if the keyword is missing. Raises
        SchemaRefused."""
        found = self.row(keyword)
        if keyword in self and not found:
            raise self.wrong(keyword, "a list of at least one schema")
        return found

    def named(self, keyword: str) -> Mapping[str, Node]:
        """The schemas of a keyword that has an object of them, by name; empty if the keyword is missing. Raises
        SchemaRefused."""
        if keyword not in self:
            return {}
        value = self.get(keyword)
        if not isinstance(value, dict):
            raise self.wrong(keyword, "an object of schemas")
        found = self._named.get(keyword)
        if found is None:
            found = self._named[keyword] = {name: self.child(keyword, name) for name in value}
        return found

    def count(self, keyword: str) -> int | None:
        value = self.get(keyword)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if keyword in self and (type(value) is not int or value < 0):
            raise self.wrong(keyword, "a whole number that is not negative")
        return value if keyword in self else None

    def number(self, keyword: str) -> int | float | None:
        value = self.get(keyword)
        if keyword in self and (type_of(value) != "number" or not -math.inf < value < math.inf):
            raise self.wrong(keyword, "a number")
        return value if keyword in self else None

    def string(self, keyword: str) -> str | None:
        value = self.get(keyword)
        if keyword in self and not isinstance(value, str):
            raise self.wrong(keyword, "a string")
        return value if keyword in self else None

    def names(self, keyword: str) -> Sequence[str]:
        value = self.get(keyword) if keyword in self else []
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise self.wrong(keyword, "a list of strings")
        return value

    def flag(self, keyword: str) -> bool:
        value = self.get(keyword) if keyword in self else False
        if not isinstance(value, bool):
            raise self.wrong(keyword, "true or false")
        return value

    def types(self) -> Sequence[str] | None:
        if "type" not in self:
            return None
        value = self.get("type")
        listed = value if isinstance(value, list) else [value]
        for one in listed:
            if one not in TYPES and one != "integer":
                known = ", ".join(f"'{name}'" for name in (*TYPES, "integer"))
                said = f"'{one}'" if isinstance(one, str) else _shown(one)
                raise self.wrong("type", f"one or more of {known}, not {said}")
        if not listed:
            raise self.wrong("type", "a type or a list of types")
        return listed

    def literals(self) -> Sequence[Sequence[Any]]:
        """The lists of values in `const` and `enum`, one for each keyword that is there. Raises SchemaRefused."""
        found: list[Sequence[Any]] = [[self.get("const")]] if "const" in self else []
        if "enum" in self:
            if not isinstance(self.get("enum"), list):
                raise self.wrong("enum", "a list of values")
            found.append(self.get("enum"))
        return found

    def target(self) -> Node | None:
        """The schema that `$ref` refers to; None if there is no `$ref`. Raises SchemaRefused."""
        reference = self.string("$ref")
        if reference is None:
            return None
        if self._renamed:
            raise self.unkept("$ref", "it is beneath an '$id' that is not the whole schema's")
        reference = reference.removeprefix(self._document.id)
        if not reference.startswith("#") or (reference != "#" and not reference.startswith("#/")):
            raise self.unkept("$ref", f"'{reference}' is not a place in this schema, such as '#/$defs/name'")
        try:
            return self._document.at("#" + "".join(f"/{_escaped(key)}" for key in _keys(unquote(reference))))
        except LookupError:
            raise self.wrong("$ref", f"a place in this schema, which '{reference}' is not") from None


class Document:
    """A whole schema."""

    def __init__(self, value: Any) -> None:
        self._value = value
        self._nodes: dict[str, Node] = {}
        named = value.get("$id") if isinstance(value, dict) else None
        self.id = named.rstrip("#") if isinstance(named, str) else ""

    @property
    def root(self) -> Node:
        return self.at("#")

    def at(self, pointer: str) -> Node:
        """The schema at a place. Raises LookupError if there is no such place, SchemaRefused if the value there is no
        schema."""
        node = self._nodes.get(pointer)
        if node is None:
            value, renamed = self._value, False
            for key in _keys(pointer):
                if isinstance(value, list):
                    if not key.isascii() or not key.isdigit() or int(key) >= len(value):
                        raise LookupError(pointer)
                    value = value[int(key)]
                elif isinstance(value, dict) and key in value:
                    value = value[key]
                else:
                    raise LookupError(pointer)
                renamed |= isinstance(value, dict) and isinstance(value.get("$id"), str)
            node = self._nodes[pointer] = Node(self, pointer, value, renamed)
        return node


def _shown(value: Any) -> str:
    """A value that is no string, as text for a message."""
    return f"an {type_of(value)}" if isinstance(value, (list, dict)) else json.dumps(value)


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


def _keys(pointer: str) -> Iterator[str]:
    for key in pointer.split("/")[1:]:
        yield key.replace("~1", "/").replace("~0", "~")


def key(value: Any) -> Hashable:
    """A key that is equal for values that JSON takes as equal: 1 is 1.0, and is not true."""
    if isinstance(value, list):
        return "array", tuple(map(key, value))
    if isinstance(value, dict):
        return "object", frozenset((name, key(one)) for name, one in value.items())
    return type_of(value), value


def type_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, (int, float)):
        return "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"
