"""Patterns of strings, as ECMA-262 writes them (JSON Schema requires it), as languages of the whole strings in which
they are found."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from gateway.schemas import languages
from gateway.schemas.languages import ALL, EMPTY, EVERYTHING, NOTHING, Chars, Tree

MOST_LEVELS = 60
MOST_TIMES = 1 << 16
_MOST_WAYS = 64
_DIGITS: Chars = ((48, 57),)
_WORD = languages.ranges([(48, 57), (65, 90), (95, 95), (97, 122)])
_SPACE = languages.of("\t\n\v\f\r \u00a0\u1680\u2028\u2029\u202f\u205f\u3000\ufeff") + ((0x2000, 0x200A),)
_SPACE = languages.ranges(_SPACE)
_LINE_ENDS = languages.of("\n\r\u2028\u2029")
_CLASSES = {"d": _DIGITS, "w": _WORD, "s": _SPACE}
_CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13}
_Item = tuple[Any, ...]
"""("tree", a Tree), ("begin",), ("end",), ("ahead", ways, whether it has to match), ("group", ways) or ("repeat", ways,
least, most); the last two contain a "begin", "end" or "ahead"."""
_Ways = list[list[_Item]]
"""Alternatives, each a row of items."""


class UnknownPattern(ValueError):
    """A pattern, or a part of one, that cannot be kept; `str` says which."""


@lru_cache(256)
def found_in(pattern: str) -> Tree:
    """The strings in which the pattern is found. Raises UnknownPattern."""
    rows = [row for way in _Reader(pattern).whole() for row in _opened(way)]
    return languages.choice(
        _row(row, begins=True) if _begins(row) else languages.row((EVERYTHING, _row(row, begins=False))) for row in rows
    )


def _begins(row: list[_Item]) -> bool:
    return any(item[0] == "begin" for item in row)


def _row(items: list[_Item], *, begins: bool) -> Tree:
    """The rests of a text that begin with the row of items. `begins`: the rest is the whole text."""
    made = EVERYTHING
    for index in range(len(items) - 1, -1, -1):
        kind, *said = items[index]
        if kind == "tree":
            made = languages.row((said[0], made))
        elif kind == "end":
            made = languages.both((made, EMPTY))
        elif kind == "ahead":
            ways, has_to = said
            first = begins and all(one[0] == "begin" for one in items[:index])
            rows = [row for way in ways for row in _opened(way)]
            if not first and any(map(_begins, rows)):
                raise UnknownPattern("'^' in a lookahead that is not at the beginning")
            ahead = languages.choice(_row(row, begins=first) for row in rows)
            made = languages.both((made, ahead if has_to else languages.but(ahead)))
        else:  # "begin": nothing may come before it
            before = items[:index]
            if any(one[0] == "ahead" for one in before):
                raise UnknownPattern("a lookahead before '^'")
            if any(one[0] == "end" for one in before):
                made = languages.both((made, EMPTY))
            return made if all(one[0] in ("begin", "end") or one[1].nullable for one in before) else NOTHING
    return made


def _opened(row: list[_Item]) -> _Ways:
    """Rows without groups: each group is replaced by its content. Raises UnknownPattern."""
    rows: _Ways = [[]]
    for item in row:
        if item[0] == "group":
            inner = [one for way in item[1] for one in _opened(way)]
        elif item[0] == "repeat":
            if item[2:] != (0, 1):
                raise UnknownPattern("'^', '$' or a lookahead in what is repeated")
            inner = [[], *(one for way in item[1] for one in _opened(way))]
        else:
            inner = [[item]]
        rows = [before + one for before in rows for one in inner]
        if len(rows) > _MOST_WAYS:
            raise UnknownPattern("too many '^', '$' or lookaheads")
    return rows


class _Reader:
    def __init__(self, pattern: str) -> None:
        self._text = pattern
        self._at = 0
        self._level = 0

    def whole(self) -> _Ways:
        ways = self._ways()
        if self._at < len(self._text):
            raise UnknownPattern("a ')' without '('")
        return ways

    def _ways(self) -> _Ways:
        self._level += 1
        if self._level > MOST_LEVELS:
            raise UnknownPattern(f"more than {MOST_LEVELS} parentheses in one another")
        ways = [self._read_row()]
        while self._next("|"):
            ways.append(self._read_row())
        self._level -= 1
        return ways

    def _next(self, said: str) -> bool:
        if self._text.startswith(said, self._at):
            self._at += len(said)
            return True
        return False

    def _one(self) -> str:
        if self._at >= len(self._text):
            raise UnknownPattern("an end that is not expected")
        self._at += 1
        return self._text[self._at - 1]

    def _read_row(self) -> list[_Item]:
        row: list[_Item] = []
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            row.append(self._repeated(self._item()))
        return row

    def _repeated(self, item: _Item) -> _Item:
        times = self._times()
        if times is None:
            return item
        if self._next("?"):
            pass  # lazy: it matches the same strings
        elif self._at < len(self._text) and (self._text[self._at] in "*+" or self._bounds(peek=True)):
            raise UnknownPattern("a repetition of a repetition")
        if item[0] == "tree":
            return "tree", languages.repeat(item[1], *times)
        if item[0] == "group":
            return "repeat", item[1], *times
        raise UnknownPattern("a repetition of '^', '$' or a lookahead")

    def _times(self) -> tuple[int, int | None] | None:
        for mark, times in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._next(mark):
                return times
        return self._bounds()

    def _bounds(self, peek: bool = False) -> tuple[int, int | None] | None:
        """The bounds of a repetition in braces; None if the braces are ordinary characters. Raises UnknownPattern."""
        if not self._text.startswith("{", self._at):
            return None
        end = self._text.find("}", self._at)
        least, comma, most = self._text[self._at + 1 : max(end, self._at + 1)].partition(",")
        if not least.isascii() or not least.isdigit() or (most and not (most.isascii() and most.isdigit())):
            if comma and not least and most.isdigit():
                raise UnknownPattern(f"'{{,{most}}}', which is read in different ways")
            return None
        if len(least) > 9 or len(most) > 9 or max(int(least), int(most or 0)) > MOST_TIMES:
            raise UnknownPattern(f"more than {MOST_TIMES} repetitions")
        if most and int(most) < int(least):
            raise UnknownPattern(f"'{{{least},{most}}}', which no number is")
        if not peek:
            self._at = end + 1
        return int(least), (int(most) if most else None) if comma else int(least)

    def _item(self) -> _Item:
        one = self._one()
        if one == "^":
            return ("begin",)
        if one == "$":
            return ("end",)
        if one == "(":
            return self._group()
        if one == "[":
            return "tree", languages.chars(self._class())
        if one == ".":
            return "tree", languages.chars(languages.without(ALL, _LINE_ENDS))
        if one == "\\":
            return "tree", languages.chars(self._escaped(in_class=False))
        if one in "*+?" or (one == "{" and self._is_bounds()):
            raise UnknownPattern(f"'{one}' with nothing to repeat")
        return "tree", languages.chars(_single(one))

    def _is_bounds(self) -> bool:
        self._at -= 1
        found = self._bounds(peek=True)
        self._at += 1
        return found is not None

    def _group(self) -> _Item:
        ahead: bool | None = None
        if self._next("?"):
            if self._next("="):
                ahead = True
            elif self._next("!"):
                ahead = False
            elif self._next("<=") or self._next("<!"):
                raise UnknownPattern("a lookbehind")
            elif self._next("<"):
                end = self._text.find(">", self._at)
                if end < 0 or not self._text[self._at : end].isidentifier():
                    raise UnknownPattern("a group with no proper name")
                self._at = end + 1
            elif not self._next(":"):
                raise UnknownPattern(f"'(?{self._text[self._at : self._at + 1]}'")
        ways = self._ways()
        if not self._next(")"):
            raise UnknownPattern("a '(' without ')'")
        if ahead is not None:
            return "ahead", ways, ahead
        if all(item[0] == "tree" for way in ways for item in way):
            return "tree", languages.choice(languages.row(item[1] for item in way) for way in ways)
        return "group", ways

    def _class(self) -> Chars:
        but = self._next("^")
        if self._next("]"):
            raise UnknownPattern("a class of no characters")
        found: list[tuple[int, int]] = []
        while not self._next("]"):
            low = self._in_class()
            if self._text.startswith("-", self._at) and not self._text.startswith("-]", self._at):
                self._at += 1
                high = self._in_class()
                if len(low) == len(high) == 1 and low[0][0] == low[0][1] and high[0][0] == high[0][1]:
                    if high[0][0] < low[0][0]:
                        raise UnknownPattern("a range of characters that runs backwards")
                    found.append((low[0][0], high[0][0]))
                else:  # '\w-.' means the three of them
                    found.extend((*low, *high, (45, 45)))
            else:
                found.extend(low)
        points = languages.common(languages.ranges(found), ALL)
        return languages.without(ALL, points) if but else points

    def _in_class(self) -> Chars:
        one = self._one()
        if one == "[" and self._text[self._at : self._at + 1] in (":", ".", "="):
            raise UnknownPattern("a named class")
        return self._escaped(in_class=True) if one == "\\" else _single(one)

    def _escaped(self, in_class: bool) -> Chars:
        one = self._one()
        if one.lower() in _CLASSES:
            points = _CLASSES[one.lower()]
            return points if one.islower() else languages.without(ALL, points)
        if one in _CONTROLS:
            return _single(chr(_CONTROLS[one]))
        if one == "b" and in_class:
            return _single("\b")
        if one == "0" and not self._text[self._at : self._at + 1].isdigit():
            return _single("\0")
        if one == "c" and (letter := self._text[self._at : self._at + 1]).isascii() and letter.isalpha():
            self._at += 1
            return _single(chr(ord(letter) % 32))
        if one in "xu":
            return _single(self._numbered(one))
        if one.isalnum() or one == "_":
            raise UnknownPattern(f"'\\{one}'")
        return _single(one)

    def _numbered(self, kind: str) -> str:
        if kind == "u" and self._next("{"):
            end = self._text.find("}", self._at)
            digits = self._text[self._at : max(end, self._at)]
            self._at = end + 1
        else:
            digits = self._hex(2 if kind == "x" else 4)
            if kind == "u" and 0xD800 <= int(digits, 16) < 0xDC00 and self._next("\\u"):
                low = int(self._hex(4), 16)
                if 0xDC00 <= low < 0xE000:
                    return chr(0x10000 + ((int(digits, 16) - 0xD800) << 10) + low - 0xDC00)
                raise UnknownPattern("half of a surrogate pair")
        if not digits or len(digits) > 6 or not all(one in "0123456789abcdefABCDEF" for one in digits):
            raise UnknownPattern(f"'\\{kind}' with no number of a character")
        if int(digits, 16) > 0x10FFFF or 0xD800 <= int(digits, 16) < 0xE000:
            raise UnknownPattern(f"'\\{kind}{digits}', which is no character")
        return chr(int(digits, 16))

    def _hex(self, count: int) -> str:
        digits = self._text[self._at : self._at + count]
        if len(digits) < count or not all(one in "0123456789abcdefABCDEF" for one in digits):
            raise UnknownPattern("a '\\x' or '\\u' with no number of a character")
        self._at += count
        return digits


def _single(one: str) -> Chars:
    if 0xD800 <= ord(one) < 0xE000:
        raise UnknownPattern("half of a surrogate pair")
    return ((ord(one), ord(one)),)
