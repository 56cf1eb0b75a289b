"""Grammars that several tests ask for."""

from __future__ import annotations

import json

SLOW = """root ::= r{0,3000}
r ::= s{0,3000}
s ::= ("a" | [a-z] | [a-y] | [ a-z] | [ a-x]){0,3000}"""
"""Slower with every token: what it allows can be read in ever more ways."""


def large(properties: int, longest: int = 30) -> str:
    """A schema that takes a second to compile with 300 properties, and nine seconds with a thousand."""
    pattern = {"type": "string", "pattern": f"^[a-z]{{0,{longest}}}$"}
    made = {"type": "object", "properties": dict.fromkeys((f"p{i}" for i in range(properties)), pattern)}
    return json.dumps({**made, "additionalProperties": False})
