"""Apart: whether what is written for one term may fit another as well, which tells branches of a `oneOf` apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gateway.schemas import languages
from gateway.schemas.term import Conjunction, SchemaReader, Term

_DEPTH = 4
"""Levels of nested values by which branches of a `oneOf` are told apart."""


def told_apart(reader: SchemaReader, term: Term, other: Term, depth: int = _DEPTH) -> frozenset[str] | None:
    """Properties that have to be there so that nothing which is written for `term` fits `other`; None if no such
    are known."""
    if term.nodes:
        reader.step(term.nodes[0])
    forced: frozenset[str] = frozenset()
    if term.literals is not None:
        return None if any(other.allows(value) for value in term.literals) else forced
    if other.literals is not None:
        return None if any(term.allows(value) for value in other.literals) else forced
    for kind in term.written:
        if kind not in other.types:
            continue
        found = _APART[kind](reader, term, other, depth) if kind in _APART else None
        if found is None:
            return None
        forced |= found
    return forced


def values_apart(reader: SchemaReader, value: Conjunction, other: Conjunction, depth: int) -> bool:
    """Whether nothing fits both, without any property being forced."""
    if depth <= 0:
        return False
    theirs = reader.any(other)
    return not any(
        told_apart(reader, one, another, depth - 1) != frozenset() for one in reader.any(value) for another in theirs
    )


def possible(reader: SchemaReader, value: Conjunction, depth: int) -> bool:
    """Whether something fits, as far as is easy to see."""
    if depth <= 0:
        return True
    return any(_possible(reader, term, kind, depth) for term in reader.any(value) for kind in term.written)


def _possible(reader: SchemaReader, term: Term, kind: str, depth: int) -> bool:
    if term.literals is not None:
        return bool(term.literals)
    if kind == "number":
        return not term.range.empty
    if kind == "string":
        return not reader.is_nothing(term.strings)
    if kind == "array":
        return term.items.most is None or term.items.least <= term.items.most
    members = term.members if kind == "object" else None
    if members is None:
        return kind != "object"
    return all(possible(reader, members.named[name], depth - 1) for name in members.always)


def _numbers_apart(_reader: SchemaReader, term: Term, other: Term, _depth: int) -> frozenset[str] | None:
    within = term.range.and_(other.range)
    if term.whole or other.whole:
        within = within.whole
    return frozenset() if within.empty else None


def _strings_apart(reader: SchemaReader, term: Term, other: Term, _depth: int) -> frozenset[str] | None:
    return frozenset() if reader.is_nothing(languages.both((term.strings, other.strings))) else None


def _arrays_apart(reader: SchemaReader, term: Term, other: Term, depth: int) -> frozenset[str] | None:
    own, theirs = term.items, other.items
    if (own.most is not None and own.most < theirs.least) or (theirs.most is not None and theirs.most < own.least):
        return frozenset()
    there = len(own.first) if own.most is None else min(len(own.first), own.most)
    if theirs.most is not None and theirs.most < there:
        return frozenset()
    for index in range(max(there, min(1, own.least))):
        value = own.first[index] if index < len(own.first) else own.rest
        other_value = theirs.first[index] if index < len(theirs.first) else theirs.rest
        if value is not None and other_value is not None and values_apart(reader, value, other_value, depth):
            return frozenset()
    return None


def _objects_apart(reader: SchemaReader, term: Term, other: Term, depth: int) -> frozenset[str] | None:
    own, theirs = term.members, other.members
    if own is None or theirs is None:
        return frozenset()
    if not own.free and not theirs.always <= own.named.keys():
        return frozenset()
    ordered = sorted(own.named, key=lambda name: (name not in own.always, name not in theirs.always))
    for name in ordered:
        if name not in own.always and not possible(reader, own.named[name], depth):
            continue
        value = other.of_name(name)
        dead = name in other.banned or not other.may_be_named(name) or not reader.any(value)
        if dead or values_apart(reader, own.named[name], value, depth):
            return frozenset() if name in own.always else frozenset({name})
    return None


_APART: Mapping[str, Callable[[SchemaReader, Term, Term, int], frozenset[str] | None]] = {
    "number": _numbers_apart,
    "string": _strings_apart,
    "array": _arrays_apart,
    "object": _objects_apart,
}
