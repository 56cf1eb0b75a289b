"""Bodies: what is refused, by which field, and what becomes of the rest."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.errors import BadField
from gateway.openai.bodies import MOST_PARTS, ChatRequest, CompletionRequest, parse
from gateway.request import Request
from protos import common_pb2

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION: dict[str, Any] = {"model": "m", "prompt": "hi"}


def chat(**more: Any) -> Request:
    return parse(ChatRequest, json.dumps(CHAT | more).encode()).request("id", common_pb2.Slo(), 0.0)


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


TEXT = {"type": "text", "text": ""}
LIST_CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "[1]"}}
DEEP_CALL = {"function": {"name": "f", "arguments": "[" * 100_000}}


def completion(**more: Any) -> Request:
    return parse(CompletionRequest, json.dumps(COMPLETION | more).encode()).request("id", common_pb2.Slo(), 0.0)


SHARED = [
    ({"model": None}, "model"),
    ({"model": ""}, "model"),
    ({"model": 3}, "model"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": "2"}, "n"),
    ({"n": 1.5}, "n"),
    ({"n": True}, "n"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"stop": 3}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
    ({"stop": ""}, "stop"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "10"}, "max_tokens"),
    ({"max_tokens": 1 << 63}, "max_tokens"),
    ({"min_tokens": 1 << 63}, "min_tokens"),
    ({"stop_token_ids": [1 << 63]}, "stop_token_ids[0]"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"seed": 1.5}, "seed"),
    ({"seed": 1 << 64}, "seed"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids[0]"),
    ({"logit_bias": {"5": 1}}, "logit_bias"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": "json_object"}, "response_format"),
    ({"stop_token_ids": [1] * 1025}, "stop_token_ids"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": 1}}}, "response_format"),
    ({"regex": 3}, "regex"),
    ({"regex": "a", "ebnf": "b"}, "ebnf"),
    ({"regex": "a", "response_format": {"type": "json_object"}}, "response_format"),
    ({"regex": "a", "min_tokens": 2}, "min_tokens"),
    ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
    ({"best_of": 2}, "best_of"),
    ({"suffix": "x"}, "suffix"),
    *(
        ({name: value}, name)
        for name, values in {
            "functions": [[], {}, False],
            "function_call": ["auto", "none", ""],
            "audio": [{}],
            "web_search_options": [{}],
            "guided_json": [{}, ""],
            "guided_regex": [""],
            "guided_choice": [[]],
            "guided_grammar": [""],
            "structured_outputs": [{}],
            "chat_template": [""],
            "truncate_prompt_tokens": [-1],
            "prompt_logprobs": [0, 1, False],
            "modalities": [[]],
            "best_of": [True],
            "use_beam_search": [True, 0],
        }.items()
        for value in values
    ),
]


@pytest.mark.parametrize(("more", "field"), SHARED)
def test_invalid_field_of_chat_and_completion_is_named(more: dict[str, Any], field: str) -> None:
    for ask in (chat, completion):
        with pytest.raises(BadField) as refused:
            ask(**more)
        assert refused.value.field == field
        assert str(refused.value)


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "system"}]}, "messages[1].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [DEEP_CALL]}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [LIST_CALL]}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "c7"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "user", "content": [TEXT] * (MOST_PARTS + 1)}]}, "messages"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "retrieval", "function": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [tool("a b")]}, "tools[0].function.name"),
        ({"tools": [tool("f"), tool("f")]}, "tools"),
        ({"tools": [tool(f"f{n}") for n in range(129)]}, "tools"),
        ({"tools": [tool("f")], "tool_choice": "always"}, "tool_choice"),
        ({"tools": [tool("f")], "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": [tool("f")], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tools": [tool("f")], "parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"tools": [tool("f")], "regex": "a"}, "regex"),
        ({"tools": [tool("f")], "tool_choice": "required", "min_tokens": 2}, "min_tokens"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs.tokenize"),
        ({"chat_template_kwargs": {"a": 1, "messages": []}}, "chat_template_kwargs.messages"),
        ({"chat_template_kwargs": {"add_generation_prompt": True}}, "chat_template_kwargs.add_generation_prompt"),
        ({"chat_template_kwargs": {"raise_exception": 1}}, "chat_template_kwargs.raise_exception"),
        ({"add_special_tokens": True}, "add_special_tokens"),
    ],
)
def test_invalid_field_of_a_chat_is_named(more: dict[str, Any], field: str) -> None:
    with pytest.raises(BadField) as refused:
        chat(**more)
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [[1], []]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"max_tokens": 0, "min_tokens": 1}, "min_tokens"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
    ],
)
def test_invalid_field_of_a_completion_is_named(more: dict[str, Any], field: str) -> None:
    with pytest.raises(BadField) as refused:
        completion(**more)
    assert refused.value.field == field


@pytest.mark.parametrize(
    "tools", [[{"type": "custom", "custom": {"name": "f"}}], [{"type": "function", "function": {"name": "a b"}}]]
)
def test_unsupported_tool_is_refused_as_an_invalid_value(tools: Any) -> None:
    with pytest.raises(BadField) as refused:
        chat(tools=tools)
    assert refused.value.code == "invalid_value"


def test_missing_field_of_a_body_is_named() -> None:
    with pytest.raises(BadField) as refused:
        parse(ChatRequest, b'{"model": "m"}')
    assert (refused.value.field, refused.value.code) == ("messages", "missing_required_parameter")


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b'{"model": NaN'])
def test_body_that_is_no_json_is_refused_as_invalid_json(body: bytes) -> None:
    with pytest.raises(BadField) as refused:
        parse(ChatRequest, body)
    assert (refused.value.field, refused.value.code) == (None, "invalid_json")


@pytest.mark.parametrize("value", [b"NaN", b"Infinity", b"-Infinity", b'[{"a": NaN}]'])
@pytest.mark.parametrize("field", [b"temperature", b"max_tokens", b"user", b"unknown"])
def test_a_value_that_json_does_not_have_is_refused_as_invalid_json_wherever_it_stands(
    field: bytes, value: bytes
) -> None:
    body = b'{"model": "m", "messages": [{"role": "user", "content": "NaN"}], "%s": %s}' % (field, value)
    with pytest.raises(BadField, match="is no number") as refused:
        parse(ChatRequest, body)
    assert (refused.value.field, refused.value.code) == (None, "invalid_json")


def test_a_text_may_have_the_name_of_a_value_that_json_does_not_have() -> None:
    body = b'{"model": "NaN", "messages": [{"role": "user", "content": "-Infinity"}]}'
    assert parse(ChatRequest, body).model == "NaN"


@pytest.mark.parametrize("ask", [chat, completion])
def test_unknown_and_harmless_fields_of_a_body_are_ignored(ask: Any) -> None:
    ask(
        user="u",
        store=True,
        metadata={"a": "b"},
        service_tier="auto",
        parallel_tool_calls=True,
        tools=[],
        tool_choice="auto",
        response_format={"type": "text"},
        logit_bias={},
        best_of=1,
        suffix="",
        modalities=["text"],
        use_beam_search=False,
        functions=None,
        add_special_tokens=False,
        never_heard_of=[1],
    )


@pytest.mark.parametrize("ask", [chat, completion])
def test_null_field_of_a_body_counts_as_not_given(ask: Any) -> None:
    names = "n stream stream_options stop max_tokens temperature top_p seed presence_penalty frequency_penalty logprobs"
    request = ask(**dict.fromkeys(names.split()))
    assert (request.choices, request.stops, request.limit_given) == (1, (), False)


def test_sampling_defaults_are_those_of_openai() -> None:
    assert chat().sampling == common_pb2.Sampling(temperature=1.0)
    assert completion().sampling == common_pb2.Sampling(temperature=1.0, max_new_tokens=16)


def test_stop_field_is_a_string_or_a_list() -> None:
    assert chat(stop="a").stops == ("a",)
    assert chat(stop=["a", "b"]).stops == ("a", "b")


def test_chat_template_options_reach_the_template() -> None:
    request = chat(chat_template_kwargs={"enable_thinking": False}, continue_final_message=True)
    options = {"enable_thinking": False, "continue_final_message": True, "add_generation_prompt": False}
    assert request.prompts[0].template_options == options


def test_text_parts_and_other_keys_of_messages_are_kept_for_the_template() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = chat(messages=[{"role": "user", "content": parts, "name": "x"}]).prompts[0].messages
    assert messages == [{"role": "user", "content": parts, "name": "x"}]


@pytest.mark.parametrize("ask", [chat, completion])
def test_grammar_of_a_response_format_reaches_the_engine(ask: Any) -> None:
    assert ask().sampling.WhichOneof("grammar") is None
    assert ask(response_format={"type": "text"}).sampling.WhichOneof("grammar") is None
    assert ask(response_format={"type": "json_object"}).sampling.ebnf.startswith("root ::= object\n")
    schema: dict[str, Any] = {"enum": [10**30, "é"]}
    named = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}
    assert '"1000000000000000000000000000000" | "\\"é\\""' in ask(response_format=named).sampling.ebnf
    assert ask(regex="a+").sampling.regex == "a+"
    assert ask(ebnf='root ::= "a"').sampling.ebnf == 'root ::= "a"'
    assert ask(json_schema="{}").sampling.ebnf.startswith("root ::= any\n")


def format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}


UNKEPT = {"properties": {"tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True}}}
WRONG_SCHEMAS: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": format(UNKEPT)}, "response_format", "'uniqueItems' at '#/properties/tags' cannot be kept"),
    ({"json_schema": json.dumps(UNKEPT)}, "json_schema", "'uniqueItems' at '#/properties/tags' cannot be kept"),
    ({"json_schema": "{"}, "json_schema", "it is not JSON"),
    ({"json_schema": ""}, "json_schema", "it is not JSON"),
    ({"json_schema": '{"minimum": NaN}'}, "json_schema", "it is not JSON"),
    ({"json_schema": '{"a":' * 100_000}, "json_schema", "characters"),
    ({"json_schema": '{"a":' * 10_000}, "json_schema", "levels"),
    ({"json_schema": "[" * 65 + "]" * 65}, "json_schema", "levels"),
    ({"json_schema": '{"type": "string", "pattern": "\\ud800"}'}, "json_schema", "'pattern' at '#' cannot be kept"),
    ({"json_schema": '{"properties": {"\\ud800": {"if": {}, "then": {}}}}'}, "json_schema", "'if' at '#/properties/"),
    ({"response_format": format({"$ref": "#"})}, "response_format", "it allows no answer"),
    ({"response_format": format({"properties": {"a" * 70_000: {}}})}, "response_format", "characters"),
]


@pytest.mark.parametrize("ask", [chat, completion])
@pytest.mark.parametrize(("more", "field", "why"), WRONG_SCHEMAS)
def test_schema_that_cannot_be_enforced_is_refused_by_name(
    ask: Any, more: dict[str, Any], field: str, why: str
) -> None:
    with pytest.raises(BadField, match=why) as refused:
        ask(**more)
    assert refused.value.field == field
    str(refused.value).encode()


def test_arguments_of_earlier_calls_reach_the_template_as_objects() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    request = chat(
        messages=[
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "two"},
        ]
    )
    _, said, answered = request.prompts[0].messages or ()
    assert said["tool_calls"][0]["function"]["arguments"] == {"a": 1} and said["content"] == ""
    assert answered["tool_call_id"] == "1"
    call["function"]["arguments"] = "{"  # type: ignore[index]
    with pytest.raises(BadField) as refused:
        chat(messages=[{"role": "assistant", "tool_calls": [call]}])
    assert refused.value.field == "messages[0].tool_calls"


def test_tool_parameters_that_cannot_be_enforced_are_refused_where_calls_have_a_grammar() -> None:
    tools = [tool("g"), tool("f", parameters=UNKEPT)]
    assert chat(tools=tools).tools is not None
    assert chat(tools=tools, tool_choice="none").tools is None
    named = {"type": "function", "function": {"name": "f"}}
    for more in ({"tool_choice": "required"}, {"tool_choice": named}, {"response_format": {"type": "json_object"}}):
        with pytest.raises(BadField, match="'uniqueItems' at '#/properties/tags' cannot be kept") as refused:
            chat(tools=tools, **more)
        assert refused.value.field == "tools[1].function.parameters"
    named["function"]["name"] = "g"  # type: ignore[index]
    assert chat(tools=tools, tool_choice=named).sampling.ebnf
    with pytest.raises(BadField, match="allows no answer") as refused:
        chat(tools=[tool("f", parameters={"type": "string"})], tool_choice="required")
    assert refused.value.field == "tools[0].function.parameters"
    with pytest.raises(BadField, match="characters") as refused:
        large = {"type": "object", "description": "a" * 40_000}
        chat(tools=[tool("f", parameters=large), tool("g", parameters=large)], tool_choice="required")
    assert refused.value.field == "tools"


def test_body_with_tools_and_response_format_follows_tool_choice() -> None:
    asked = {"tools": [tool("f")], "response_format": format({"type": "integer"})}
    must = chat(**asked, tool_choice="required")
    assert must.sampling.ebnf == chat(tools=[tool("f")], tool_choice="required").sampling.ebnf
    may = chat(**asked)
    assert may.tools is not None and json.loads(may.tools.answer or "") == {"type": "integer"}
    assert may.sampling.WhichOneof("grammar") is None, "it is not known yet how the model writes calls"
    none = chat(**asked, tool_choice="none")
    assert none.sampling.ebnf.startswith("root ::= integer\n")
    with pytest.raises(BadField) as refused:
        chat(**asked, min_tokens=3)
    assert refused.value.field == "min_tokens"
    with pytest.raises(BadField) as refused:
        chat(tools=[tool("f")], response_format=format(UNKEPT))
    assert refused.value.field == "response_format"


def test_answer_may_begin_with_reasoning_unless_that_is_off_or_hides_the_calls_that_must_be_made() -> None:
    must = {"tools": [tool("f")], "tool_choice": "required"}
    assert chat().thinks and chat(separate_reasoning=False).thinks and chat(**must).thinks
    assert not chat(**must, separate_reasoning=False).thinks
    for off in ({"enable_thinking": False}, {"reasoning_effort": "none"}, {"continue_final_message": True}):
        assert not chat(**off).thinks


@pytest.mark.parametrize("effort", ["bogus", "", 3, "High"])
def test_reasoning_effort_that_no_client_knows_is_refused_and_a_templates_own_word_is_not(effort: Any) -> None:
    with pytest.raises(BadField) as refused:
        chat(reasoning_effort=effort)
    assert refused.value.field == "reasoning_effort"
    own = chat(chat_template_kwargs={"reasoning_effort": effort})
    assert own.prompts[0].template_options["reasoning_effort"] == effort


def test_tools_reach_the_template_unless_none_may_be_called() -> None:
    assert chat(tools=[tool("f")]).prompts[0].template_options["tools"] == [tool("f")]
    for none in (chat(), chat(tools=[]), chat(tools=[tool("f")], tool_choice="none")):
        assert none.tools is None and "tools" not in none.prompts[0].template_options
