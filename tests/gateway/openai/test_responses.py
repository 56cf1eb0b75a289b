"""OpenAI's Responses over HTTP, as OpenAI's client sees them: items, typed events, and fields that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import openai
import pydantic
import pytest
from openai.types.responses import Response, ResponseStreamEvent

from gateway.errors import BadField
from gateway.openai.blocks import End
from gateway.openai.bodies import MOST_PARTS
from gateway.openai.responses import ResponseEvents
from gateway.openai.responses_bodies import parse
from gateway.request import Request
from gateway.tools.formats import CallPart
from protos import common_pb2
from tests.gateway import fakes, tokenizers
from tests.gateway.conftest import MODEL, World
from tests.gateway.fakes import Running
from tests.gateway.parsing.test_parsers import THINKS
from tests.gateway.test_app import refusal

CALLS = (
    "{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}{% for m in messages %}{{ '<|' + m.role + '|>' }}"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}[{{ call.function.name }} {{ call.function.arguments.city }}]{% endfor %}"
    "{% endfor %}<|assistant|>"
)
"""A chat template like Qwen's, which shows tools, calls and reasoning."""
WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "description": "Says it.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": True,
}
CALLED = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
_EVENT: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(get_args(ResponseStreamEvent)[0])
"""Any event, by the types that OpenAI's client has: the client itself takes objects without looking at their fields."""


async def ask(world: World, said: Any = "hello", **more: Any) -> Response:
    answer = await world.openai.responses.create(model=MODEL, input=said, **more)
    assert isinstance(answer, Response)
    return Response.model_validate(answer.model_dump(by_alias=True))


async def streamed(world: World, said: Any = "hello", **more: Any) -> list[Any]:
    """The events of an answer, each checked to be one of OpenAI's."""
    stream = await world.openai.responses.create(model=MODEL, input=said, stream=True, **more)
    return checked([event.model_dump(by_alias=True, exclude_unset=True) async for event in stream])


def checked(events: list[dict[str, Any]]) -> list[Any]:
    """Events of one stream, as OpenAI's types. Their numbers rise; items and their parts begin, grow and end."""
    typed = [_EVENT.validate_python(event) for event in events]
    assert [event.sequence_number for event in typed] == list(range(len(typed)))
    assert [event.type for event in typed[:2]] == ["response.created", "response.in_progress"]
    response = typed[-1].response
    assert typed[-1].type == f"response.{response.status}"
    for index, item in enumerate(response.output):
        of_item = [event for event in typed if getattr(event, "output_index", None) == index]
        first, *more, last = of_item
        assert (first.type, last.type) == ("response.output_item.added", "response.output_item.done")
        assert (first.item.id, last.item) == (item.id, item) and all(event.item_id == item.id for event in more)
        assert (first.item.status, last.item.status in ("completed", "incomplete")) == ("in_progress", True)
        if item.type != "function_call":
            begin, *more, end = more
            assert (begin.type, end.type) == ("response.content_part.added", "response.content_part.done")
            assert (begin.part.text, [end.part.text]) == ("", [part.text for part in item.content])
        *deltas, done = more
        text = done.arguments if item.type == "function_call" else done.text
        assert text == "".join(event.delta for event in deltas) and text == said_by(item)
        assert {event.type for event in more} <= {done.type, done.type.removesuffix("done") + "delta"}
    return typed


def said_by(item: Any) -> str:
    if item.type == "function_call":
        return str(item.arguments)
    return "".join(part.text for part in item.content)


def without_ids(response: Response) -> dict[str, Any]:
    """What two responses to the same request have in common."""
    told = response.model_dump(exclude={"id", "created_at", "completed_at"})
    for item in told["output"]:
        assert item.pop("id")
        item.pop("call_id", None)
    return told


def shown(world: World) -> str:
    """The last prompt that an engine got."""
    ids = world.groups[0].requests[-1].submit.token_ids
    return str(tokenizers.tiny().decode(list(ids), skip_special_tokens=False))


@pytest.fixture
async def caller(world: World, tmp_path: Path) -> World:
    """Its model is given tools."""
    folder = tokenizers.write(tokenizers.tiny(), tmp_path / "calls", CALLS)
    await world.publish(fakes.route(MODEL, folder, fakes.place(world.groups[0])))
    return world


async def test_response_is_a_message_with_counts_and_the_fields_of_its_request(world: World) -> None:
    said = world.say("the quick brown fox")
    response = await ask(
        world, temperature=0.5, top_p=0.25, max_output_tokens=100, metadata={"a": "b"}, user="me", store=True
    )
    assert (response.status, response.output_text, response.error) == ("completed", "the quick brown fox", None)
    (message,) = response.output
    assert (message.type, message.status) == ("message", "completed")
    assert response.id.startswith("resp_") and response.model == MODEL and response.created_at > 1.7e9
    submit = world.groups[0].requests[0].submit
    usage = response.usage
    assert usage is not None and usage.input_tokens == len(submit.token_ids) and usage.output_tokens == len(said)
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert (usage.input_tokens_details.cached_tokens, usage.output_tokens_details.reasoning_tokens) == (0, 0)
    sampling = submit.sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_new_tokens) == (0.5, 0.25, 100)
    told = response.model_dump()
    expected = {
        "temperature": 0.5,
        "top_p": 0.25,
        "max_output_tokens": 100,
        "metadata": {"a": "b"},
        "user": "me",
        "store": False,
        "instructions": None,
        "tools": [],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "truncation": "disabled",
        "previous_response_id": None,
        "incomplete_details": None,
        "text": {"format": {"type": "text"}, "verbosity": None},
    }
    assert {name: told[name] for name in expected} == expected


SPECIFIED = (
    "id object created_at completed_at status incomplete_details model previous_response_id instructions output error "
    "tools tool_choice truncation parallel_tool_calls text top_p presence_penalty frequency_penalty top_logprobs "
    "temperature reasoning usage max_output_tokens max_tool_calls store background service_tier metadata "
    "safety_identifier prompt_cache_key"
)
"""Fields that the specification Open Responses requires of a response."""


async def test_response_has_the_fields_that_the_specification_requires_and_says_what_was_sampled(world: World) -> None:
    world.say("one")
    route = fakes.route(MODEL, world.folder, fakes.place(world.groups[0]))
    route.model.sampling.temperature = 0.6
    await world.publish(route)
    body = {"model": MODEL, "input": "hello", "frequency_penalty": 0.5, "prompt_cache_key": "k"}
    told = (await world.http.post("/v1/responses", json=body)).json()
    assert set(SPECIFIED.split()) <= set(told) and told["completed_at"] >= told["created_at"]
    assert (told["temperature"], told["top_p"], told["presence_penalty"]) == (0.6, 1, 0)
    assert (told["frequency_penalty"], told["prompt_cache_key"], told["service_tier"]) == (0.5, "k", "default")
    sampling = world.groups[0].requests[-1].submit.sampling
    assert (round(sampling.temperature, 6), sampling.frequency_penalty) == (0.6, 0.5)


async def test_instructions_and_the_history_are_the_chat_in_order(world: World) -> None:
    world.say("three")
    history: Any = [
        {"role": "user", "content": "one"},
        {
            "type": "message",
            "id": "msg_1",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "refusal", "refusal": "two"}],
        },
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
    ]
    response = await ask(world, history, instructions="Be brief.")
    assert response.instructions == "Be brief."
    assert shown(world) == "<s><|system|>Be brief.\n<|user|>one\n<|assistant|>two\n<|user|>a b\n<|assistant|>"
    messages: Any = [{"role": "system", "content": "Be brief."}, *history]
    messages[2] = {"role": "assistant", "content": "two"}
    messages[3] = {"role": "user", "content": "a b"}
    chat = await world.openai.chat.completions.create(model=MODEL, messages=messages)
    first, second = world.groups[0].requests
    assert first.submit.token_ids == second.submit.token_ids and chat.choices[0].message.content == "three"


async def test_streamed_response_is_the_whole_one_in_typed_events(world: World) -> None:
    world.say("héllo, 世界 😀")
    whole, events = await ask(world), await streamed(world)
    assert without_ids(events[-1].response) == without_ids(whole)
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text == "héllo, 世界 😀" and len(deltas) > 2
    async with world.openai.responses.stream(model=MODEL, input="hello") as stream:  # the client's own gathering
        final = await stream.get_final_response()
    assert final.output_text == whole.output_text
    raw = await world.http.post("/v1/responses", json={"model": MODEL, "input": "hello", "stream": True})
    assert raw.headers["content-type"].startswith("text/event-stream")
    for event in raw.text.strip().split("\n\n"):
        name, data = event.split("\n")
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"


async def test_tool_is_called_and_its_output_is_the_next_turn(caller: World) -> None:
    caller.say(f"Let me see. {CALLED}\n")
    whole, events = await ask(caller, tools=[WEATHER]), await streamed(caller, tools=[WEATHER])
    assert without_ids(events[-1].response) == without_ids(whole)
    message, call = whole.output
    assert whole.status == "completed" and whole.tools[0].model_dump() == WEATHER
    assert said_by(message).strip() == "Let me see." and call.type == "function_call"
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Rome"}) and call.call_id
    assert '"name": "weather"' in shown(caller)

    caller.say("It rains.")
    history: Any = [
        {"role": "user", "content": "hello"},
        *whole.output,
        {"type": "function_call_output", "call_id": call.call_id, "output": "rain"},
    ]
    assert (await ask(caller, history, tools=[WEATHER])).output_text == "It rains."
    expected = "<|user|>hello<|assistant|>Let me see. [weather Rome]<|tool|>rain<|assistant|>"
    assert shown(caller).endswith(expected)


async def test_items_of_one_turn_become_one_message_with_its_calls_and_reasoning(caller: World) -> None:
    caller.say("three")
    call = {"type": "function_call", "name": "weather"}
    history: Any = [
        {"role": "user", "content": "one"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "which"}]},
        {**call, "call_id": "a", "arguments": '{"city": "Rome"}'},
        {**call, "call_id": "b", "arguments": '{"city": "Bern"}'},
        {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "rain"}]},
        {"type": "function_call_output", "call_id": "b", "output": "sun"},
        {"type": "reasoning", "id": "rs_2", "summary": [], "encrypted_content": "x"},
        {"role": "assistant", "content": "so"},
        {"type": "reasoning", "id": "rs_4", "summary": [], "content": [{"type": "reasoning_text", "text": "again"}]},
        {**call, "call_id": "c", "arguments": '{"city": "Oslo"}'},
        {"type": "function_call_output", "call_id": "c", "output": "snow"},
        {"type": "reasoning", "id": "rs_3", "summary": [], "content": [{"type": "reasoning_text", "text": "cut"}]},
        {"role": "user", "content": "two"},
    ]
    await ask(caller, history)
    expected = (
        "<|user|>one<|assistant|>(which)[weather Rome][weather Bern]<|tool|>rain<|tool|>sun"
        "<|assistant|>so<|assistant|>(again)[weather Oslo]<|tool|>snow<|assistant|>(cut)<|user|>two<|assistant|>"
    )
    assert shown(caller) == expected


async def test_tool_choice_makes_the_grammar_that_a_chat_gets(caller: World) -> None:
    caller.say('[{"name": "weather", "parameters": {"city": "Rome"}}]')
    function = {name: WEATHER[name] for name in ("name", "description", "parameters", "strict")}
    tools: Any = [{"type": "function", "function": function}]
    for chosen, chats in (
        ("required", "required"),
        ({"type": "function", "name": "weather"}, {"type": "function", "function": {"name": "weather"}}),
    ):
        response = await ask(caller, tools=[WEATHER], tool_choice=chosen, parallel_tool_calls=False)
        (call,) = response.output
        assert call.type == "function_call" and json.loads(call.arguments) == {"city": "Rome"}
        echo = response.tool_choice
        assert (echo if isinstance(echo, str) else echo.model_dump()) == chosen
        assert response.parallel_tool_calls is False
        await caller.chat(tools=tools, tool_choice=chats, parallel_tool_calls=False)
        mine, chat = caller.groups[0].requests[-2:]
        assert mine.submit.sampling.ebnf and mine.submit.sampling.ebnf == chat.submit.sampling.ebnf
        assert mine.submit.token_ids == chat.submit.token_ids
    await ask(caller, tools=[WEATHER], tool_choice="none")
    assert "weather" not in shown(caller)


async def test_answer_with_a_form_is_parsed_by_the_client(world: World) -> None:
    class Sum(pydantic.BaseModel):
        total: int

    world.say('{"total": 3}')
    parsed = await world.openai.responses.parse(model=MODEL, input="hello", text_format=Sum)
    assert parsed.output_parsed == Sum(total=3) and world.groups[0].requests[0].submit.sampling.ebnf
    async with world.openai.responses.stream(model=MODEL, input="hello", text_format=Sum) as stream:
        assert (await stream.get_final_response()).output_parsed == Sum(total=3)


async def test_text_format_makes_the_grammar_that_a_chat_gets(world: World) -> None:
    world.say('{"a": 1}')
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form: Any = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    response = await ask(world, text={"format": form})
    assert response.output_text == '{"a": 1}' and response.text is not None and response.text.format is not None
    assert response.text.format.model_dump(by_alias=True, exclude_none=True) == form
    await world.chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
    await ask(world, text={"format": {"type": "json_object"}})
    await ask(world, text={"format": {"type": "text"}})
    mine, chat, free, none = (running.submit.sampling for running in world.groups[0].requests)
    assert mine.ebnf == chat.ebnf != free.ebnf and free.ebnf and not none.ebnf


async def test_reasoning_is_an_item_before_the_message_and_is_counted(world: World, tmp_path: Path) -> None:
    folder = tokenizers.write(tokenizers.tiny(), tmp_path / "thinks", THINKS)
    await world.publish(fakes.route(MODEL, folder, fakes.place(world.groups[0])))
    ids = world.say("<think>one two</think>three")
    whole, events = await ask(world), await streamed(world)
    for response in (whole, events[-1].response):
        reasoning, message = response.output
        assert (reasoning.type, said_by(reasoning), reasoning.summary) == ("reasoning", "one two", [])
        assert response.output_text == said_by(message) == "three"
        assert response.usage.output_tokens == len(ids)
        assert 0 < response.usage.output_tokens_details.reasoning_tokens < len(ids)
    deltas = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(deltas) == "one two" and len(deltas) > 1

    cut = await ask(world, max_output_tokens=len(world.ids("<think>one")))
    (reasoning,) = cut.output
    assert (cut.status, reasoning.type, reasoning.status) == ("incomplete", "reasoning", "incomplete")

    world.say("three")
    off: Any = {"effort": "none"}  # of later clients: to this one it is an unknown value
    await world.openai.responses.create(model=MODEL, input="hello", reasoning=off)
    assert shown(world).endswith("<think>\n\n</think>\n\n")


async def test_answer_that_the_limit_cuts_is_incomplete(world: World) -> None:
    world.say("one two three four five")
    whole, events = await ask(world, max_output_tokens=3), await streamed(world, max_output_tokens=3)
    assert events[-1].type == "response.incomplete"
    for response in (whole, events[-1].response):
        assert response.status == "incomplete" and response.incomplete_details.reason == "max_output_tokens"
        assert response.output[0].status == "incomplete" and response.usage.output_tokens == 3


async def test_empty_answer_is_an_empty_message(world: World) -> None:
    world.say("")
    whole, events = await ask(world), await streamed(world)
    assert without_ids(whole) == without_ids(events[-1].response)
    assert [said_by(item) for item in whole.output] == [""]


async def test_failure_in_a_stream_is_raised_by_the_client_and_numbered(world: World) -> None:
    async def fail(running: Running) -> None:
        running.tokens(world.ids("one two"))
        running.finish(common_pb2.REJECTED, "this is impossible")

    world.groups[0].script = fail
    stream = await world.openai.responses.create(model=MODEL, input="hello", stream=True)
    seen = []
    with pytest.raises(openai.APIError, match="this is impossible"):
        async for event in stream:
            seen.append(event)
    assert seen[-1].type == "response.output_text.delta"
    raw = await world.http.post("/v1/responses", json={"model": MODEL, "input": "hello", "stream": True})
    last = raw.text.strip().split("\n\n")[-1]
    event = _EVENT.validate_json(last.removeprefix("event: error\ndata: "))
    assert (event.type, event.sequence_number) == ("error", len(seen))
    with pytest.raises(openai.APIStatusError, match="this is impossible"):
        await ask(world)


async def test_target_in_a_header_comes_to_the_engine_and_the_flex_tier_has_none(world: World) -> None:
    world.say("one")
    route = world.route(fakes.place(world.groups[0]), default_slo=common_pb2.Slo(ttft_ms=500))
    await world.publish(route)
    await ask(world, extra_headers={"x-slo-ttft-ms": "1234"})
    await ask(world, service_tier="flex")
    assert [running.submit.slo.ttft_ms for running in world.groups[0].requests] == [1234, 0]


USER: Any = {"role": "user", "content": "hi"}
SCHEMA = {"type": "json_schema", "name": "x", "schema": {"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}}}


@pytest.mark.parametrize(
    ("fields", "named", "code"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "unsupported_parameter"),
        ({"conversation": "conv_1"}, "conversation", "unsupported_parameter"),
        ({"background": True}, "background", "unsupported_parameter"),
        ({"prompt": {"id": "p"}}, "prompt", "unsupported_parameter"),
        ({"truncation": "auto"}, "truncation", "unsupported_parameter"),
        ({"top_logprobs": 2}, "top_logprobs", "unsupported_parameter"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "unsupported_parameter"),
        ({"tools": [WEATHER, {"type": "mcp", "server_label": "x"}]}, "tools[1].type", "unsupported_parameter"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name", "invalid_value"),
        ({"tools": [WEATHER, WEATHER]}, "tools", "invalid_value"),
        ({"tools": [WEATHER], "tool_choice": "some"}, "tool_choice", "invalid_value"),
        ({"tools": [WEATHER], "tool_choice": {"type": "mcp"}}, "tool_choice.type", "unsupported_parameter"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice", "invalid_value"),
        (
            {"tools": [{**WEATHER, "parameters": SCHEMA["schema"]}], "tool_choice": "required"},
            "tools[0].parameters",
            None,
        ),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type", "unsupported_parameter"),
        (
            {"text": {"format": {"type": "json_schema", "name": "x"}}},
            "text.format.schema",
            "missing_required_parameter",
        ),
        ({"text": {"format": SCHEMA}}, "text.format", "invalid_value"),
        ({"reasoning": {"effort": 3}}, "reasoning.effort", "invalid_value"),
        ({"max_output_tokens": 0}, "max_output_tokens", "below_min_value"),
        ({"temperature": 3}, "temperature", "above_max_value"),
        ({"metadata": {"a": 1}}, "metadata.a", "invalid_type"),
        ({"input": []}, "input", "array_too_short"),
        ({"input": 5}, "input", "invalid_type"),
        ({"input": [5]}, "input[0]", "invalid_type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "unsupported_parameter"),
        ({"input": [USER, {"role": "robot", "content": ""}]}, "input[1].role", "invalid_value"),
        ({"input": [USER, {"role": "user"}]}, "input[1].content", "missing_required_parameter"),
        ({"input": [USER, {"role": "user", "content": 5}]}, "input[1].content", "invalid_type"),
        (
            {"input": [USER, {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[1].content[0].type",
            "unsupported_parameter",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]},
            "input[0].content[0].type",
            "unsupported_parameter",
        ),
        (
            {"input": [USER, {"type": "function_call_output", "call_id": "a", "output": "x"}]},
            "input[1].call_id",
            "invalid_value",
        ),
        (
            {"input": [USER, {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{"}]},
            "input[1].arguments",
            "invalid_value",
        ),
        (
            {"input": [USER, {"type": "function_call", "call_id": "a", "name": "f", "arguments": "[1]"}]},
            "input[1].arguments",
            "invalid_value",
        ),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input", "invalid_value"),
        ({"input": [{**USER, "content": [{"type": "input_text", "text": ""}] * (MOST_PARTS + 1)}]}, "input", None),
    ],
)
def test_field_that_cannot_be_kept_is_refused_by_its_own_name(
    fields: dict[str, Any], named: str, code: str | None
) -> None:
    with pytest.raises(BadField) as refused:
        parse(json.dumps({"model": MODEL, "input": "hello", **fields}).encode()).request("1", common_pb2.Slo(), 0.0)
    assert (refused.value.field, refused.value.code) == (named, code or "invalid_value")
    assert f"'{named}" in str(refused.value)


async def test_refusals_over_http_name_the_fields_of_the_body(world: World) -> None:
    for fields, named, code in (
        ({"previous_response_id": "resp_1"}, "previous_response_id", "unsupported_parameter"),
        ({"max_output_tokens": 100_000}, "max_output_tokens", "context_length_exceeded"),
        ({"input": "hello " * 2000}, "input", "context_length_exceeded"),
        ({"tools": [WEATHER]}, "tools", "unsupported_parameter"),  # by the chat template
    ):
        body = {"model": MODEL, "input": "hello", **fields}
        error = refusal(await world.http.post("/v1/responses", json=body), 400)
        assert (error["param"], error["code"]) == (named, code)
    with pytest.raises(openai.NotFoundError) as missing:
        await world.openai.responses.create(model="none", input="hello")
    assert missing.value.param == "model"


async def test_message_that_the_template_refuses_is_named_by_its_item(world: World) -> None:
    refuses = tokenizers.TEMPLATE.replace("forbidden", "assistant")
    folder = tokenizers.write(tokenizers.tiny(), world.sockets / "refuses", refuses)
    await world.publish(fakes.route(MODEL, folder, fakes.place(world.groups[0])))
    body = {
        "model": MODEL,
        "instructions": "Be brief.",
        "input": [USER, {"role": "assistant", "content": "one"}, USER],
    }
    error = refusal(await world.http.post("/v1/responses", json=body), 400)
    assert error["param"] == "input[1].role"


async def test_fields_without_a_meaning_here_change_nothing(world: World) -> None:
    world.say("one")
    more: Any = {
        "include": ["reasoning.encrypted_content"],
        "background": False,
        "truncation": "disabled",
        "store": True,
        "reasoning": {"summary": "auto"},
        "text": {"verbosity": "low"},
    }
    assert without_ids(await ask(world)) == without_ids(await ask(world, **more))
    first, second = world.groups[0].requests
    assert first.submit.token_ids == second.submit.token_ids


async def test_numbers_of_any_size_are_repeated_as_they_came(world: World) -> None:
    world.say("one")
    tool = b'{"type": "function", "name": "f", "parameters": {"maximum": 1180591620717411303424, "minimum": -1e999}}'
    body = b'{"model": "org/tiny", "input": "hello", "tool_choice": "none", "tools": [%b]}' % tool
    answer = (await world.http.post("/v1/responses", content=body)).json()
    assert answer["tools"][0]["parameters"] == {"maximum": 1 << 70, "minimum": None}


async def test_client_that_leaves_frees_the_engine(world: World) -> None:
    world.say("one two", end=False)
    stream = await world.openai.responses.create(model=MODEL, input="hello", stream=True)
    async for event in stream:
        if event.type == "response.output_text.delta":
            break
    await stream.close()
    await (await world.groups[0].arrived(1)).cancelled.wait()


END = End("tool_calls", None, prompt_tokens=3, cached_tokens=1, tokens=9, reasoning_tokens=2)


def test_call_whose_last_piece_comes_after_text_is_one_item() -> None:
    """Parsers give the text that follows a call together with the end of the call."""
    asked = Request("1", "m", 0.0, [], common_pb2.Sampling(), False, common_pb2.Slo())
    events = ResponseEvents(parse(b'{"model": "m", "input": "x"}'), asked, asked.sampling)
    sent = events.opening(3, 0)
    assert events.sent == 0, "an error now would be the first event"
    sent += events.reasoning("why") + events.text("\n\n")
    sent += events.calls([CallPart(0, "a", "f", ""), CallPart(0, "", "", '{"x":')])
    sent += events.text(" then ") + events.calls([CallPart(0, "", "", "1}"), CallPart(1, "b", "g", "{}")])
    sent += events.text("\n") + events.ending(END)
    lines = [event.split("\n")[1].removeprefix("data: ") for event in sent.decode().strip().split("\n\n")]
    assert events.sent == len(lines)
    response = checked([json.loads(line) for line in lines])[-1].response
    found = [(item.type, said_by(item)) for item in response.output]
    assert found == [
        ("reasoning", "why"),
        ("function_call", '{"x":1}'),
        ("message", " then "),
        ("function_call", "{}"),
    ]
    assert response.usage.input_tokens_details.cached_tokens == 1


async def test_blank_text_before_a_call_is_no_message(caller: World) -> None:
    caller.say(f"\n\n{CALLED}")
    whole, events = await ask(caller, tools=[WEATHER]), await streamed(caller, tools=[WEATHER])
    for response in (whole, events[-1].response):
        assert [item.type for item in response.output] == ["function_call"]
