"""Schemas that Hypothesis draws: such as people write, and such as nobody does, of every keyword."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

NAMES = ("a", "b", "title", "kind", 'q"\\', "é", "")
PATTERNS = (
    *("^a", "b$", "^[a-c]{1,3}$", "^.*$", "ab|^c", r"^\d+$", r"^\S+$", r"[^a]", "^(ab)*$", r"^a\.b$", "^$", "", "a^"),
    *(r"^(?!a).{1,4}$", r"^(?=.*\d)[a-z\d]{2,}$", r"^\w+(-\w+)*$", '"', r"\\", r"^\s*$", "^(a|b$)", r"^[\w.]+@[a-z]+$"),
)
_INTEGERS = st.one_of(st.integers(-12, 130), st.sampled_from((999, 1000, 1950, 2025, -1000, 2**31 - 1, 2**53, 10**25)))
_NUMBERS = st.one_of(_INTEGERS, st.sampled_from((0.5, -0.25, 1e-7, 99.95, -1.5, 3.0, 0.1, 1e300, 12.345)))
_COUNTS = st.integers(0, 3)
_LITERALS = st.sampled_from(
    (None, True, False, 0, 1, 1.0, -7, 0.5, 50, "a", "b", "ab", 'q"', "é", "", "1", [], [1], {}, {"a": 1})
)
_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")


def _some(draw: Any, **keywords: Any) -> dict[str, Any]:
    """Each of them in one schema of three."""
    return {name: draw(value) for name, value in keywords.items() if draw(st.integers(0, 2)) == 0}


@st.composite
def _number(draw: Any) -> dict[str, Any]:
    bounds = _some(draw, minimum=_NUMBERS, maximum=_NUMBERS, exclusiveMinimum=_NUMBERS, exclusiveMaximum=_NUMBERS)
    of = draw(st.sampled_from((None, None, None, None, 1, 2, 3, 7, 10, 0.5, 0.01, 2.5, 100, 60)))
    return bounds if of is None else {**bounds, "multipleOf": of}


@st.composite
def _string(draw: Any) -> dict[str, Any]:
    return _some(draw, minLength=_COUNTS, maxLength=st.integers(0, 6), pattern=st.sampled_from(PATTERNS))


@st.composite
def _array(draw: Any, inner: st.SearchStrategy[Any]) -> dict[str, Any]:
    made = _some(draw, items=inner, prefixItems=st.lists(inner, max_size=3), minItems=_COUNTS, maxItems=_COUNTS)
    rare = {"uniqueItems": st.booleans(), "contains": inner, "unevaluatedItems": st.booleans()}
    return made | {name: draw(value) for name, value in rare.items() if draw(st.integers(0, 9)) == 0}


@st.composite
def _object(draw: Any, inner: st.SearchStrategy[Any]) -> dict[str, Any]:
    names = st.lists(st.sampled_from(NAMES), max_size=3, unique=True)
    made: dict[str, Any] = (
        {"properties": {name: draw(inner) for name in draw(names)}} if draw(st.integers(0, 3)) else {}
    )
    made |= _some(draw, required=names, additionalProperties=st.one_of(st.booleans(), inner))
    rare = {
        "patternProperties": st.dictionaries(st.sampled_from(PATTERNS), inner, min_size=1, max_size=2),
        "propertyNames": _string(),
        "minProperties": _COUNTS,
        "maxProperties": _COUNTS,
        "unevaluatedProperties": st.booleans(),
        "dependentRequired": st.fixed_dictionaries({"a": names}),
        "dependentSchemas": st.fixed_dictionaries({"a": inner}),
    }
    return made | {name: draw(value) for name, value in rare.items() if draw(st.integers(0, 7)) == 0}


@st.composite
def _schema(draw: Any, inner: st.SearchStrategy[Any], references: st.SearchStrategy[str]) -> Any:
    kinds = {
        "number": _number(),
        "integer": _number(),
        "string": _string(),
        "array": _array(inner),
        "object": _object(inner),
    }
    how = draw(st.integers(0, 19))
    if how == 0:
        return draw(st.booleans())
    made: dict[str, Any] = {}
    if how < 13:
        made["type"] = draw(st.sampled_from(_TYPES))
        made |= draw(kinds.get(made["type"], st.just({})))
    elif how < 15:
        made["type"] = draw(st.lists(st.sampled_from(_TYPES), min_size=1, max_size=3, unique=True))
        for kind in made["type"]:
            made |= draw(kinds.get(kind, st.just({})))
    elif how < 17:
        for kind in draw(st.lists(st.sampled_from(sorted(kinds)), max_size=2, unique=True)):
            made |= draw(kinds[kind])
    rare = {
        "enum": st.lists(_LITERALS, max_size=4),
        "const": _LITERALS,
        "anyOf": st.lists(inner, min_size=1, max_size=3),
        "oneOf": st.lists(inner, min_size=1, max_size=3),
        "allOf": st.lists(inner, min_size=1, max_size=3),
        "$ref": references,
        "not": st.one_of(inner, st.just({}), st.fixed_dictionaries({"const": _LITERALS}), _taken_away()),
        "if": inner,
        "then": inner,
    }
    often = 2 if how >= 17 else 15
    made |= {name: draw(value) for name, value in rare.items() if draw(st.integers(0, often)) == 0}
    if draw(st.integers(0, 5)) == 0:
        made |= {
            "title": "T",
            "default": 3,
            "description": "D",
            "x-own": [1],
            "format": draw(st.sampled_from(("color", "x"))),
        }
    return made


def _taken_away() -> st.SearchStrategy[Any]:
    return st.sampled_from(({"type": "string"}, {"type": ["null", "object"]}, {"required": ["a"]}, {"enum": ["a", 1]}))


@st.composite
def schemas(draw: Any) -> Any:
    """With definitions that may refer to one another."""
    named = draw(st.lists(st.sampled_from(("A", "B/~")), max_size=2, unique=True))
    references = st.sampled_from(["#", *(f"#/$defs/{name.replace('~', '~0').replace('/', '~1')}" for name in named)])
    inner: st.SearchStrategy[Any] = _schema(st.just({"type": "integer"}), references)
    for _ in range(2):
        inner = _schema(inner, references)
    made = draw(inner)
    if named and isinstance(made, dict):
        made["$defs"] = {name: draw(inner) for name in named}
    return made
