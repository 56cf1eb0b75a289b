"""Regular languages as trees, with intersections and complements, matched by derivatives (Brzozowski).

A tree is made by the functions below, which keep it small and flat, so that equal languages mostly are equal trees.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any, Protocol

Chars = tuple[tuple[int, int], ...]
"""Code points, as sorted ranges that do not touch; both ends belong to a range."""
ALL: Chars = ((0, 0xD7FF), (0xE000, 0x10FFFF))
"""All characters; halves of surrogate pairs are none."""
_END = 0x110000
_MOST_TRIED = 20_000
"""The most characters that are looked up in trees for one state."""


class LanguageTooLarge(Exception):
    """A language takes more states than it may, or more work."""


class LanguageWork:
    """The work that may still be done for one grammar: characters that are looked up in trees, and written."""

    def __init__(self, left: int) -> None:
        self.left = left

    def spend(self, count: int) -> None:
        """Takes `count` off what is left. Raises LanguageTooLarge if less is left, and then nothing is left."""
        if count > self.left:
            self.left = 0
            raise LanguageTooLarge
        self.left -= count


class Machine(Protocol):
    """A state of an automaton that is easier to run than to write down; hashable."""

    @property
    def accepts(self) -> bool: ...

    @property
    def marks(self) -> Chars:
        """Characters that the automaton tells apart, each a range of its own; no text has others."""

    def after(self, character: str) -> Machine | None: ...


class Tree:
    """A language. `kind` and `args` are one of: "chars" (Chars), "row" (trees, one after the other), "choice" (trees),
    "repeat" (a tree, least, most or None), "both" (trees, each of which has to fit), "not" (a tree), "machine" (a
    Machine)."""

    __slots__ = ("_hash", "args", "kind", "nullable", "width")

    def __init__(self, kind: str, args: tuple[Any, ...], nullable: bool) -> None:
        self.kind = kind
        self.args = args
        self.nullable = nullable
        """Whether the empty text belongs to the language."""
        self.width = _width(kind, args)
        """Number of trees in which a character is looked up."""
        self._hash = hash((kind, args))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Tree)
            and self._hash == other._hash
            and self.kind == other.kind
            and self.args == other.args
        )

    def __repr__(self) -> str:
        return f"{self.kind}{self.args}"


def _width(kind: str, args: tuple[Any, ...]) -> int:
    if kind in ("chars", "machine"):
        return 1
    width = 1
    for part in args[:1] if kind == "repeat" else args:
        width += part.width
        if kind == "row" and not part.nullable:
            break
    return width


def ranges(pairs: Iterable[tuple[int, int]]) -> Chars:
    made: list[tuple[int, int]] = []
    for low, high in sorted(pairs):
        if made and low <= made[-1][1] + 1:
            made[-1] = (made[-1][0], max(made[-1][1], high))
        else:
            made.append((low, high))
    return tuple(made)


def of(characters: str) -> Chars:
    return ranges((ord(one), ord(one)) for one in characters)


def without(chars: Chars, taken: Chars) -> Chars:
    made = []
    for low, high in chars:
        for taken_low, taken_high in taken:
            if taken_high < low or taken_low > high:
                continue
            if taken_low > low:
                made.append((low, taken_low - 1))
            low = taken_high + 1
            if low > high:
                break
        if low <= high:
            made.append((low, high))
    return tuple(made)


def common(one: Chars, other: Chars) -> Chars:
    return without(one, without(ALL, other))


NOTHING = Tree("choice", (), False)
EMPTY = Tree("row", (), True)


def chars(points: Chars) -> Tree:
    return Tree("chars", points, False) if points else NOTHING


ANY = chars(ALL)


def text(said: str) -> Tree:
    return row(chars(of(one)) for one in said)


def row(parts: Iterable[Tree]) -> Tree:
    flat: list[Tree] = []
    for part in parts:
        if part is NOTHING:
            return NOTHING
        flat.extend(part.args if part.kind == "row" else (part,))
    return flat[0] if len(flat) == 1 else Tree("row", tuple(flat), all(part.nullable for part in flat))


def choice(parts: Iterable[Tree]) -> Tree:
    flat: dict[Tree, None] = {}
    single: list[tuple[int, int]] = []
    for part in parts:
        for one in part.args if part.kind == "choice" else (part,):
            if one.kind == "chars":
                single.extend(one.args)
            else:
                flat[one] = None
    if single:
        flat = {chars(ranges(single)): None, **flat}
    if any(_is_all(part) for part in flat):
        return EVERYTHING
    made = tuple(flat)
    if not made:
        return NOTHING
    return made[0] if len(made) == 1 else Tree("choice", made, any(part.nullable for part in made))


def repeat(tree: Tree, least: int = 0, most: int | None = None) -> Tree:
    if most is not None and most < least:
        return NOTHING
    if most == 0 or tree is EMPTY:
        return EMPTY
    if tree is NOTHING:
        return EMPTY if least == 0 else NOTHING
    if (least, most) == (1, 1):
        return tree
    if tree.kind == "repeat" and tree.args[1:] == (0, None):
        return tree
    return Tree("repeat", (tree, least, most), least == 0 or tree.nullable)


def optional(tree: Tree) -> Tree:
    return tree if tree.nullable else repeat(tree, 0, 1)


EVERYTHING = repeat(ANY)


def _is_all(tree: Tree) -> bool:
    return tree is EVERYTHING or (tree.kind == "repeat" and tree.args[1:] == (0, None) and tree.args[0].args == ALL)


def both(parts: Iterable[Tree]) -> Tree:
    flat: dict[Tree, None] = {}
    for part in parts:
        for one in part.args if part.kind == "both" else (part,):
            if one is NOTHING:
                return NOTHING
            if not _is_all(one):
                flat[one] = None
    if EMPTY in flat:
        return EMPTY if all(part.nullable for part in flat) else NOTHING
    made = tuple(flat)
    if not made:
        return EVERYTHING
    return made[0] if len(made) == 1 else Tree("both", made, all(part.nullable for part in made))


def but(tree: Tree) -> Tree:
    """The language of every text that does not belong to `tree`."""
    if tree.kind == "not":
        return tree.args[0]  # type: ignore[no-any-return]
    if tree is NOTHING:
        return EVERYTHING
    return NOTHING if _is_all(tree) else Tree("not", (tree,), not tree.nullable)


def machine(state: Machine) -> Tree:
    return Tree("machine", (state,), state.accepts)


def plain(tree: Tree) -> bool:
    """Whether the tree has neither intersections nor complements nor machines."""
    left = [tree]
    while left:
        one = left.pop()
        if one.kind in ("both", "not", "machine"):
            return False
        left.extend(part for part in one.args if isinstance(part, Tree))
    return True


def only(tree: Tree, points: Chars) -> Tree:
    """The texts of a language that have no characters but `points`."""
    if not plain(tree):
        return both((tree, repeat(chars(points))))
    kind, args = tree.kind, tree.args
    if kind == "chars":
        return tree if args == (kept := common(args, points)) else chars(kept)
    if kind == "repeat":
        return repeat(only(args[0], points), *args[1:])
    return (row if kind == "row" else choice)(only(part, points) for part in args)


@lru_cache(1 << 14)
def after(tree: Tree, point: int) -> Tree:
    """The language of what may follow the character `point` (the derivative)."""
    kind, args = tree.kind, tree.args
    if kind == "chars":
        return EMPTY if any(low <= point <= high for low, high in args) else NOTHING
    if kind == "row":
        ways = []
        for index, part in enumerate(args):
            ways.append(row((after(part, point), *args[index + 1 :])))
            if not part.nullable:
                break
        return choice(ways)
    if kind == "choice":
        return choice(after(part, point) for part in args)
    if kind == "repeat":
        part, least, most = args
        rest = repeat(part, max(0, least - 1), None if most is None else most - 1)
        return row((after(part, point), rest))
    if kind == "both":
        return both(after(part, point) for part in args)
    if kind == "machine":
        next_state = args[0].after(chr(point)) if any(low <= point <= high for low, high in args[0].marks) else None
        return NOTHING if next_state is None else machine(next_state)
    return but(after(args[0], point))


def _cuts(tree: Tree, found: set[int]) -> None:
    """Adds to `found` the code points at which the derivative changes."""
    kind, args = tree.kind, tree.args
    if kind in ("chars", "machine"):
        for low, high in args if kind == "chars" else args[0].marks:
            found.add(low)
            found.add(high + 1)
    elif kind == "row":
        for part in args:
            _cuts(part, found)
            if not part.nullable:
                break
    else:
        for part in args[:1] if kind == "repeat" else args:
            _cuts(part, found)


@lru_cache(1 << 12)
def ways(tree: Tree) -> tuple[Mapping[Tree, Chars], int]:
    """(rest of a text -> its possible first characters, the work that this took). Raises LanguageTooLarge."""
    cuts = {low for low, _ in ALL} | {high + 1 for _, high in ALL}
    _cuts(tree, cuts)
    if (tried := len(cuts) * tree.width) > _MOST_TRIED:
        raise LanguageTooLarge
    ordered = sorted(cuts)
    found: dict[Tree, list[tuple[int, int]]] = {}
    for low, end in zip(ordered, [*ordered[1:], _END], strict=True):
        if end > low and not 0xD800 <= low <= 0xDFFF and low < _END:
            rest = after(tree, low)
            if rest is not NOTHING:
                found.setdefault(rest, []).append((low, end - 1))
    return {rest: ranges(pairs) for rest, pairs in found.items()}, tried


def states(tree: Tree, most: int, work: LanguageWork) -> Mapping[Tree, Mapping[Tree, Chars]]:
    """An automaton: state -> its ways to others. From each of its states a text can come to its end. Raises
    LanguageTooLarge."""
    if plain(tree) and (lengths(tree)[1] or 0) >= most:
        raise LanguageTooLarge  # there is a state for each character
    found: dict[Tree, Mapping[Tree, Chars]] = {}
    back: dict[Tree, list[Tree]] = {}
    left = [tree]
    while left:
        state = left.pop()
        if state in found:
            continue
        if len(found) >= most:
            raise LanguageTooLarge
        found[state], tried = ways(state)
        work.spend(tried)
        for rest in found[state]:
            back.setdefault(rest, []).append(state)
            left.append(rest)
    alive: set[Tree] = set()
    left = [state for state in found if state.nullable]
    while left:
        state = left.pop()
        if state not in alive:
            alive.add(state)
            left.extend(back.get(state, ()))
    return {
        state: {rest: points for rest, points in follows.items() if rest in alive}
        for state, follows in found.items()
        if state in alive
    }


def fits(tree: Tree, said: str) -> bool:
    for one in said:
        tree = after(tree, ord(one))
        if tree is NOTHING:
            return False
    return tree.nullable


def lengths(tree: Tree) -> tuple[int, int | None]:
    """The fewest and the most characters of the texts of a plain language; None: any number."""
    kind, args = tree.kind, tree.args
    if kind == "chars":
        return 1, 1
    if kind == "repeat":
        part, least, most = args
        low, high = lengths(part)
        return low * least, None if most is None or high is None else high * most
    found = [lengths(part) for part in args]
    lows, highs = [low for low, _ in found], [high for _, high in found]
    if kind == "row":
        return sum(lows), None if None in highs else sum(high or 0 for high in highs)
    return min(lows, default=0), None if None in highs else max((high or 0 for high in highs), default=0)


def between(tree: Tree, least: int, most: int | None) -> Tree:
    """The texts of a language with `least` to `most` characters, as a plain tree if one is easy to find."""
    if plain(tree):
        found = _between(tree, least, most)
        if found is not None:
            return found
    return both((repeat(ANY, least, most), tree))


_MOST_WAYS = 64


def _between(tree: Tree, least: int, most: int | None) -> Tree | None:
    low, high = lengths(tree)
    if low >= least and (most is None or (high is not None and high <= most)):
        return tree
    if (most is not None and low > most) or (high is not None and high < least):
        return NOTHING
    if tree.kind == "choice":
        ways = [_between(part, least, most) for part in tree.args]
        return None if None in ways else choice(way for way in ways if way is not None)
    found = []
    for parts in _opened(tree):
        one = _one_between(parts, least, most)
        if one is None:
            return None
        found.append(one)
    return choice(found) if found else None


def _opened(tree: Tree) -> Iterator[list[Tree]]:
    """The rows that a row stands for, with its optional parts there or left out; none if there would be more than
    `_MOST_WAYS`."""
    rows: list[list[Tree]] = [[]]
    for part in tree.args if tree.kind == "row" else (tree,):
        if part.kind == "repeat" and part.args[1:] == (0, 1) and lengths(part.args[0])[1] != 1:
            inner = part.args[0]
            there = list(inner.args) if inner.kind == "row" else [inner]
            rows = [made for one in rows for made in (one, one + there)]
        else:
            rows = [[*one, part] for one in rows]
        if len(rows) > _MOST_WAYS:
            return
    yield from rows


def _one_between(parts: list[Tree], least: int, most: int | None) -> Tree | None:
    """The texts with `least` to `most` characters of a row whose length depends on one part's number of repetitions
    alone; None for any other row."""
    sizes = [lengths(part) for part in parts]
    varies = [index for index, (low, high) in enumerate(sizes) if low != high]
    fixed = sum(low for low, high in sizes if low == high)
    if not varies:
        return row(parts) if least <= fixed and (most is None or fixed <= most) else NOTHING
    if len(varies) > 1 or parts[varies[0]].kind != "repeat":
        return None
    part, at_least, at_most = parts[varies[0]].args
    each, widest = lengths(part)
    if each != widest or not each:
        return None
    low = max(at_least, -(-(least - fixed) // each))
    high = at_most if most is None else (most - fixed) // each
    if at_most is not None and high is not None:
        high = min(high, at_most)
    if high is not None and (high < 0 or high < low):
        return NOTHING
    return row((*parts[: varies[0]], repeat(part, low, high), *parts[varies[0] + 1 :]))
