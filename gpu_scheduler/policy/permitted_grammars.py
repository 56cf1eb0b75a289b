"""Which grammars may be compiled at all.

xgrammar recurses without a bound into schemas: some ten thousand levels end the process, some hundred take minutes, and
nothing can stop it. It does bound nested parentheses itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

MOST_CHARACTERS = 1 << 18
"""Most characters of a grammar. Clients send a quarter of that at most; gateways turn their schemas into grammars,
which may be longer."""
MOST_LEVELS = 64
"""Most levels of objects and arrays of a schema in one another. One with 60 is compiled in a tenth of a second."""
_TOKEN = re.compile(r"\b(Exclude)?Token(TagDispatch)?\s*\(")
"""Rules of xgrammar's own that name token numbers. For a number that the model does not have it writes outside of its
mask."""
_PARTS = {"grammar": ("ebnf", "grammar"), "regex": ("regex", "pattern")}
"""Format of a structural tag with a grammar inside -> the grammar's kind, and the name of its text."""
_FORMATS = {*_PARTS, "any_text", "optional", "sequence", "tag", "triggered_tags"}
"""The formats of structural tags that are compiled. Others name token numbers, or schemas, which gateways compile."""
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_BRACKET = re.compile(r"[\[\]{}]")


def problem(kind: str, text: str) -> str:
    """Why a grammar is refused; empty: it is not. `kind` is "json_schema", "regex", "ebnf" or
    "structural_tag"."""
    if not text:
        return f"{kind} is empty"
    if kind == "structural_tag":
        return _tag_problem(text)
    if len(text) > MOST_CHARACTERS:
        return f"{kind} has {len(text)} characters, at most {MOST_CHARACTERS} are compiled"
    if kind == "json_schema" and (levels := _levels(text)) > MOST_LEVELS:
        return f"json_schema has {levels} levels, at most {MOST_LEVELS} are compiled"
    if kind == "ebnf" and (found := _TOKEN.search(_STRING.sub("", text))):
        return f"ebnf has a rule about numbers of tokens, {found[0]}...), which none may have here"
    if kind == "json_schema":
        try:
            json.loads(text)
        except ValueError as error:
            return f"json_schema is not JSON: {error}"
    return ""


def _tag_problem(text: str) -> str:
    if len(text) > 2 * MOST_CHARACTERS:  # what is a grammar inside is written as a string of JSON
        return f"structural_tag has {len(text)} characters, at most {2 * MOST_CHARACTERS} are compiled"
    if (levels := _levels(text)) > MOST_LEVELS:
        return f"structural_tag has {levels} levels, at most {MOST_LEVELS} are compiled"
    try:
        whole = json.loads(text)
    except ValueError as error:
        return f"structural_tag is not JSON: {error}"
    if not isinstance(whole, dict) or whole.keys() != {"type", "format"} or whole["type"] != "structural_tag":
        return "structural_tag is an object with that 'type' and a 'format'"
    for part in _formats(whole["format"]):
        kind = part.get("type")
        if not isinstance(kind, str) or kind not in _FORMATS:
            return f"structural_tag has a format {str(kind)[:40]!r}, which none may have here"
        inner, name = _PARTS.get(kind, ("", ""))
        if inner and (why := problem(inner, str(part.get(name, "")))):
            return why
    return ""


def _formats(value: Any) -> Iterator[dict[str, Any]]:
    """All objects in a value: every object of a structural tag is a format."""
    if isinstance(value, dict):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _formats(inner)


def _levels(text: str) -> int:
    """The most brackets that are open at once, outside of strings."""
    most = now = 0
    for bracket in _BRACKET.findall(_STRING.sub("", text)):
        now += 1 if bracket in "[{" else -1
        most = max(most, now)
    return most
