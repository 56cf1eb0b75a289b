"""What an answer has to be: `response_format`, and SGLang's `regex`, `ebnf` and `json_schema`."""

from __future__ import annotations

import json
from typing import Any

from gateway.errors import BadField
from protos import common_pb2

MOST_CHARACTERS = 1 << 16
"""Engines compile none that is longer, and every choice of a request carries one."""
MOST_TOGETHER = 1 << 22
"""Characters in all choices of a request."""
_ANY_OBJECT = '{"type":"object"}'


def of_format(value: Any) -> str | None:
    """The schema that a `response_format` asks for, as text. Raises ValueError."""
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
    return json.dumps(schema, ensure_ascii=False, separators=(",", ":"))  # of numbers of any size


def asked(format_schema: str | None, **named: str | None) -> tuple[str, dict[str, str]]:
    """(the field that asks for a grammar, the grammar by its name in Sampling), both empty if none does. Raises
    BadField."""
    found = [(field, {field: text}) for field, text in named.items() if text is not None]
    if format_schema is not None:
        found.append(("response_format", {"json_schema": format_schema}))
    if len(found) > 1:
        raise BadField(f"'{found[0][0]}' and '{found[1][0]}' cannot both be given.", found[1][0])
    return found[0] if found else ("", {})


def check(sampling: common_pb2.Sampling, choices: int) -> None:
    """Raises BadField for a grammar that no engine takes, or that is too long for so many."""
    kind = sampling.WhichOneof("grammar")
    characters = len(getattr(sampling, kind)) if kind is not None else 0
    if characters > MOST_CHARACTERS:
        raise BadField(f"The grammar has {characters} characters, at most {MOST_CHARACTERS} are compiled.", kind)
    if (together := characters * choices) > MOST_TOGETHER:
        raise BadField(
            f"The grammar has {characters} characters, {together} with {choices} answers; at most {MOST_TOGETHER}.",
            kind,
        )
