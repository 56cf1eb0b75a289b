"""Term: schemas that describe one value with no choices left, and what they say of it together: its types, its range,
its language, its items, its members."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from typing import Any, Protocol

from gateway.schemas import formats, languages, numbers, patterns
from gateway.schemas.documents import TYPES, Node, SchemaRefused, key
from gateway.schemas.languages import NOTHING, Tree
from gateway.schemas.numbers import NumberRange

NUMBER = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
STRING = ("minLength", "maxLength", "pattern", "format")
ARRAY = ("items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems", "contains")
OBJECT = (
    *("properties", "patternProperties", "additionalProperties", "propertyNames", "required", "minProperties"),
    *("maxProperties", "dependentRequired", "dependentSchemas", "dependencies"),
)
KEYWORDS: Mapping[str, Sequence[str]] = {"number": NUMBER, "string": STRING, "array": ARRAY, "object": OBJECT}
"""Type -> keywords that restrict it."""
OWN = frozenset(
    (*NUMBER, *STRING, *ARRAY, *OBJECT, "type", "enum", "const", "not", "if", "unevaluatedItems")
    + ("unevaluatedProperties",)
)
"""Keywords that restrict a value without a choice."""
FURTHER = frozenset(("$ref", "$dynamicRef", "$recursiveRef", "allOf", "anyOf", "oneOf"))
SAYING = OWN | FURTHER
"""All keywords that restrict a value."""
Conjunction = tuple[Node, ...]
"""Schemas that describe the same value."""


@dataclass(frozen=True, eq=False, slots=True)
class Free:
    """Properties that are not named one by one: the language of their names, and the schemas of their values."""

    names: Tree
    value: Conjunction


@dataclass(frozen=True, eq=False, slots=True)
class ObjectMembers:
    """The properties that an object has."""

    named: Mapping[str, Conjunction]
    """Named properties in their order."""
    always: frozenset[str]
    free: Sequence[Free]
    least: int
    most: int | None


@dataclass(frozen=True, eq=False, slots=True)
class Items:
    """The items that an array has."""

    first: Sequence[Conjunction]
    rest: Conjunction | None
    """Schemas of the items after `first`; None: there are none."""
    least: int
    most: int | None
    unique: Node | None
    """The schema that forbids equal items."""


class SchemaReader(Protocol):
    """The reader of schemas, as far as terms and their comparison use it. Its methods raise SchemaRefused."""

    def step(self, node: Node) -> None:
        """Counts a step."""
        ...

    def any(self, conjunction: Conjunction) -> Sequence[Term]:
        """Terms of which one has to fit; several branches of a `oneOf` may fit."""
        ...

    def terms(self, conjunction: Conjunction) -> Sequence[Term]:
        """Terms of which one has to fit, so that no two branches of a `oneOf` do."""
        ...

    def fits(self, node: Node, value: Any) -> bool:
        """Whether a value fits a schema in full."""
        ...

    def fits_own(self, node: Node, value: Any, *, literals: bool = True) -> bool:
        """Whether a value fits the schema's own keywords; `literals` False: also without its lists of values."""
        ...

    def matches(self, tree: Tree, said: str) -> bool:
        """Whether the text belongs to the language."""
        ...

    def is_nothing(self, tree: Tree) -> bool:
        """Whether no text is in the language of `tree`, as far as that could be found out; False where it could not."""
        ...


class Term:
    """Schemas that describe one value, with no choices left."""

    def __init__(self, reader: SchemaReader, nodes: Conjunction, forced: frozenset[str]) -> None:
        """`forced`: properties that have to be written, since the value might fit another branch without them."""
        self._reader = reader
        self.nodes = nodes
        self.forced = forced

    def _with(self, *keywords: str) -> list[tuple[Node, str]]:
        """(schema, keyword) of each place where one of the keywords is used."""
        return [(node, keyword) for node in self.nodes for keyword in keywords if keyword in node]

    @cached_property
    def _stated(self) -> tuple[frozenset[str], bool, bool]:
        """(types that the term allows, whether numbers have to be whole, whether the schemas name types themselves)."""
        types, whole, said = set(TYPES), False, False
        for node in self.nodes:
            named = node.types()
            if named is not None:
                said = True
                whole |= "integer" in named and "number" not in named
                types &= {"number" if one == "integer" else one for one in named}
            types -= _refusal(node).types
        return frozenset(types), whole, said

    @property
    def types(self) -> frozenset[str]:
        return self._stated[0]

    @property
    def whole(self) -> bool:
        return self._stated[1]

    @cached_property
    def written(self) -> Sequence[str]:
        """Types that answers have. If no type is named, those whose keywords are used."""
        types, _, said = self._stated
        if not said:
            meant = {kind for kind, keywords in KEYWORDS.items() if self._with(*keywords)}
            types = types & meant or types
        return [kind for kind in TYPES if kind in types]

    @property
    def constrained(self) -> bool:
        """Whether anything but the type is restricted."""
        return bool(self.forced) or any(one != "type" and one in OWN for node in self.nodes for one in node.keywords)

    @cached_property
    def empty(self) -> bool:
        """Whether it is easy to see that nothing fits."""
        return not self.types or self.literals == []

    @cached_property
    def literals(self) -> Sequence[Any] | None:
        """The only values that fit, if they are listed; None if they are not."""
        lists = [(node, values) for node in self.nodes for values in node.literals()]
        if not lists:
            return None
        shortest = min((values for _, values in lists), key=len)
        found = {key(value): value for value in reversed(shortest)}
        for _, values in lists:
            if values is not shortest:
                there = set(map(key, values))
                found = {name: value for name, value in found.items() if name in there}
        return [value for value in reversed(found.values()) if self._allows_literal(value)]

    def _allows_literal(self, value: Any) -> bool:
        return all(self._reader.fits_own(node, value, literals=False) for node in self.nodes)

    def allows(self, value: Any) -> bool:
        return all(self._reader.fits_own(node, value) for node in self.nodes)

    @property
    def unlike(self) -> Sequence[Any]:
        """Values that `not` excludes."""
        return [value for node in self.nodes for value in _refusal(node).values]

    def check(self) -> None:
        """Raises SchemaRefused for keywords of all types that are not kept."""
        for node, keyword in self._with("if"):
            if "then" in node or "else" in node:
                raise node.unkept(keyword, "no grammar depends on a condition")
        for node, keyword in self._with("not"):
            if not _refusal(node).whole:
                raise node.unkept(keyword, "only a type, values or one required property can be taken away")

    def unkept(self, keywords: Sequence[str], why: str) -> SchemaRefused:
        """The error for one of these keywords, which is not kept."""
        node, keyword = self._with(*keywords)[-1]
        return node.unkept(keyword, why)

    # Numbers.

    @cached_property
    def range(self) -> NumberRange:
        within = NumberRange()
        for bound, up, itself in (one for node in self.nodes for one in bounds_of(node)):
            end = numbers.decimal(bound) if itself else numbers.beyond(bound, up)
            within = within.and_(NumberRange(end) if up else NumberRange(None, end))
        return within.whole if self.whole else within

    @cached_property
    def multiples(self) -> Sequence[Decimal]:
        return [one for node in self.nodes for one in steps_of(node)]

    @property
    def numbers(self) -> Tree | None:
        """The language of numbers; None: any number fits. Raises SchemaRefused."""
        if self.range == NumberRange() and not self.multiples:
            return None
        try:
            made = numbers.integers if self.whole else numbers.decimals
            return made(self.range, self.multiples)
        except numbers.TooFar:
            raise self.unkept(NUMBER, "there are too many digits to tell apart") from None

    # Strings.

    @cached_property
    def lengths(self) -> tuple[int, int | None]:
        """The fewest and the most characters of strings; None: any number."""
        least = max((node.count("minLength") or 0 for node in self.nodes), default=0)
        most = min((node.count("maxLength") or 0 for node in self.nodes if "maxLength" in node), default=None)
        return least, most

    @cached_property
    def strings(self) -> Tree:
        """The language of strings. Raises SchemaRefused."""
        trees = []
        for node in self.nodes:
            if (pattern := node.string("pattern")) is not None:
                try:
                    trees.append(patterns.found_in(pattern))
                except patterns.UnknownPattern as error:
                    raise node.unkept("pattern", f"it has {error}") from None
        least, most = self.lengths
        tree = languages.both(trees)
        return languages.between(tree, least, most) if least or most is not None else tree

    @property
    def formatted(self) -> Tree | None:
        """The language of strings in the known formats; None if there are none, or a pattern describes the strings."""
        least, most = self.lengths
        known = [formats.pattern(node.string("format") or "", most) for node, _ in self._with("format")]
        if not any(known) or self._with("pattern"):
            return None
        tree = languages.both(patterns.found_in(one) for one in dict.fromkeys(known) if one)
        return languages.between(tree, least, most) if least or most is not None else tree

    # Arrays.

    @cached_property
    def items(self) -> Items:
        """The items of an array. Raises SchemaRefused."""
        for node, keyword in self._with("contains", "unevaluatedItems"):
            if keyword == "contains" and node.count("minContains") == 0 and "maxContains" not in node:
                continue
            if keyword == "unevaluatedItems" and node.get(keyword) in (True, {}):
                continue
            raise node.unkept(keyword, "a grammar does not count what fits it")
        places = [places_of(node) for node in self.nodes]
        longest = max((len(first) for first, _ in places), default=0)
        first = [
            tuple(one for row, rest in places if (one := row[index] if index < len(row) else rest) is not None)
            for index in range(longest)
        ]
        tails = [rest for _, rest in places if rest is not None]
        least = max((node.count("minItems") or 0 for node in self.nodes), default=0)
        most = min((node.count("maxItems") or 0 for node in self.nodes if "maxItems" in node), default=None)
        rest: Conjunction | None = tuple(tails)
        if not tails and first and least <= len(first):
            rest = None
        if rest is not None and not self._reader.any(rest):
            rest = None
        for index, place in enumerate(first):
            if not self._reader.any(place):
                most = index if most is None else min(most, index)
                break
        unique = next((node for node in self.nodes if node.flag("uniqueItems")), None)
        return Items(first, rest, least, most, unique)

    # Objects.

    @cached_property
    def names(self) -> Mapping[str, None]:
        """Names of the properties that the term mentions, in their order."""
        names: dict[str, None] = {}
        for node in self.nodes:
            names.update(dict.fromkeys(node.named("properties")))
        for node in self.nodes:
            names.update(dict.fromkeys(node.names("required")))
        return names

    def of_name(self, name: str) -> Conjunction:
        """The schemas of a property of that name."""
        found: list[Node] = []
        for node in self.nodes:
            own = node.named("properties").get(name)
            theirs = [] if own is None else [own]
            for pattern, schema in node.named("patternProperties").items():
                if self._reader.matches(_named(node, pattern), name):
                    theirs.append(schema)
            other = node.schema("additionalProperties")
            if not theirs and other is not None:
                theirs.append(other)
            found.extend(theirs)
        return tuple(dict.fromkeys(found))

    def may_be_named(self, name: str) -> bool:
        return all(
            self._reader.fits(schema, name)
            for node in self.nodes
            if (schema := node.schema("propertyNames")) is not None
        )

    @property
    def banned(self) -> frozenset[str]:
        """Names that `not` excludes."""
        return frozenset(name for node in self.nodes for name in _refusal(node).names)

    @cached_property
    def members(self) -> ObjectMembers | None:
        """The properties of an object; None: nothing fits. Raises SchemaRefused."""
        named, always = {}, set()
        required = {name for node in self.nodes for name in node.names("required")} | self.forced
        for name in self.names:
            value = self.of_name(name)
            if name not in self.banned and self.may_be_named(name) and self._reader.any(value):
                named[name] = value
                if name in required:
                    always.add(name)
            elif name in required:
                return None
        free = self._free()
        self._check_dependent(named, always, free)
        least = max((node.count("minProperties") or 0 for node in self.nodes), default=0)
        most = min((node.count("maxProperties") or 0 for node in self.nodes if "maxProperties" in node), default=None)
        if free and least > len(named) + 1:
            node, keyword = self._with("minProperties")[0]
            raise node.unkept(keyword, "nothing keeps names that a schema does not list from being the same")
        return ObjectMembers(named, frozenset(always), free, least, most)

    def _check_dependent(self, named: Mapping[str, Any], always: set[str], free: Sequence[Free]) -> None:
        for node, keyword in self._with("dependentRequired", "dependentSchemas", "dependencies"):
            value = node.get(keyword)
            if not isinstance(value, dict):
                raise node.wrong(keyword, "an object")
            for name, then in value.items():
                if not free and name not in named:
                    continue  # the property is never there
                if isinstance(then, list) and set(then) <= always:
                    continue
                raise node.unkept(keyword, f"no grammar depends on whether '{name}' is there")
        for node, keyword in self._with("unevaluatedProperties"):
            if node.get(keyword) in (True, {}) or "additionalProperties" in node:
                continue
            if node.get(keyword) is False and not free and named.keys() <= node.named("properties").keys():
                continue
            raise node.unkept(keyword, "only false is, where nothing beside it lists other properties")

    def _free(self) -> Sequence[Free]:
        """Properties that are not named one by one: those of patterns; and any others if no properties are named, or
        others are explicitly allowed."""
        listed = list(dict.fromkeys(name for node in self.nodes for name in node.named("patternProperties")))
        if len(listed) > 4:
            node = self._with("patternProperties")[0][0]
            raise node.unkept("patternProperties", "there are more than 4 of them")
        said = self._with("additionalProperties")
        open_ = bool(said) or not self._with("properties", "patternProperties")
        found = []
        taken = [*self.names, *self.banned]
        for number in range(1 << len(listed)):
            matched = frozenset(name for bit, name in enumerate(listed) if number >> bit & 1)
            if not matched and not open_:
                continue
            value = self._of_free(matched)
            if not self._reader.any(value):
                continue
            names = self._names(matched, listed, taken)
            if names is not NOTHING:
                found.append(Free(names, value))
        return found

    def _of_free(self, matched: frozenset[str]) -> Conjunction:
        found: list[Node] = []
        for node in self.nodes:
            theirs = [schema for name, schema in node.named("patternProperties").items() if name in matched]
            other = node.schema("additionalProperties")
            found.extend(theirs or ([] if other is None else [other]))
        return tuple(dict.fromkeys(found))

    def _names(self, matched: frozenset[str], listed: Sequence[str], taken: Sequence[str]) -> Tree:
        node = self.nodes[0] if self.nodes else None
        trees = []
        for pattern in listed:
            assert node is not None
            tree = _named(node, pattern)
            trees.append(tree if pattern in matched else languages.but(tree))
        schemas = tuple(schema for one in self.nodes if (schema := one.schema("propertyNames")) is not None)
        if schemas:
            trees.append(languages.choice(self._name_of(term) for term in self._reader.terms(schemas)))
        if taken:
            trees.append(_others(taken))
        return languages.both(trees)

    def _name_of(self, term: Term) -> Tree:
        term.check()
        if term.literals is not None:
            return languages.choice(languages.text(one) for one in term.literals if isinstance(one, str))
        if "string" not in term.types:
            return NOTHING
        tree = term.formatted or term.strings
        unlike = [languages.but(languages.text(one)) for one in term.unlike if isinstance(one, str)]
        return languages.both((tree, *unlike))


def bounds_of(node: Node) -> Iterator[tuple[int | float, bool, bool]]:
    """(bound, whether numbers are above it, whether the bound itself belongs to the range) of each bound."""
    for keyword, beside, up in (("minimum", "exclusiveMinimum", True), ("maximum", "exclusiveMaximum", False)):
        bound, open_end = node.number(keyword), node.get(beside)
        if bound is not None:
            yield bound, up, open_end is not True  # the form of drafts before 6
        if not isinstance(open_end, bool) and (bound := node.number(beside)) is not None:
            yield bound, up, False


def steps_of(node: Node) -> Sequence[Decimal]:
    value = node.number("multipleOf")
    if value is not None and value <= 0:
        raise node.wrong("multipleOf", "a number above 0")
    return [] if value is None else [numbers.decimal(value)]


@dataclass(frozen=True, slots=True)
class _Refusal:
    """What a `not` excludes."""

    types: frozenset[str] = frozenset()
    values: Sequence[Any] = ()
    names: Sequence[str] = ()
    whole: bool = True
    """Whether that is all that the `not` excludes."""


def _refusal(node: Node) -> _Refusal:
    refused = node.schema("not")
    if refused is None or refused.value is False:
        return _Refusal()
    said = {one for one in refused.keywords if one in SAYING}
    if not said:
        return _Refusal(frozenset(TYPES))
    if said == {"type"}:
        types = frozenset(refused.types() or ())
        return _Refusal(types - {"integer"}, whole="integer" not in types or "number" in types)
    if said in ({"enum"}, {"const"}):
        return _Refusal(values=refused.literals()[0])
    names = refused.names("required")
    if said in ({"required"}, {"required", "type"}) and len(names) == 1:
        if "type" not in said:
            return _Refusal(frozenset(TYPES) - {"object"}, names=names)
        if refused.types() == ["object"]:
            return _Refusal(names=names)
    return _Refusal(whole=False)


def places_of(node: Node) -> tuple[Sequence[Node], Node | None]:
    """(schemas of the first items, schema of the items after them)."""
    if isinstance(node.get("items"), list):  # the form of drafts before 2020
        return node.row("items"), node.schema("additionalItems")
    return node.row("prefixItems"), node.schema("items")


def _named(node: Node, pattern: str) -> Tree:
    try:
        return patterns.found_in(pattern)
    except patterns.UnknownPattern as error:
        raise node.unkept("patternProperties", f"'{pattern}' has {error}") from None


_MOST_KEYS, _DEEPEST_KEY = 400, 60


def _others(taken: Sequence[str]) -> Tree:
    """Names that are not in `taken`. If there are many, only names that differ from each of them early."""
    deepest = min(_DEEPEST_KEY, max(map(len, taken)))
    while deepest > 1 and len({name[:length] for name in taken for length in range(deepest + 1)}) > _MOST_KEYS:
        deepest -= 1

    def beside(start: str, names: Sequence[str]) -> Tree:
        depth = len(start)
        heads: dict[str, list[str]] = {}
        for name in names:
            if len(name) > depth:
                heads.setdefault(name[depth], []).append(name)
        parts = [
            languages.row(
                (languages.chars(languages.without(languages.ALL, languages.of("".join(heads)))), languages.EVERYTHING)
            )
        ]
        if start not in names:
            parts.append(languages.EMPTY)
        if depth < deepest:
            parts.extend(
                languages.row((languages.text(head), beside(start + head, some))) for head, some in heads.items()
            )
        return languages.choice(parts)

    return beside("", list(taken))
