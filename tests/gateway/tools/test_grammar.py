"""Calls as xgrammar lets a model write them, and as they are found in what it wrote."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest

from gateway.tools import grammar
from gateway.tools.formats import ENFORCED, FORMATS, CallFinder, Format
from gateway.tools.request import Tool, Tools
from testing.schemas.answers import Compiled

pytestmark = pytest.mark.sglang
NODE = {
    "type": "object",
    "properties": {"next": {"$ref": "#"}, "value": {"$ref": "#/$defs/value"}},
    "required": ["value"],
    "additionalProperties": False,
    "$defs": {"value": {"type": "integer", "minimum": 1, "maximum": 120}},
}
FORMS = {**FORMATS, "enforced": ENFORCED}
SAID = {
    "enforced": '[{"name": "node", "parameters": %s}, {"name": "now", "parameters": {}}]',
    "hermes": '<tool_call>\n{"name": "node", "arguments": %s}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "llama3": '{"name": "node", "parameters": %s}; {"name": "now", "parameters": {}}',
    "mistral": '[TOOL_CALLS][{"name": "node", "arguments": %s}, {"name": "now", "arguments": {}}]',
}


def tool(name: str, parameters: dict[str, Any] | None = None) -> Tool:
    return Tool.model_validate({"type": "function", "function": {"name": name, "parameters": parameters}})


BOTH = [tool("node", NODE), tool("now")]


def takes(tools: Tools, form: Format, answer: str) -> bool:
    return Compiled(grammar.of(tools, form)).takes(answer)


def found(form: Format, answer: str) -> tuple[str, list[tuple[str, Any]]]:
    """(the text, the calls) of it."""
    finder = CallFinder(form, frozenset({"node", "now"}))
    text, calls = finder.push(answer)
    return text + finder.finish(), [(call.name, json.loads(call.arguments)) for call in calls]


@pytest.mark.parametrize("name", FORMS)
def test_tool_grammar_of_each_family_allows_calls_with_fitting_parameters_only(name: str) -> None:
    form, tools = FORMS[name], Tools(BOTH, must=name == "enforced")
    node = {"next": {"value": 120}, "value": 1}
    said = SAID[name] % json.dumps(node)
    assert takes(tools, form, said)
    assert found(form, said) == ("", [("node", node), ("now", {})])
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


@pytest.mark.parametrize("name", FORMATS)
def test_tool_grammar_beside_a_schema_allows_calls_or_a_fitting_answer(name: str) -> None:
    form = FORMATS[name]
    answer = {"type": "object", "properties": {"city": {"enum": ["Bern", "Chur"]}}, "required": ["city"]}
    tools = Tools(BOTH, must=False, answer=json.dumps(answer))
    assert takes(tools, form, '{"city": "Chur"}') and takes(tools, form, SAID[name] % '{"value": 7}')
    assert not takes(tools, form, '{"city": "Rome"}') and not takes(tools, form, "Chur")
    assert not takes(tools, form, SAID[name] % '{"value": 7}' + '{"city": "Chur"}')
    calls = 0
    for said in Compiled(grammar.of(tools, form)).answers(random.Random(0), 40):
        text, called = found(form, said)
        assert bool(text) != bool(called), said
        calls += bool(called)
        if text:
            jsonschema.validate(json.loads(text), answer)
        for function, arguments in called:
            jsonschema.validate(arguments, NODE if function == "node" else {"type": "object"})
    assert calls
