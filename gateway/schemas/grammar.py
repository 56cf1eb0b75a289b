"""A schema's grammar, in xgrammar's EBNF: JSON on one line, as Python's json writes it.

Why not give xgrammar the schema itself: what xgrammar 0.2.1 makes of it leaves out half of what it says (`maximum: 120`
allows 129, `minimum: 5` allows 1, a pattern's `.` ends the string). Of EBNF it allows exactly what is written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gateway.schemas import ebnf, languages
from gateway.schemas.documents import Document, Node, SchemaRefused, key, type_of
from gateway.schemas.ebnf import quoted, written
from gateway.schemas.languages import EVERYTHING, NOTHING, Tree
from gateway.schemas.reader import Reader
from gateway.schemas.rules import Many, Part, Row, Rule, Rules
from gateway.schemas.term import NUMBER, OBJECT, SAYING, STRING, Conjunction, Items, ObjectMembers, Term

MOST_LEVELS = 64
"""The most levels of objects and lists inside one another in a schema."""
_MOST_STATES = 400
"""The most states of a language that is not plain."""
_MOST_PLAIN = 260
"""The most states of a plain language. One with more is written as it stands: xgrammar is slower with it at every
token, and it has no escapes in what is counted."""
_REPEATED = 128
"""Number of characters from which on xgrammar counts them; it has a state for each of fewer."""
_MOST_OF_ALL = 2_000
"""The most states of all languages together."""
_STRAIGHT = 40
"""Number of properties in one rule."""
_SIMPLE: Mapping[str, Part] = {
    "null": '"null"',
    "boolean": '("true" | "false")',
    **{kind: Rule(kind) for kind in ("integer", "number", "string", "array", "object")},
}
"""Parts for types with no further restriction."""


def of(schema: Any) -> str:
    """The grammar of the answers that a schema allows. Raises SchemaRefused."""
    made = Builder()
    root = made.value(schema)
    for why in made.impossible().values():
        raise SchemaRefused(why)
    return made.rules.text([[root]])


class Builder:
    """Makes one grammar, of any number of schemas."""

    def __init__(self) -> None:
        self.rules = Rules()
        self._reader = Reader()
        self._left: list[Callable[[], None]] = []
        """Functions that fill rules which have been referred to."""
        self._roots: list[Conjunction] = []
        self._values: dict[Conjunction, Part] = {}
        self._terms: dict[Term, Part] = {}
        self._languages: dict[tuple[Tree, bool], Sequence[Row] | None] = {}
        self._state_rules: dict[tuple[Tree, bool], Rule] = {}
        self._states = _MOST_OF_ALL

    def value(self, schema: Any, *, is_object: bool = False) -> Part:
        """The part for what a schema allows. `is_object`: only its objects. Raises SchemaRefused."""
        if levels(schema) > MOST_LEVELS:
            raise SchemaRefused(f"it has more than {MOST_LEVELS} levels")
        wanted: Conjunction = (Document(schema).root,)
        if is_object:
            wanted += (Document({"type": "object"}).root,)
        try:
            made = self._value(wanted)
            while self._left:
                self._left.pop()()
        except RecursionError:
            raise SchemaRefused("it refers too often from one place to another") from None
        except languages.LanguageTooLarge:
            raise SchemaRefused("its bounds on numbers and strings need too large a grammar") from None
        self._roots.append(wanted)
        return made

    def impossible(self) -> Mapping[int, str]:
        """Number of a schema -> why nothing fits it, for schemas that nothing fits."""
        found = self.rules.impossible([self._values[self._reader.straight(wanted)] for wanted in self._roots])
        return {index: f"it allows no answer: {self._why(self._roots[index])}" for index in found}

    def _why(self, wanted: Conjunction) -> str:
        """Why nothing fits a value, by the keywords that describe it, or a value that it must contain."""
        seen: set[Conjunction] = set()
        while True:
            wanted = self._reader.straight(wanted)
            terms = self._reader.any(wanted)
            place = wanted[0].pointer
            if wanted in seen:
                return f"what '{place}' refers to has no end"
            seen.add(wanted)
            inner = self._impossible_part(terms[0]) if terms else None
            if inner is None:
                nodes = terms[0].nodes if terms else wanted
                said = {f"'{one}'": None for node in nodes for one in node.keywords if one in SAYING}
                return f"nothing fits {', '.join(said) or 'false'} at '{nodes[-1].pointer}'"
            wanted = inner

    def _impossible_part(self, term: Term) -> Conjunction | None:
        if term.literals is not None or len(term.written) != 1:
            return None
        parts: list[Conjunction] = []
        if term.written[0] == "object" and term.members is not None:
            parts.extend(value for name, value in term.members.named.items() if name in term.members.always)
        elif term.written[0] == "array":
            items = term.items
            parts.extend(items.first[: items.most])
            parts.extend([items.rest] if items.rest is not None and items.least > len(items.first) else [])
        known = [part for part in parts if self._reader.straight(part) in self._values]
        impossible = self.rules.impossible([self._values[self._reader.straight(part)] for part in known])
        return known[impossible[0]] if impossible else None

    def _value(self, wanted: Conjunction) -> Part:
        wanted = self._reader.straight(wanted)
        found = self._values.get(wanted)
        if found is None:
            terms = self._reader.terms(wanted)
            if len(terms) == 1:
                found = self._term(terms[0])
            else:
                found = self.rules.new([[self._term(term)] for term in terms])
            self._values[wanted] = found
        return found

    def _term(self, term: Term) -> Part:
        found = self._terms.get(term)
        if found is None:
            if not term.nodes:
                found = Rule("any")
            elif not term.constrained and len(term.written) == 1:
                kind = term.written[0]
                found = _SIMPLE["integer" if kind == "number" and term.whole else kind]
            elif term.literals is None and list(term.written) in (["string"], ["number"]):
                ways = self._ways(term)
                found = ways[0][0] if len(ways) == 1 == len(ways[0]) else self.rules.new(ways)
            else:
                found = made = self.rules.new()
                self._left.append(lambda: self.rules.fill(made, self._ways(term)))
            self._terms[term] = found
        return found

    def _ways(self, term: Term) -> Sequence[Row]:
        if term.literals is not None:
            return [[quoted(written(value))] for value in term.literals]
        term.check()
        return [way for kind in term.written for way in self._of_type(term, kind)]

    def _of_type(self, term: Term, kind: str) -> Sequence[Row]:
        if kind in ("number", "array", "object") and any(type_of(one) == kind for one in term.unlike):
            raise term.unkept(("not",), f"no grammar leaves out one {kind}")
        if kind in ("null", "boolean"):
            values: Sequence[Any] = [None] if kind == "null" else [True, False]
            return [[quoted(written(value))] for value in values if not any(one is value for one in term.unlike)]
        if kind == "number":
            return self._number(term)
        if kind == "string":
            return self._string(term)
        return self._array(term) if kind == "array" else self._object(term)

    def _number(self, term: Term) -> Sequence[Row]:
        tree = term.numbers
        if tree is None:
            return [[_SIMPLE["integer" if term.whole else "number"]]]
        ways = self._language(tree, 5 * _MOST_STATES)
        if ways is None:
            raise term.unkept(NUMBER, "together with the others it takes too many states")
        return ways

    def _string(self, term: Term) -> Sequence[Row]:
        unlike = [languages.but(languages.text(one)) for one in term.unlike if isinstance(one, str)]
        formatted = term.formatted
        if formatted is not None:
            ways = self._language(languages.both((formatted, *unlike)), _MOST_STATES, quotes=True)
            if ways:
                return ways
        ways = self._language(languages.both((term.strings, *unlike)), _MOST_STATES, quotes=True)
        if ways is None:
            raise term.unkept((*STRING, "not"), "together with the others it takes too many states")
        return ways

    def _language(self, tree: Tree, most: int, *, quotes: bool = False) -> Sequence[Row] | None:
        """The rows for a language; None if it takes more than `most` states. `quotes`: it is a language of strings."""
        if quotes and tree == EVERYTHING:
            return [[Rule("string")]]
        if (tree, quotes) not in self._languages:
            ways = self._spelled(tree, most, quotes)
            self._languages[tree, quotes] = [[self.rules.new(ways)]] if ways else ways
        return self._languages[tree, quotes]

    def _spelled(self, tree: Tree, most: int, quotes: bool) -> Sequence[Row] | None:
        begin = ['"\\""'] if quotes else []
        tree = languages.only(tree, ebnf.WRITABLE) if quotes else tree
        plain = languages.plain(tree)
        if plain and not quotes:
            return [] if tree is NOTHING else [[self._plain(tree)]]
        try:
            states = languages.states(tree, min(self._states, _MOST_PLAIN if plain else most), self._reader.work)
        except languages.LanguageTooLarge:
            return self._counted_out(tree) if plain else None
        if tree not in states:
            return []
        new = [state for state in states if (state, quotes) not in self._state_rules]
        self._state_rules.update(((state, quotes), self.rules.new()) for state in new)
        self._states -= len(new)
        for state in new:
            ways: list[Row] = [
                [ebnf.characters(points), self._state_rules[rest, quotes]] for rest, points in states[state].items()
            ]
            if state.nullable:
                ways.append(begin or ['""'])
            self.rules.fill(self._state_rules[state, quotes], ways, ebnf.AFTER if quotes else "")
        return [[*begin, self._state_rules[tree, quotes]]]

    def _counted_out(self, tree: Tree) -> Sequence[Row]:
        """The rows for strings of a plain language with many states."""
        if tree.kind == "repeat" and tree.args[0].kind == "chars":
            one, least, most = tree.args
            if least < _REPEATED < most:  # splitting it here halves the states that xgrammar has to look at
                short = self._language(languages.repeat(one, least, _REPEATED - 1), _MOST_STATES, quotes=True)
                return [*(short or ()), ['"\\""', self._plain(languages.repeat(one, _REPEATED, most)), '"\\""']]
        return [['"\\""', self._plain(tree), '"\\""']]

    def _plain(self, tree: Tree) -> str:
        said = ebnf.language(tree)
        self._reader.work.spend(len(said))
        return said

    def _array(self, term: Term) -> Sequence[Row]:
        items = term.items
        if items.unique is not None and (items.most is None or items.most > 1):
            return self._unique(items, items.unique)
        least, most, first = items.least, items.most, items.first[: items.most]
        if most is not None and most < least:
            return []
        row: list[Part] = []
        for place in first:
            row += ['", "'] * bool(row) + [self._value(place)]
        room = None if most is None else most - len(first)
        rest = self._value(items.rest) if items.rest is not None and room != 0 else None
        if row:
            if rest is not None:
                row.append(Many(['", "', rest], max(0, least - len(first)), room))
            return [] if rest is None and least > len(first) else [['"["', *row, '"]"']]
        ways: list[Row] = [] if least else [['"[]"']]
        if rest is not None:
            more = Many(['", "', rest], max(0, least - 1), None if most is None else most - 1)
            ways.append(['"["', rest, more, '"]"'])
        return ways

    def _unique(self, items: Items, node: Node) -> Sequence[Row]:
        """The rows for arrays of listed values, each at most once, in their listed order."""
        terms = [] if items.first or items.rest is None else self._reader.terms(items.rest)
        literals = [term.literals for term in terms]
        if not terms or None in literals:
            raise node.unkept("uniqueItems", "only items that are listed, by 'enum' or 'const', can be told apart")
        listed = {key(value): value for values in literals for value in values or ()}
        entries = [([quoted(written(value))], False) for value in listed.values()]
        ends = self._counted(entries, None, items.least, items.most, '"]"')
        return [] if ends is None else [['"["', *ends]]

    def _object(self, term: Term) -> Sequence[Row]:
        members = term.members
        if members is None:
            return []
        entries = [
            ([quoted(f"{written(name)}: "), self._value(value)], name in members.always)
            for name, value in members.named.items()
        ]
        ends = self._counted(entries, self._free(members, term), members.least, members.most, '"}"')
        return [] if ends is None else [['"{"', *ends]]

    def _free(self, members: ObjectMembers, term: Term) -> Part | None:
        ways: list[Row] = []
        for free in members.free:
            value = self._value(free.value)
            names = self._language(free.names, 4 * _MOST_STATES, quotes=True)
            if names is None:
                raise term.unkept(OBJECT, "its names take too many states")
            ways.extend([*name, '": "', value] for name in names)
        return self.rules.new(ways) if ways else None

    def _counted(
        self, entries: Sequence[tuple[Row, bool]], free: Part | None, least: int, most: int | None, end: str
    ) -> Row | None:
        """The row after an opening bracket: the entries in their order, some of which are always there, and after them
        any number of `free`; from `least` to `most` together. None if that is impossible."""
        cap = max(1, least) if most is None else len(entries) + 1  # written entries beyond it are not counted
        cells: list[Row | None] = [
            self._last(count, free, least, most, end) for count in range(min(cap, len(entries)) + 1)
        ]
        for index in range(len(entries) - 1, -1, -1):
            entry, always = entries[index]
            after = cells
            if not always or index % _STRAIGHT == 0:
                after = [cell if cell is None or len(cell) < 2 else [self.rules.new([cell])] for cell in cells]
            cells = []
            for count in range(min(cap, index) + 1):
                found: list[Row] = []
                if (then := after[min(count + 1, cap)]) is not None:
                    found.append([*(['", "'] if count else ()), *entry, *then])
                if not always and (then := after[count]) is not None:
                    found.append(then)
                cells.append([self.rules.new(found)] if len(found) > 1 else found[0] if found else None)
        return cells[0]

    def _last(self, count: int, free: Part | None, least: int, most: int | None, end: str) -> Row | None:
        """The row that may follow `count` entries; None if nothing may."""
        room = None if most is None else most - count
        if room is not None and room < 0:
            return None
        if free is None or room == 0:
            return [end] if count >= least else None
        if count < least - 1:
            return None  # names that are not listed may be equal, so they count as one
        if count:
            return [Many(['", "', free], int(count < least), room), end]
        some: Row = [free, Many(['", "', free], 0, None if room is None else room - 1), end]
        return some if least else [self.rules.new([some, [end]])]


def levels(value: Any) -> int:
    """The number of levels of lists and objects inside one another."""
    levels, now = 0, [value]
    while now := [each for each in now if isinstance(each, (list, dict))]:
        levels += 1
        now = [one for each in now for one in (each.values() if isinstance(each, dict) else each)]
    return levels
