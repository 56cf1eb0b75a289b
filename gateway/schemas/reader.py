"""Reader: makes terms of the places of a schema that describe one value together.

A value is described by several schemas at once: that of its property in each part of an `allOf`, a `$ref`'s target and
the keywords beside it. `Reader.terms` follows all of them and takes choices apart (`anyOf`, `oneOf`), so that what is
left are *terms*: schemas of which each is kept by its own keywords, and a value has to fit all schemas of one term.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from gateway.schemas import languages, numbers
from gateway.schemas.apart import told_apart
from gateway.schemas.documents import Node, SchemaRefused, key, type_of
from gateway.schemas.languages import NOTHING, Tree
from gateway.schemas.term import OWN, SAYING, Conjunction, Term, bounds_of, places_of, steps_of

MOST_STEPS = 20_000
"""The most schemas that are looked at for one grammar; a schema counts each time that another refers to it."""
MOST_WORK = 300_000
"""The most work with numbers and strings for one grammar."""
MOST_TERMS = 500
"""The most terms of one value."""
_MOST_STATES = 500
"""The most states of a language by which strings of branches are told apart."""
_MOST_TAGS = 20


class Reader:
    """Reads schemas for one grammar."""

    def __init__(self) -> None:
        self._steps = 0
        self.work = languages.LanguageWork(MOST_WORK)
        self._raw: dict[Conjunction, Mapping[Term, _Apart]] = {}
        self._same: dict[tuple[Conjunction, frozenset[str]], Term] = {}
        self._tags: dict[Node, str | None] = {}

    def step(self, node: Node) -> None:
        """Counts a step. Raises SchemaRefused after too many."""
        self._steps += 1
        if self._steps > MOST_STEPS:
            raise SchemaRefused(f"'{node.pointer}' and others refer to one another in too many ways")

    def straight(self, conjunction: Conjunction) -> Conjunction:
        """The conjunction with schemas that are nothing but a reference replaced by their targets."""
        made: dict[Node, None] = {}
        for node in conjunction:
            seen = {node}
            while SAYING & node.keywords == {"$ref"}:
                self.step(node)
                target = node.target()
                if target is None or target in seen:
                    break
                node = target
                seen.add(node)
            made[node] = None
        return tuple(made)

    def terms(self, conjunction: Conjunction) -> Sequence[Term]:
        """Terms of which one has to fit, so that no two branches of a `oneOf` do. Raises SchemaRefused."""
        return [self._told_apart(term, apart) for term, apart in self._expanded(conjunction).items()]

    def any(self, conjunction: Conjunction) -> Sequence[Term]:
        """Terms of which one has to fit; several branches of a `oneOf` may fit. Raises SchemaRefused."""
        return tuple(self._expanded(conjunction))

    def _expanded(self, conjunction: Conjunction) -> Mapping[Term, _Apart]:
        conjunction = self.straight(conjunction)
        if conjunction in self._raw:
            return self._raw[conjunction]
        found: dict[Term, _Apart] = {}
        parts = [_Part([(node, frozenset()) for node in reversed(conjunction)], {}, [], ())]
        while parts:
            part = parts.pop()
            if not self._flatten(part):
                continue
            if part.choices:
                parts.extend(reversed([*part.chosen()]))
                continue
            own = tuple(node for node in part.done if not OWN.isdisjoint(node.keywords))
            term = self._term(own, frozenset())
            if not term.empty:
                found[term] = (*found.get(term, ()), *part.apart)
            if len(found) > MOST_TERMS:
                raise SchemaRefused(
                    f"'{conjunction[0].pointer}' allows more than {MOST_TERMS} combinations of its branches"
                )
        self._raw[conjunction] = found
        return found

    def _flatten(self, part: _Part) -> bool:
        """Follows references; False: nothing fits."""
        while part.left:
            node, within = part.left.pop()
            self.step(node)
            if node in within or node.value is False:
                return False  # a schema that is made of itself and nothing else: nothing fits
            if node in part.done or node.value is True:
                continue
            part.done[node] = None
            _check_references(node)
            inside = within | {node}
            following = [*node.several("allOf")]
            if (target := node.target()) is not None:
                following.insert(0, target)
            part.left.extend((one, inside) for one in reversed(following))
            part.choices.extend((node, keyword, inside) for keyword in ("anyOf", "oneOf") if keyword in node)
        return True

    def _term(self, nodes: Conjunction, forced: frozenset[str]) -> Term:
        if (nodes, forced) not in self._same:
            self._same[nodes, forced] = Term(self, nodes, forced)
        return self._same[nodes, forced]

    def _told_apart(self, term: Term, apart: _Apart) -> Term:
        """The term, restricted so that no other branch of a `oneOf` fits it. Raises SchemaRefused."""
        for node, chosen in apart:
            tag = self._tag(node) if list(term.written) == ["object"] else None
            if tag is not None:
                term = self._term(term.nodes, term.forced | {tag})
                continue
            for index, other in enumerate(node.several("oneOf")):
                for theirs in self.any((other,)) if index != chosen else ():
                    found = told_apart(self, term, theirs)
                    if found is None:
                        raise node.unkept("oneOf", f"what fits another branch may fit '{other.pointer}' too")
                    term = self._term(term.nodes, term.forced | found)
        return term

    def _tag(self, node: Node) -> str | None:
        """The property whose values are listed and tell the branches of a `oneOf` of objects apart; None if there is
        none."""
        if node not in self._tags:
            branches = [self.any((branch,)) for branch in node.several("oneOf")]
            first = branches[0][0] if branches[0] else None
            names = list(first.names) if first is not None else []
            self._tags[node] = next((name for name in names[:_MOST_TAGS] if self._tells(name, branches)), None)
        return self._tags[node]

    def _tells(self, name: str, branches: Sequence[Sequence[Term]]) -> bool:
        taken: set[Hashable] = set()
        for terms in branches:
            own: set[Hashable] = set()
            for term in terms:
                lists = [one.literals for one in self.any(term.of_name(name))]
                if name not in term.names or list(term.written) != ["object"] or None in lists:
                    return False
                own.update(key(value) for values in lists for value in values or ())
            if own & taken:
                return False
            taken |= own
        return True

    def matches(self, tree: Tree, said: str) -> bool:
        """Whether the text belongs to the language. Raises languages.LanguageTooLarge."""
        if tree == languages.EVERYTHING:
            return True
        self.work.spend(len(said) * tree.width)
        return languages.fits(tree, said)

    def is_nothing(self, tree: Tree) -> bool:
        """Whether no text is in the language of `tree`, as far as that could be found out; False where it could not."""
        try:
            return tree is NOTHING or not (languages.plain(tree) or languages.states(tree, _MOST_STATES, self.work))
        except languages.LanguageTooLarge:
            return False

    def fits(self, node: Node, value: Any) -> bool:
        """Whether a value fits a schema in full."""
        self.step(node)
        if isinstance(node.value, bool):
            return node.value
        _check_references(node)
        target = node.target()
        return (
            (target is None or self.fits(target, value))
            and all(self.fits(one, value) for one in node.row("allOf"))
            and ("anyOf" not in node or any(self.fits(one, value) for one in node.row("anyOf")))
            and ("oneOf" not in node or sum(self.fits(one, value) for one in node.row("oneOf")) == 1)
            and self.fits_own(node, value)
        )

    def fits_own(self, node: Node, value: Any, *, literals: bool = True) -> bool:
        """Whether a value fits the schema's own keywords, without references and choices; `literals` False: also
        without its lists of values."""
        types = node.types()
        kind = type_of(value)
        if types is not None and kind not in types:
            if not (kind == "number" and "integer" in types and float(value).is_integer()):
                return False
        if literals and any(key(value) not in map(key, values) for values in node.literals()):
            return False
        if (refused := node.schema("not")) is not None and self.fits(refused, value):
            return False
        if (asked := node.schema("if")) is not None:
            then = node.schema("then" if self.fits(asked, value) else "else")
            if then is not None and not self.fits(then, value):
                return False
        if kind == "number":
            return _fits_number(node, value)
        if kind == "string":
            return self.matches(Term(self, (node,), frozenset()).strings, value)
        if kind == "array":
            return self._fits_array(node, value)
        return kind != "object" or self._fits_object(node, value)

    def _fits_array(self, node: Node, value: Sequence[Any]) -> bool:
        first, rest = places_of(node)
        least, most = node.count("minItems") or 0, node.count("maxItems")
        if len(value) < least or (most is not None and len(value) > most):
            return False
        if node.flag("uniqueItems") and len(set(map(key, value))) < len(value):
            return False
        for keyword in ("contains", "unevaluatedItems"):
            if keyword in node:
                raise node.unkept(keyword, "beside an array that is written out")
        if not all(self.fits(*pair) for pair in zip(first, value, strict=False)):
            return False
        return rest is None or all(self.fits(rest, one) for one in value[len(first) :])

    def _fits_object(self, node: Node, value: Mapping[str, Any]) -> bool:
        for keyword in ("dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties"):
            if keyword in node:
                raise node.unkept(keyword, "beside an object that is written out")
        least, most = node.count("minProperties") or 0, node.count("maxProperties")
        if len(value) < least or (most is not None and len(value) > most):
            return False
        if not set(node.names("required")) <= value.keys():
            return False
        alone = Term(self, (node,), frozenset())
        return all(
            alone.may_be_named(name) and all(self.fits(schema, one) for schema in alone.of_name(name))
            for name, one in value.items()
        )


_Apart = tuple[tuple[Node, int], ...]
"""(schema with a `oneOf`, number of the branch chosen there) of each choice: the other branches must not fit."""


@dataclass(slots=True)
class _Part:
    """A conjunction, as far as it has been followed."""

    left: list[tuple[Node, frozenset[Node]]]
    """(schema, schemas from which it was referred to) still to be followed."""
    done: dict[Node, None]
    choices: list[tuple[Node, str, frozenset[Node]]]
    apart: _Apart

    def chosen(self) -> Iterator[_Part]:
        """A copy for each branch of the first choice."""
        (node, keyword, within), *choices = self.choices
        for index, branch in enumerate(node.several(keyword)):
            apart = (*self.apart, (node, index)) if keyword == "oneOf" else self.apart
            yield _Part([(branch, within)], dict(self.done), choices.copy(), apart)


def _check_references(node: Node) -> None:
    """Raises SchemaRefused for references that are not kept."""
    for keyword in ("$dynamicRef", "$recursiveRef"):
        if keyword in node:
            raise node.unkept(keyword, "what it refers to is not known before it is used")


def _fits_number(node: Node, value: int | float) -> bool:
    for bound, up, itself in bounds_of(node):
        if not (value > bound if up else value < bound) and not (itself and value == bound):
            return False
    number = Fraction(numbers.decimal(value))
    return all((number / Fraction(one)).denominator == 1 for one in steps_of(node))
