"""Structured outputs: `response_format`, and SGLang's `regex`, `ebnf` and `json_schema`.

Schemas become grammars here, and engines get no other form: what a schema says is kept, or the request is refused
(`gateway/schemas`).
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from gateway.errors import BadField
from gateway.schemas import grammar
from gateway.schemas.documents import SchemaRefused
from protos import common_pb2

MOST_CHARACTERS = 1 << 16
"""The most characters of a schema or grammar that a client sends."""
MOST_TOGETHER = 1 << 22
"""The most characters in all choices of a request, each of which carries its grammar."""
_KNOWN = 64
"""Number of schemas whose grammars are kept; clients use the same ones again and again."""
_ANY_OBJECT = '{"type":"object"}'


def of_format(value: Any) -> str | None:
    """The schema of a `response_format`, as text; None if it has none. Raises ValueError."""
    kind = value.get("type") if isinstance(value, dict) else None
    if value is None or kind == "text":
        return None
    if kind == "json_object":
        return _ANY_OBJECT
    if kind != "json_schema":
        raise ValueError("must be an object with a type of 'text', 'json_object' or 'json_schema'")
    named = value.get("json_schema")
    if not isinstance(named, dict) or not isinstance(named.get("name"), str):
        raise ValueError("'json_schema' must be an object with a name")
    schema = named.get("schema", {"type": "object"})
    if not isinstance(schema, dict):
        raise ValueError("'json_schema.schema' must be an object")
    return as_text(schema)


def as_text(schema: Any) -> str:
    """A schema as JSON text. Raises ValueError for a schema that is no JSON."""
    try:
        return json.dumps(schema, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except ValueError:  # a number that is infinite, or has thousands of digits
        raise ValueError("the schema has a number that is none in JSON") from None


def of_schema(text: str, field: str) -> str:
    """The grammar of what a schema allows. Raises BadField."""
    check_length(text, field)
    try:
        return _of_schema(text)
    except SchemaRefused as error:
        raise BadField(f"Invalid '{field}': {error}.", field) from None


@lru_cache(_KNOWN)
def _of_schema(text: str) -> str:
    return grammar.of(read(text))


def read(text: str) -> Any:
    """The schema in a JSON text. Raises SchemaRefused."""
    try:
        return json.loads(text, parse_constant=_no_number)
    except RecursionError:
        raise SchemaRefused("it has too many levels") from None
    except ValueError as error:
        raise SchemaRefused(f"it is not JSON: {error}") from None


def _no_number(said: str) -> Any:
    raise ValueError(f"{said} is no number")


def asked(format_schema: str | None, **named: str | None) -> tuple[str, dict[str, str]]:
    """(field that asks for a grammar, the grammar by its name in Sampling), both empty if none does. Raises
    BadField."""
    found = [(field, text) for field, text in named.items() if text is not None]
    if format_schema is not None:
        found.append(("response_format", format_schema))
    if len(found) > 1:
        raise BadField(f"'{found[0][0]}' and '{found[1][0]}' cannot both be given.", found[1][0])
    if not found:
        return "", {}
    field, text = found[0]
    if field in ("response_format", "json_schema"):
        return field, {"ebnf": of_schema(text, field)}
    check_length(text, field)
    return field, {field: text}


def check_length(text: str, field: str) -> None:
    """Raises BadField for a text that is longer than a client may send."""
    if len(text) > MOST_CHARACTERS:
        raise BadField(f"'{field}' has {len(text)} characters, at most {MOST_CHARACTERS} are compiled.", field)


def check(sampling: common_pb2.Sampling, choices: int, field: str) -> None:
    """Raises BadField for a grammar that is too long for so many choices."""
    kind = sampling.WhichOneof("grammar")
    characters = len(getattr(sampling, kind)) if kind is not None else 0
    if (together := characters * choices) > MOST_TOGETHER:
        raise BadField(
            f"The grammar has {characters} characters, {together} with {choices} answers; at most {MOST_TOGETHER}.",
            field,
        )
