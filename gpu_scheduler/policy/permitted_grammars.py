"""Which grammars may be compiled at all.

xgrammar recurses without a bound into schemas: some ten thousand levels end the process, some hundred take minutes, and
nothing can stop it. It does bound nested parentheses itself.
"""

from __future__ import annotations

import json
import re

MOST_CHARACTERS = 1 << 18
"""Most characters of a grammar. Clients send a quarter of that at most; gateways turn their schemas into grammars,
which may be longer."""
MOST_LEVELS = 64
"""Most levels of objects and arrays of a schema in one another. One with 60 is compiled in a tenth of a second."""
_TOKEN = re.compile(r"\b(Exclude)?Token(TagDispatch)?\s*\(")
"""Rules of xgrammar's own that name token numbers. For a number that the model does not have it writes outside of its
mask."""
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_BRACKET = re.compile(r"[\[\]{}]")


def problem(kind: str, text: str) -> str:
    """Why a grammar is refused; empty: it is not. `kind` is "json_schema", "regex" or "ebnf"."""
    if not text:
        return f"{kind} is empty"
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


def _levels(text: str) -> int:
    """The most brackets that are open at once, outside of strings."""
    most = now = 0
    for bracket in _BRACKET.findall(_STRING.sub("", text)):
        now += 1 if bracket in "[{" else -1
        most = max(most, now)
    return most
