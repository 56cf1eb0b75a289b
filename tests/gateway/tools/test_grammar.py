"""Calls, and reasoning before what a grammar allows, as xgrammar lets a model write them."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import pytest

from gateway.tools import grammar, structural_tags, structured_outputs
from gateway.tools.formats import ENFORCED, FORMATS, Format
from gateway.tools.request import Tool, Tools
from gpu_scheduler.policy import permitted_grammars
from protos import common_pb2
from testing.schemas.answers import Compiled

pytestmark = pytest.mark.sglang
NODE = {
    "type": "object",
    "properties": {"next": {"$ref": "#"}, "value": {"$ref": "#/$defs/value"}},
    "required": ["value"],
    "additionalProperties": False,
    "$defs": {"value": {"type": "integer", "minimum": 1, "maximum": 120}},
}
FORMS = {**{name: FORMATS[name] for name in ("hermes", "llama3", "mistral")}, "enforced": ENFORCED}
SAID = {
    "enforced": '[{"name": "node", "parameters": %s}, {"name": "now", "parameters": {}}]',
    "hermes": '<tool_call>\n{"name": "node", "arguments": %s}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "llama3": '{"name": "node", "parameters": %s}; {"name": "now", "parameters": {}}',
    "mistral": '[TOOL_CALLS][{"name": "node", "arguments": %s}, {"name": "now", "arguments": {}}]',
}


CALL = r'\{"name": .*?\}(?=\n</tool_call>|; \{"name|, \{"name|\]$|$)'


def tool(name: str, parameters: dict[str, Any] | None = None, **more: Any) -> Tool:
    return Tool.model_validate({"type": "function", "function": {"name": name, "parameters": parameters, **more}})


BOTH = [tool("node", NODE), tool("now")]


def takes(tools: Tools, form: Format, answer: str) -> bool:
    return Compiled(grammar.of(tools, form)).takes(answer)


@pytest.mark.parametrize("name", FORMS)
def test_tool_grammar_of_each_family_allows_calls_with_fitting_parameters_only(name: str) -> None:
    form, tools = FORMS[name], Tools(BOTH, must=name == "enforced")
    node = {"next": {"value": 120}, "value": 1}
    said = SAID[name] % json.dumps(node)
    assert takes(tools, form, said)
    for wrong in ('{"value": 121}', '{"value": "1"}', "{}", "1", '{"next": {"value": 0}, "value": 1}'):
        assert not takes(tools, form, SAID[name] % wrong)
    assert not takes(tools, form, SAID[name].replace("node", "other") % '{"value": 1}')
    assert not takes(tools, form, "")


def test_tool_grammar_named_or_single_call_is_made_exactly_once() -> None:
    now, node = '{"name": "now", "parameters": {}}', '{"name": "node", "parameters": {"value": 1}}'
    named = Tools(BOTH, must=True, name="now")
    assert takes(named, ENFORCED, f"[{now}]")
    assert not takes(named, ENFORCED, f"[{node}]") and not takes(named, ENFORCED, f"[{now}, {now}]")
    single = Tools(BOTH, must=True, parallel=False)
    assert takes(single, ENFORCED, f"[{now}]") and takes(single, ENFORCED, f"[{node}]")
    assert not takes(single, ENFORCED, f"[{now}, {node}]")


@pytest.mark.parametrize("name", ["hermes", "llama3", "mistral"])
def test_tool_grammar_beside_a_schema_allows_calls_or_a_fitting_answer(name: str) -> None:
    form = FORMATS[name]
    answer = {"type": "object", "properties": {"city": {"enum": ["Bern", "Chur"]}}, "required": ["city"]}
    tools = Tools(BOTH, must=False, answer=json.dumps(answer))
    assert takes(tools, form, '{"city": "Chur"}') and takes(tools, form, SAID[name] % '{"value": 7}')
    assert not takes(tools, form, '{"city": "Rome"}') and not takes(tools, form, "Chur")
    assert not takes(tools, form, SAID[name] % '{"value": 7}' + '{"city": "Chur"}')
    calls = 0
    for said in Compiled(grammar.of(tools, form)).answers(random.Random(0), 40):
        called = [json.loads(call) for call in re.findall(CALL, said)]
        calls += len(called)
        if not called:
            jsonschema.validate(json.loads(said), answer)
        for call in called:
            arguments = call[form.arguments]
            jsonschema.validate(arguments, NODE if call["name"] == "node" else {"type": "object"})
    assert calls


@pytest.mark.parametrize("name", ["hermes", "mistral"])
def test_strict_calls_fit_their_parameters_in_an_answer_that_is_free_otherwise(name: str) -> None:
    form, both = FORMATS[name], [tool("node", NODE, strict=True), tool("now", NODE)]
    said = SAID[name] % '{"value": 120}'

    def takes(answer: str, *, parallel: bool = True) -> bool:
        tools = Tools(both, must=False, parallel=parallel)
        return Compiled(grammar.of_strict_calls(tools, form), "structural_tag").takes(answer)

    for answer in ("", "It is {1}.", said, f"Let me see. {said} So."):
        assert takes(answer), answer
    for wrong in ('{"value": 121}', '{"value": "1"}', "{}"):
        assert not takes(SAID[name] % wrong)
    assert not takes(said.replace("node", "other"))
    one = said[: said.index("</tool_call>") + 12] if name == "hermes" else said[: said.index(", {")] + "]"
    assert takes(f"See: {one}", parallel=False) and not takes(said, parallel=False)


REASONED = [
    # (text before, whether the answer begins within the reasoning, whether the rest may follow)
    ("", False, True),
    ('<think>is 121 {"value": 7}</think>', False, True),
    ("<think>is", False, False),
    ("hm ", False, False),
    ("is it?</think>", True, True),
    ("", True, False),
]


@pytest.mark.parametrize(("before", "begun", "fits"), REASONED)
def test_grammar_applies_after_the_reasoning(before: str, begun: bool, fits: bool) -> None:
    strict = grammar.of_strict_calls(Tools([tool("node", NODE, strict=True)], must=False), FORMATS["hermes"])
    call = '<tool_call>\n{"name": "node", "arguments": {"value": %d}}\n</tool_call>'
    number = {"ebnf": structured_outputs.of_schema('{"type": "integer", "minimum": 1, "maximum": 120}', "x")}
    for kind, right, wrong in (
        (number, "120", "121"),
        ({"regex": "[ab]{2}"}, "ab", "abc"),
        ({"structural_tag": strict}, call % 120, call % 121),
    ):
        sampling = common_pb2.Sampling(**kind)  # type: ignore[arg-type]
        structural_tags.after_reasoning(sampling, "<think>", "</think>", begun=begun)
        assert permitted_grammars.problem("structural_tag", sampling.structural_tag) == ""
        compiled = Compiled(sampling.structural_tag, "structural_tag")
        free = kind.keys() == {"structural_tag"} and not begun  # what is no call may be anything
        assert compiled.takes(before + right) == (fits or free), right
        assert not compiled.takes(before + wrong), wrong


def test_xgrammars_own_schemas_allow_what_ours_do_not() -> None:
    """Why gateways compile schemas themselves: what fails here may be left to xgrammar."""
    schema = {"type": "string", "pattern": "^a+$", "minLength": 3}
    format = {"type": "json_schema", "json_schema": schema}
    assert Compiled(json.dumps({"type": "structural_tag", "format": format}), "structural_tag").takes('"aa"')
    assert not Compiled(structured_outputs.of_schema(json.dumps(schema), "x"), "ebnf").takes('"aa"')
