"""The rules of a grammar while it is being made; rules that nothing fits are left out of the text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gateway.schemas import ebnf
from gateway.schemas.documents import SchemaRefused

MOST_CHARACTERS = 1 << 18
"""The most characters of a grammar."""
_MOST_RULES = 20_000


@dataclass(frozen=True, slots=True)
class Rule:
    """A reference to a rule by its name."""

    name: str


@dataclass(frozen=True, slots=True)
class Many:
    """A row repeated `least` to `most` times; None: any number."""

    parts: Row
    least: int
    most: int | None


Part = str | Rule | Many
"""Part of a row; a string is EBNF that something fits."""
Row = Sequence[Part]
"""Parts, one after the other."""


class Rules:
    """All rules of one grammar."""

    def __init__(self) -> None:
        self._ways: dict[str, Sequence[Row]] = {}
        self._after: dict[str, str] = {}

    def new(self, ways: Sequence[Row] = ()) -> Rule:
        """A new rule with these alternatives. Raises SchemaRefused if there are too many rules."""
        if len(self._ways) >= _MOST_RULES:
            raise SchemaRefused(f"its grammar has more than {_MOST_RULES} rules")
        made = Rule(f"r{len(self._ways)}")
        self._ways[made.name] = ways
        return made

    def fill(self, rule: Rule, ways: Sequence[Row], after: str = "") -> None:
        """Sets a rule's alternatives. `after`: what comes after the rule, in EBNF, if that is known."""
        self._ways[rule.name] = ways
        self._after[rule.name] = after

    def impossible(self, parts: Sequence[Part]) -> list[int]:
        """Indices of the parts that nothing fits."""
        alive = self._alive()
        return [index for index, part in enumerate(parts) if not _fits([part], alive)]

    def text(self, root: Sequence[Row]) -> str:
        """The text of the grammar with these alternatives as its root, and the rules that it needs. Raises
        SchemaRefused."""
        self._ways["root"] = root
        alive = self._alive()
        lines: list[str] = []
        needed, left = {"root"}, ["root"]
        while left:
            name = left.pop()
            if name in ebnf.BASICS:
                lines.append(f"{name} ::= {ebnf.BASICS[name]}")
                follow = {*ebnf.NEEDS.get(name, ())}
            else:
                ways = [way for way in self._ways[name] if _fits(way, alive)]
                said, after = " | ".join(_text(way, alive) for way in ways), self._after.get(name)
                lines.append(f"{name} ::= ({said}) {after}" if after else f"{name} ::= {said}")
                follow = {one for way in ways for one in _named(way, alive)}
            left.extend(follow - needed)
            needed |= follow
        made = "\n".join(lines)
        if len(made) > MOST_CHARACTERS:
            raise SchemaRefused(f"its grammar has {len(made)} characters, more than {MOST_CHARACTERS}")
        return made

    def _alive(self) -> set[str]:
        """Names of rules that something fits."""
        alive = set(ebnf.BASICS)
        waits: dict[str, list[str]] = {}
        for name, ways in self._ways.items():
            for way in ways:
                for one in _named(way, None):
                    waits.setdefault(one, []).append(name)
        left = list(self._ways)
        while left:
            name = left.pop()
            if name not in alive and any(_fits(way, alive) for way in self._ways[name]):
                alive.add(name)
                left.extend(waits.get(name, ()))
        return alive


def _fits(row: Row, alive: set[str]) -> bool:
    for part in row:
        if isinstance(part, Rule) and part.name not in alive:
            return False
        if isinstance(part, Many) and part.least and not _fits(part.parts, alive):
            return False
    return True


def _named(row: Row, alive: set[str] | None) -> Iterator[str]:
    """Names of the rules to which a row refers. `alive`: leave out repetitions that nothing fits."""
    for part in row:
        if isinstance(part, Rule):
            yield part.name
        elif isinstance(part, Many) and (alive is None or _fits(part.parts, alive)):
            yield from _named(part.parts, alive)


def _text(row: Row, alive: set[str]) -> str:
    said = []
    for part in row:
        if isinstance(part, str):
            said.append(part)
        elif isinstance(part, Rule):
            said.append(part.name)
        elif _fits(part.parts, alive):
            said.append(f"({_text(part.parts, alive)}){ebnf.times(part.least, part.most)}")
    return " ".join(said) or '""'
