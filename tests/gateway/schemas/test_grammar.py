"""What is refused, with the keyword and its place; what several places of a schema come to; and that it ends."""

from __future__ import annotations

import random
from typing import Any

import jsonschema
import pytest

from gateway.schemas import grammar, reader
from gateway.schemas.documents import SchemaRefused
from testing.fuzz.grammars import Words
from testing.schemas.answers import Compiled

STRINGS = {"type": "array", "items": {"type": "string"}}
UNKEPT: list[tuple[dict[str, Any], str]] = [
    ({"properties": {"a": {**STRINGS, "uniqueItems": True}}}, "'uniqueItems' at '#/properties/a'"),
    ({"items": {**STRINGS, "contains": {"const": "a"}}}, "'contains' at '#/items'"),
    ({"prefixItems": [{}], "unevaluatedItems": False}, "'unevaluatedItems' at '#'"),
    ({"if": {"type": "string"}, "then": {"minLength": 2}}, "'if' at '#'"),
    ({"not": {"minimum": 3}}, "'not' at '#'"),
    ({"type": "number", "not": {"type": "integer"}}, "'not' at '#'"),
    ({"type": "integer", "not": {"const": 3}}, "'not' at '#'"),
    ({"type": "array", "not": {"const": []}}, "'not' at '#'"),
    ({"type": "object", "not": {"enum": [1, {}]}}, "'not' at '#'"),
    ({"type": ["object", "string"], "oneOf": [{"properties": {"k": {"const": n}}} for n in "ab"]}, "'oneOf' at '#'"),
    ({"enum": [1], "allOf": [{"not": {"$dynamicRef": "#a"}}]}, "'$dynamicRef' at '#/allOf/0/not'"),
    (
        {"properties": {"a/b~": {"properties": {"c": {}}, "dependentRequired": {"c": ["d"]}}}},
        "'dependentRequired' at '#/properties/a~1b~0'",
    ),
    ({"type": "object", "dependentSchemas": {"c": {}}}, "'dependentSchemas' at '#'"),
    ({"properties": {"c": {}}, "dependencies": {"c": ["d"]}}, "'dependencies' at '#'"),
    ({"type": "object", "unevaluatedProperties": {"type": "string"}}, "'unevaluatedProperties' at '#'"),
    ({"type": "object", "minProperties": 2}, "'minProperties' at '#'"),
    ({"patternProperties": {r"\bx": {}}}, "'patternProperties' at '#'"),
    ({"patternProperties": dict.fromkeys("abcde", {})}, "'patternProperties' at '#'"),
    ({"pattern": r"^\p{L}+$"}, r"'pattern' at '#' cannot be kept: it has '\p'"),
    ({"pattern": "^(?!a)(?=.*b)(?=.*c)(?=.*d).{9,90}$"}, "'pattern' at '#'"),
    ({"type": "integer", "multipleOf": 211}, "'multipleOf' at '#'"),
    ({"type": "number", "minimum": 1e40}, "'minimum' at '#'"),
    ({"anyOf": [{"oneOf": [{"minimum": 1}, {"maximum": 9}]}]}, "'oneOf' at '#/anyOf/0'"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "what fits another branch may fit '#/oneOf/1' too"),
    ({"$ref": "https://example.org/a"}, "'$ref' at '#'"),
    ({"$ref": "#name", "$defs": {"a": {"$anchor": "name"}}}, "'$ref' at '#'"),
    ({"$dynamicRef": "#a"}, "'$dynamicRef' at '#'"),
    ({"properties": {"a": {"$id": "b", "$ref": "#/c"}}}, "'$ref' at '#/properties/a'"),
]
WRONG: list[tuple[Any, str]] = [
    (3, "'#' must be a schema"),
    ({"properties": {"a": None}}, "'#/properties/a' must be a schema"),
    ({"properties": []}, "'properties' at '#' must be an object of schemas"),
    ({"items": {"type": "strin"}}, "'type' at '#/items' must be one or more of 'null', 'boolean',"),
    ({"type": []}, "'type' at '#' must be a type"),
    ({"type": [3]}, "'array', 'object', 'integer', not 3"),
    ({"type": None}, "'array', 'object', 'integer', not null"),
    ({"type": [["string"]]}, "'array', 'object', 'integer', not an array"),
    ({"type": "string", "minLength": -1}, "'minLength' at '#' must be a whole number"),
    ({"type": "string", "maxLength": 1.5}, "'maxLength' at '#' must be a whole number"),
    ({"type": "string", "pattern": 3}, "'pattern' at '#' must be a string"),
    ({"type": "number", "minimum": "3"}, "'minimum' at '#' must be a number"),
    ({"type": "number", "multipleOf": 0}, "'multipleOf' at '#' must be a number above 0"),
    ({"required": "a"}, "'required' at '#' must be a list of strings"),
    ({"anyOf": []}, "'anyOf' at '#' must be a list of at least one schema"),
    ({"allOf": {}}, "'allOf' at '#' must be a list of schemas"),
    ({"enum": "a"}, "'enum' at '#' must be a list of values"),
    ({"items": {}, "type": "array", "uniqueItems": 1}, "'uniqueItems' at '#' must be true or false"),
    ({"$ref": 3}, "'$ref' at '#' must be a string"),
    ({"$ref": "#/nothing"}, "'$ref' at '#' must be a place in this schema"),
    ({"$ref": "#/enum/7", "enum": []}, "'$ref' at '#' must be a place in this schema"),
]
NO_ANSWER: list[Any] = [
    *(False, {"$ref": "#"}, {"enum": []}, {"not": {}}, {"enum": ["x"], "not": {"const": "x"}}),
    *({"type": "string", "minLength": 2, "maxLength": 1}, {"type": "string", "pattern": "^ab$", "minLength": 5}),
    *(
        {"type": "integer", "minimum": 1, "maximum": 2, "multipleOf": 3},
        {"type": "integer", "minimum": 0.1, "maximum": 0.9},
    ),
    {"type": "number", "exclusiveMinimum": 1, "maximum": 1},
    {"type": "array", "items": {"enum": ["x"]}, "minItems": 2, "maxItems": 2, "uniqueItems": True},
    {"properties": {"next": {"$ref": "#"}}, "required": ["next"]},
    {"allOf": [{"type": "string"}, {"type": "integer"}]},
    {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/b"}]}, "b": {"allOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"},
    {"type": "object", "required": ["a"], "properties": {"a": False}},
    {"type": "object", "required": ["a"], "propertyNames": {"pattern": "b"}},
    {"type": "object", "properties": {"a": {}}, "minProperties": 2, "additionalProperties": False},
]


@pytest.mark.parametrize(("schema", "said"), UNKEPT)
def test_grammar_unsupported_keyword_is_named_with_its_place(schema: Any, said: str) -> None:
    with pytest.raises(SchemaRefused) as refused:
        grammar.of(schema)
    assert said in str(refused.value)


@pytest.mark.parametrize(("schema", "said"), WRONG)
def test_grammar_invalid_schema_is_named_with_its_place(schema: Any, said: str) -> None:
    with pytest.raises(SchemaRefused) as refused:
        grammar.of(schema)
    assert said in str(refused.value)


@pytest.mark.parametrize("schema", NO_ANSWER)
def test_grammar_schema_without_answers_is_refused(schema: Any) -> None:
    with pytest.raises(SchemaRefused, match="it allows no answer"):
        grammar.of(schema)


def test_grammar_schema_without_answers_names_the_keywords_that_nothing_fits() -> None:
    few = {"type": "array", "items": {"type": "integer", "minimum": 3, "maximum": 1}, "minItems": 1}
    for schema, said in (
        (
            {"properties": {"a": few}, "required": ["a"]},
            "nothing fits 'type', 'minimum', 'maximum' at '#/properties/a/items'",
        ),
        ({"enum": ["x"], "not": {"const": "x"}}, "nothing fits 'enum', 'not' at '#'"),
        ({"properties": {"next": {"$ref": "#"}}, "required": ["next"]}, "what '#' refers to has no end"),
    ):
        with pytest.raises(SchemaRefused) as refused:
            grammar.of(schema)
        assert said in str(refused.value)


def O(**properties: Any) -> dict[str, Any]:  # noqa: E743
    return {"type": "object", "properties": properties, "required": list(properties)}


ONE, TWO = {"type": "integer", "minimum": 1, "maximum": 120}, {"enum": ["x", "y"]}
TAGGED = {"oneOf": [{"properties": {"kind": {"const": one}}, "type": "object"} for one in ("cat", "dog")]}
TOGETHER: list[tuple[Any, list[str], list[str]]] = [
    # (schema, answers that it allows, answers that it does not)
    ({"allOf": [O(a=ONE), O(b=TWO)]}, ['{"a": 120, "b": "x"}'], ['{"a": 1}', '{"b": "x"}', '{"a": 121, "b": "x"}']),
    ({"allOf": [O(a=ONE), O(a={"multipleOf": 50})]}, ['{"a": 50}', '{"a": 100}'], ['{"a": 1}', '{"a": 150}']),
    ({"allOf": [{"type": "string", "pattern": "^a"}, {"maxLength": 2}]}, ['"ab"', '"a"'], ['"abc"', '"b"']),
    ({"$defs": {"a": O(a=ONE)}, "$ref": "#/$defs/a", "properties": {"b": TWO}}, ['{"a": 2}'], ['{"b": "x"}']),
    ({"anyOf": [O(a=ONE), O(b=TWO)], "properties": {"c": {}}}, ['{"c": 1, "b": "x"}', '{"a": 2}'], ['{"c": 1}']),
    (TAGGED, ['{"kind": "cat"}', '{"kind": "dog"}'], ["{}", '{"kind": "cow"}']),
    ({"oneOf": [O(a=ONE), O(b=TWO)]}, ['{"a": 1}', '{"b": "y"}'], ['{"a": 1, "b": "y"}', "{}"]),
    ({"oneOf": [{"type": "integer", "maximum": 4}, {"type": "number", "minimum": 4.5}]}, ["4", "4.5", "9"], ["4.2"]),
    ({"oneOf": [{"pattern": "^a"}, {"pattern": "^b"}], "type": "string"}, ['"ab"', '"b"'], ['"c"', "1"]),
    ({**O(a={}), "not": {"required": ["b"]}, "additionalProperties": True}, ['{"a": 1, "c": 2}'], ['{"a": 1, "b": 2}']),
    ({"not": {"type": ["object", "array", "number"]}}, ['"a"', "null", "true"], ["1", "[]", "{}"]),
    ({"type": "string", "not": {"enum": ["a", 3]}}, ['"b"', '"aa"', '""'], ['"a"', "3"]),
    ({"minimum": 0, "exclusiveMinimum": True, "type": "integer"}, ["1"], ["0"]),
    ({"items": [{"type": "null"}], "additionalItems": {"type": "integer"}}, ["[null]", "[null, 1]"], ["[1]", "[]"]),
    ({"minimum": 3}, ["3"], ["2", '"a"']),
    ({"type": ["integer", "null"], "minimum": 3}, ["3", "null"], ["2"]),
    ({"type": "object", "required": ["a"]}, ['{"a": 1}', '{"a": 1, "b": 2}'], ["{}", '{"b": 2}']),
    ({**O(a=ONE), "additionalProperties": TWO}, ['{"a": 1, "b": "x"}'], ['{"a": 1, "a": "x"}', '{"a": 1, "b": 2}']),
    (
        {"patternProperties": {"^x": ONE, "y$": TWO}},
        ['{"xa": 1, "ay": "x"}', "{}"],
        ['{"xa": "x"}', '{"xy": 1}', '{"b": 1}'],
    ),
    (
        {"propertyNames": {"enum": ["a", "b"]}, "additionalProperties": ONE},
        ['{"a": 1}', "{}"],
        ['{"c": 1}', '{"a": "x"}'],
    ),
    ({"properties": {"a": {}, "b": {}, "c": {}}, "minProperties": 2}, ['{"a": 1, "c": 1}'], ['{"a": 1}', "{}"]),
    ({"properties": {"a": {}, "b": {}}, "maxProperties": 1}, ['{"b": 1}', "{}"], ['{"a": 1, "b": 1}']),
    (
        {"properties": {"a": {}}, "additionalProperties": True, "minProperties": 2},
        ['{"a": 1, "b": 1}'],
        ['{"b": 1, "b": 2}', '{"a": 1}'],
    ),
    ({"type": "object", "minProperties": 1, "maxProperties": 2}, ['{"a": 1}', '{"a": 1, "b": 1}'], ["{}"]),
    ({"items": TWO, "uniqueItems": True, "minItems": 1}, ['["x", "y"]', '["y"]'], ['["x", "x"]', "[]", '["y", "x"]']),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ['"ab"', '"\\n\\"é"'], ['"a"', '"abcd"', '"\\u0041b"']),
    ({"type": "string", "maxLength": 300}, ['"%s"' % ("a" * 300), '""'], ['"%s"' % ("a" * 301)]),
    (
        {"type": "string", "minLength": 150, "maxLength": 900},
        ['"%s"' % ("a" * 150)],
        ['"%s"' % ("a" * 149), '"%s"' % ("a" * 901)],
    ),
    ({"type": "string", "pattern": "^.*$"}, ['"a\\"b"', '""'], ['"a"b"', '"a\\nb"', '"\n"']),
    ({"type": "string", "pattern": "^[A-Z]"}, ['"Abc"'], ['"abc"', '""']),
    ({"type": "string", "format": "date", "maxLength": 9}, ['"abc"'], ['"2024-02-29"']),
    ({"type": "string", "format": "color", "title": "T", "x-a": {"minimum": "no"}}, ['"abc"'], ["1"]),
    (O(**{'a"\\\n': ONE, "\ud800": TWO}), ['{"a\\"\\\\\\n": 7, "\\ud800": "x"}'], ['{"a": 7}']),
    ({"const": {"a": [1, 2.5, None, "é\n"]}}, ['{"a": [1, 2.5, null, "é\\n"]}'], ["{}"]),
    (
        {"enum": [1, 1.0, True, "1", 2], "type": ["integer", "boolean"], "maximum": 1},
        ["1", "true"],
        ['"1"', "2", "false"],
    ),
    ({"$id": "http://x/y", "$defs": {"a": ONE}, "$ref": "http://x/y#/$defs/a"}, ["5"], ["0"]),
    ({"$defs": {"a b": {"%": ONE}}, "$ref": "#/$defs/a%20b/%25"}, ["5"], ["0"]),
    ({"properties": {"a": {"not": {}}, "b": ONE}}, ['{"b": 1}', "{}"], ['{"a": 1}']),
    ({"anyOf": [{"$ref": "#"}, {"type": "null"}]}, ["null"], ["1"]),
    ({**O(a=ONE), "unevaluatedProperties": False}, ['{"a": 1}'], ['{"a": 1, "b": 2}']),
    ({"prefixItems": [ONE, TWO, False]}, ['[1, "x"]'], ["[1]", '[1, "x", 2]']),
    ({"prefixItems": [ONE], "minItems": 2}, ["[1, 2]"], ["[1]"]),
]


@pytest.mark.sglang
@pytest.mark.parametrize(("schema", "fit", "unfit"), TOGETHER)
def test_grammar_allows_fitting_answers_and_no_others(schema: Any, fit: list[str], unfit: list[str]) -> None:
    made = Compiled(grammar.of(schema))
    assert [answer for answer in fit if not made.takes(answer)] == []
    assert [answer for answer in unfit if made.takes(answer)] == []


def chain(count: int, last: Any, link: str) -> dict[str, Any]:
    made = {f"d{n}": {link: [{"$ref": f"#/$defs/d{n + 1}"}]} for n in range(count)}
    return {"$defs": {**made, f"d{count}": last}, "$ref": "#/$defs/d0"}


def test_grammar_of_nested_or_circular_references_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    for link in ("allOf", "anyOf"):
        assert "integer" in grammar.of(chain(1000, {"type": "integer"}, link))
        with pytest.raises(SchemaRefused, match="it allows no answer"):
            grammar.of(chain(1000, {"$ref": "#/$defs/d7"}, link))
    assert grammar.of(chain(400, {"type": "integer"}, "prefixItems"))
    monkeypatch.setattr(reader, "MOST_STEPS", 1000)
    both = {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}, {"$ref": f"#/$defs/d{n + 2}"}]} for n in range(90)}
    with pytest.raises(SchemaRefused, match="too many ways"):
        grammar.of({"$defs": {**both, "d90": {}, "d91": {"type": "null"}}, "$ref": "#/$defs/d0"})


def test_grammar_schema_that_is_too_large_is_refused() -> None:
    choices = {"allOf": [{"anyOf": [{"properties": {f"{a}{n}": {}}} for a in "ab"]} for n in range(30)]}
    slow = {"properties": {f"p{n}": {"pattern": f"^(?=.*{n})a.{{8,64}}$"} for n in range(100)}}
    many = {"properties": {f"p{n}": {} for n in range(600)}, "minProperties": 500}
    told = {"enum": ["a" * 70_000], "pattern": "^a*b?"}
    wide = {"enum": ["ab" * 200_000]}
    deep: Any = {}
    for _ in range(grammar.MOST_LEVELS):
        deep = {"items": deep}
    for schema, said in (
        (choices, "combinations"),
        (slow, "'pattern' at '#/properties/p"),
        (many, "rules"),
        (wide, "characters"),
        (deep, "levels"),
        (told, "its bounds on numbers and strings need too large a grammar"),
    ):
        with pytest.raises(SchemaRefused) as refused:
            grammar.of(schema)
        assert said in str(refused.value) and len(str(refused.value)) < 600


def test_grammar_of_a_thousand_optional_properties_has_two_rules_each() -> None:
    schema = {"type": "object", "properties": {f"p{n}": {"type": "string", "maxLength": 40} for n in range(1000)}}
    text = grammar.of(schema)
    assert text.count("\n") < 2100 and len(text) < 150_000


def test_grammar_of_random_schemas_is_made_or_refused() -> None:
    words, kept = Words(random.Random(5)), 0
    for _ in range(3000):
        schema = words._schema(4)
        try:
            grammar.of(schema)
            kept += 1
        except SchemaRefused as refused:
            str(refused).encode()
    assert 300 < kept < 2700


def test_invalid_schemas_are_refused_by_the_metaschema_too() -> None:
    for schema, _ in WRONG:
        if isinstance(schema, dict) and "$ref" not in schema:
            with pytest.raises(jsonschema.SchemaError):
                jsonschema.Draft202012Validator.check_schema(schema)
