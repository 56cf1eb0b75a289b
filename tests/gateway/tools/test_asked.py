import json
from typing import Any

import jsonschema

from gateway.tools.asked import Tool, Tools


def tool(name: str, parameters: dict[str, Any] | None = None) -> Tool:
    return Tool.model_validate({"type": "function", "function": {"name": name, "parameters": parameters}})


NODE = {
    "type": "object",
    "properties": {"next": {"$ref": "#"}, "value": {"$ref": "#/$defs/value"}},
    "required": ["value"],
    "$defs": {"value": {"type": "integer"}},
}


def fits(tools: Tools, answer: Any) -> bool:
    return jsonschema.Draft202012Validator(json.loads(tools.schema())).is_valid(answer)


def test_the_schema_wants_calls_of_tools_there_are_each_with_its_own_parameters() -> None:
    tools = Tools([tool("node", NODE), tool("now")], must=True)
    node = {"name": "node", "parameters": {"value": 1, "next": {"value": 2}}}
    assert fits(tools, [node]) and fits(tools, [node, {"name": "now", "parameters": {}}])
    assert not fits(tools, []) and not fits(tools, node)
    assert not fits(tools, [{"name": "node", "parameters": {"value": 1, "next": {"value": "2"}}}])
    assert not fits(tools, [{"name": "other", "parameters": {}}])


def test_one_that_is_named_is_called_once_and_so_is_any_without_parallel_calls() -> None:
    now, node = {"name": "now", "parameters": {}}, {"name": "node", "parameters": {"value": 1}}
    both = [tool("node", NODE), tool("now")]
    named = Tools(both, must=True, name="now")
    assert fits(named, [now]) and not fits(named, [node]) and not fits(named, [now, now])
    single = Tools(both, must=True, parallel=False)
    assert fits(single, [now]) and fits(single, [node]) and not fits(single, [now, node])


def test_numbers_of_any_size_are_kept() -> None:
    tools = Tools([tool("f", {"maximum": 10**30})], must=True)
    assert json.loads(tools.schema())["$defs"]["f"] == {"maximum": 10**30}
