"""Schemas that Hypothesis draws: such as people write, and such as nobody does, of every keyword."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from testing.schemas.answers import target

NAMES = ("a", "b", "title", "kind", 'q"\\', "é", "")
PATTERNS = (
    *("^a", "b$", "^[a-c]{1,3}$", "^.*$", "ab|^c", r"^\d+$", r"^\S+$", r"[^a]", "^(ab)*$", r"^a\.b$", "^$", "", "a^"),
    *(r"^(?!a).{1,4}$", r"^(?=.*\d)[a-z\d]{2,}$", r"^\w+(-\w+)*$", '"', r"\\", r"^\s*$", "^(a|b$)", r"^[\w.]+@[a-z]+$"),
)
_INTEGERS = st.one_of(
    st.integers(-12, 130), st.sampled_from((999, 1000, 1950, 2025, -1000, 2**31 - 1, 2**53, -(2**60) - 1, 10**25))
)
_NUMBERS = st.one_of(_INTEGERS, st.sampled_from((0.5, -0.25, 1e-7, 99.95, -1.5, 3.0, 0.1, 1e300, 12.345)))
_COUNTS = st.integers(0, 3)
_VALUES = (None, True, False, 0, 1, 1.0, -7, 0.5, 50, "a", "b", "ab", 'q"', "é", "", "1", [], [1], {}, {"a": 1})
_LITERALS = st.sampled_from(_VALUES)
_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
_TAKEN_AWAY = ({}, {"type": "string"}, {"type": ["null", "object"]}, {"required": ["a"]}, {"enum": ["a", 1]})


def _some(draw: Any, **keywords: Any) -> dict[str, Any]:
    """Each of them in one schema of three."""
    return {name: draw(value) for name, value in keywords.items() if draw(st.integers(0, 2)) == 0}


@st.composite
def numbers(draw: Any) -> dict[str, Any]:
    low, high = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
    bounds = {draw(st.sampled_from(side)): _NUMBERS for side in (low, high)}
    if draw(st.integers(0, 9)) == 0:
        bounds = dict.fromkeys((*low, *high), _NUMBERS)
    of = draw(st.sampled_from((None, None, None, None, 1, 2, 3, 7, 10, 0.5, 0.01, 2.5, 100, 60)))
    return _some(draw, **bounds) | ({} if of is None else {"multipleOf": of})


@st.composite
def strings(draw: Any) -> dict[str, Any]:
    return _some(draw, minLength=_COUNTS, maxLength=st.integers(0, 6), pattern=st.sampled_from(PATTERNS))


@st.composite
def _array(draw: Any, inner: st.SearchStrategy[Any]) -> dict[str, Any]:
    made = _some(draw, items=inner, prefixItems=st.lists(inner, max_size=3), minItems=_COUNTS, maxItems=_COUNTS)
    rare = {"uniqueItems": st.booleans(), "contains": inner, "unevaluatedItems": st.booleans()}
    return made | {name: draw(value) for name, value in rare.items() if draw(st.integers(0, 14)) == 0}


@st.composite
def _object(draw: Any, inner: st.SearchStrategy[Any]) -> dict[str, Any]:
    names = st.lists(st.sampled_from(NAMES), max_size=3, unique=True)
    made: dict[str, Any] = (
        {"properties": {name: draw(inner) for name in draw(names)}} if draw(st.integers(0, 3)) else {}
    )
    made |= _some(draw, required=names, additionalProperties=st.one_of(st.booleans(), inner))
    rare = {
        "patternProperties": st.dictionaries(st.sampled_from(PATTERNS), inner, min_size=1, max_size=2),
        "propertyNames": strings(),
        "minProperties": _COUNTS,
        "maxProperties": _COUNTS,
        "unevaluatedProperties": st.booleans(),
        "dependentRequired": st.fixed_dictionaries({"a": names}),
        "dependentSchemas": st.fixed_dictionaries({"a": inner}),
    }
    return made | {name: draw(value) for name, value in rare.items() if draw(st.integers(0, 14)) == 0}


@st.composite
def _schema(draw: Any, inner: st.SearchStrategy[Any], references: st.SearchStrategy[str]) -> Any:
    kinds = {"number": numbers(), "integer": numbers(), "string": strings()}
    kinds |= {"array": _array(inner), "object": _object(inner)}
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
        "not": st.one_of(inner, st.sampled_from(_TAKEN_AWAY), st.fixed_dictionaries({"const": _LITERALS})),
        "if": inner,
        "then": inner,
    }
    made |= {name: draw(value) for name, value in rare.items() if draw(st.integers(0, 2 if how >= 17 else 24)) == 0}
    if draw(st.integers(0, 5)) == 0:
        made |= {
            "title": "T",
            "default": 3,
            "description": "D",
            "x-own": [1],
            "format": draw(st.sampled_from(("", "x"))),
        }
    return made


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


@st.composite
def unions(draw: Any) -> Any:
    """A `oneOf` of objects, of which some can be told apart and some cannot."""
    inner = st.one_of(
        st.sampled_from(
            ({"const": "a"}, {"const": "b"}, {"enum": ["b", "c"]}, {"type": "string"}, {"type": "integer"})
        ),
        numbers().map(lambda said: {"type": "integer", **said}),
        strings().map(lambda said: {"type": "string", **said}),
        _object(st.sampled_from(({"const": "a"}, {"const": 1}, True))).map(lambda said: {"type": "object", **said}),
        _array(st.sampled_from(({"const": "a"}, {"type": "integer"}))).map(lambda said: {"type": "array", **said}),
    )
    made = {
        "oneOf": draw(st.lists(_object(inner).map(lambda said: {"type": "object", **said}), min_size=2, max_size=3))
    }
    return made | draw(st.sampled_from(({}, {}, {"required": ["kind"]}, {"properties": {"kind": {"const": "a"}}})))


def values(schema: Any, root: Any, depth: int = 4) -> st.SearchStrategy[Any]:
    """Such as may well fit a schema, with properties in its order and no others."""
    if isinstance(schema, bool) or depth == 0:
        return _LITERALS
    if "$ref" in schema:
        return values(target(schema["$ref"], root), root, depth - 1)
    if "const" in schema or "enum" in schema:
        return st.sampled_from([schema["const"]] if "const" in schema else schema["enum"] or [None])
    for keyword in ("anyOf", "oneOf", "allOf"):
        if keyword in schema:
            return st.one_of([values(one, root, depth - 1) for one in schema[keyword]])
    said = schema.get("type", [kind for kind in _TYPES if kind in _meant(schema)] or list(_TYPES))
    kinds = said if isinstance(said, list) else [said]
    return st.sampled_from(kinds).flatmap(lambda kind: _of_type(kind, schema, root, depth))


def _meant(schema: Any) -> set[str]:
    from gateway.schemas.term import KEYWORDS

    return {kind for kind, keywords in KEYWORDS.items() if any(keyword in schema for keyword in keywords)}


def _of_type(kind: str, schema: Any, root: Any, depth: int) -> st.SearchStrategy[Any]:
    if kind in ("number", "integer"):
        ends = [
            schema[name] for name in schema if name.endswith(("imum", "multipleOf")) and abs(schema[name]) < 1e15
        ] or [0]
        near = st.tuples(st.sampled_from(ends), st.sampled_from((0, 1, -1, 7, 0.5, -0.25, 50, 0.01)))
        number = near.map(lambda pair: round(pair[0] + pair[1], 6))
        return number.map(int) if kind == "integer" else number
    if kind == "string":
        return st.one_of(
            st.sampled_from(("", "a", "ab", "abab", "a.b", "12", "a1", "b", "c-d", 'q"', "x@y", "é\n")), _TEXTS
        )
    if kind == "array":
        first = schema.get("prefixItems", [])
        rest = schema.get("items", not first)
        more = st.lists(values(rest, root, depth - 1), max_size=0 if rest is False else 3)
        return st.tuples(*(values(one, root, depth - 1) for one in first), more).map(lambda row: [*row[:-1], *row[-1]])
    if kind == "object":
        return _objects(schema, root, depth)
    return st.booleans() if kind == "boolean" else st.none()


_TEXTS = st.text(alphabet='ab1-."é\\', max_size=5)


@st.composite
def _objects(draw: Any, schema: Any, root: Any, depth: int) -> Any:
    properties = schema.get("properties", {})
    required = schema.get("required", [])
    made = {}
    for name in dict.fromkeys((*properties, *required)):
        if name in required or draw(st.booleans()):
            made[name] = draw(values(properties.get(name, True), root, depth - 1))
    return made
