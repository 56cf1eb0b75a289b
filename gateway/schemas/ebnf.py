"""JSON's strings and numbers as languages, and JSON values, in xgrammar's EBNF."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from gateway.schemas import languages
from gateway.schemas.languages import Chars, Tree

_ESCAPES = {'"': '"', "\\": "\\", "\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t"}
_ESCAPED = languages.of("".join(_ESCAPES))
_CONTROLS: Chars = ((0, 0x1F),)
_UNESCAPED = languages.without(languages.ALL, languages.ranges((*_CONTROLS, *_ESCAPED)))
WRITABLE = languages.without(languages.ALL, languages.without(_CONTROLS, _ESCAPED))
"""All characters but control characters without an escape of one letter; languages are written with these alone."""
_SIZES = ((0, 0x7F), (0x80, 0x7FF), (0x800, 0xFFFF), (0x10000, 0x10FFFF))
"""Ranges of code points by their number of bytes in UTF-8."""


def written(value: Any) -> str:
    """A value as answers have it. Raises ValueError if it is no JSON."""
    said = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return re.sub("[\ud800-\udfff]", lambda half: f"\\u{ord(half[0]):04x}", said)


def quoted(said: str) -> str:
    """EBNF for exactly this text."""
    return '"' + said.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


def times(least: int, most: int | None) -> str:
    if most is None:
        return {0: "*", 1: "+"}.get(least, f"{{{least},}}")
    if (least, most) == (0, 1):
        return "?"
    return f"{{{least}}}" if least == most else f"{{{least},{most}}}"


def characters(points: Chars) -> str:
    """EBNF for one of these characters in a JSON string; all of them have to be writable."""
    plain = languages.common(points, _UNESCAPED)
    escapes = "".join(said for one, said in _ESCAPES.items() if languages.common(points, languages.of(one)))
    ways = [_class(plain)] if plain else []
    if escapes:
        ways.append('"\\\\" ' + _class(languages.of(escapes)))
    return ways[0] if not escapes else f"({' | '.join(ways)})"


def language(tree: Tree) -> str:
    """EBNF for a plain language. In a repetition with a bound only characters that need no escape are kept: xgrammar is
    a hundred times slower with counted groups."""
    kind, args = tree.kind, tree.args
    if kind == "chars":
        return characters(args)
    if kind == "repeat":
        part, least, most = args
        if part.kind == "chars" and (most or 0) > 1 and (unescaped := languages.common(part.args, _UNESCAPED)):
            return _class(unescaped) + times(least, most)
        said = language(part)
        return (said if part.kind == "chars" else f"({said})") + times(least, most)
    if kind == "choice":
        return "(" + " | ".join(language(part) for part in args) + ")"
    parts: list[str] = []
    run = ""
    for part in (*args, None):
        one = _only(part) if part is not None else ""
        if one:
            run += one
            continue
        if run:
            parts.append(quoted(written(run)[1:-1]))
            run = ""
        if part is not None:
            parts.append(language(part))
    return " ".join(parts) or '""'


def _only(tree: Tree) -> str:
    """The one character of a language; empty if the language has others."""
    if tree.kind == "chars" and len(tree.args) == 1 and tree.args[0][0] == tree.args[0][1]:
        return chr(tree.args[0][0])
    return ""


@cache
def _class(points: Chars) -> str:
    said = []
    for low, high in points:
        for first, last in _alike(low, high):
            said.append(_point(first) if first == last else f"{_point(first)}-{_point(last)}")
    return f"[{''.join(said)}]"


def _alike(low: int, high: int) -> Iterator[tuple[int, int]]:
    """The parts of a range whose UTF-8 bytes are ranges themselves: with other ranges xgrammar 0.2.1 leaves characters
    out, and lets through bytes that are not UTF-8."""
    for bits, (first, last) in enumerate(_SIZES):
        if max(low, first) <= min(high, last):
            yield from _split(max(low, first), min(high, last), 6 * bits)


def _split(low: int, high: int, bits: int) -> Iterator[tuple[int, int]]:
    for place in range(6, bits + 1, 6):
        mask = (1 << place) - 1
        if low & ~mask != high & ~mask:
            if low & mask:
                yield from _split(low, low | mask, bits)
                yield from _split((low | mask) + 1, high, bits)
                return
            if high & mask != mask:
                yield from _split(low, (high & ~mask) - 1, bits)
                yield from _split(high & ~mask, high, bits)
                return
    yield low, high


def _point(point: int) -> str:
    if chr(point).isascii() and chr(point).isalnum():
        return chr(point)
    return f"\\u{point:04x}" if point < 0x10000 else f"\\U{point:08x}"  # not \x, which takes all digits that follow


_PLAIN = _class(_UNESCAPED)
AFTER = r"(= [,}\]:])"
"""Lookahead for what comes after a string: with it xgrammar need not try other tokens that end one, at every step. It
is no rule."""
BASICS: Mapping[str, str] = {
    "any": 'number | string | "true" | "false" | "null" | array | object',
    "array": '"[]" | "[" any (", " any)* "]"',
    "object": '"{}" | "{" string ": " any (", " string ": " any)* "}"',
    "string": r'"\"" characters',
    "characters": rf'("\"" | {_PLAIN} characters | "\\" escaped characters) {AFTER}',
    "escaped": r'[\u0022\\/bfnrt] | "u" [A-Fa-f0-9] [A-Fa-f0-9] [A-Fa-f0-9] [A-Fa-f0-9]',
    "number": '"-"? ("0" | [1-9] [0-9]*) ("." [0-9]+)? ([eE] [+-]? [0-9]+)?',
    "integer": '"0" | "-"? [1-9] [0-9]*',
}
"""Rules for values with no further restriction."""
NEEDS: Mapping[str, tuple[str, ...]] = {
    "any": ("number", "string", "array", "object"),
    "array": ("any",),
    "object": ("any", "string"),
    "string": ("characters",),
    "characters": ("escaped",),
}
"""Rule -> rules that it refers to."""
