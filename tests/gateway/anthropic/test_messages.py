"""Anthropic's Messages, by its official client: text, tools, thinking, streams, counts and errors."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import pytest

from gateway.access import keys
from gateway.anthropic.messages import MessageEvents
from gateway.openai.blocks import End
from gateway.openai.bodies import MOST_PARTS
from gateway.tools.formats import CallPart
from protos import common_pb2
from testing.patience import PATIENCE_S
from tests.gateway import fakes, tokenizers
from tests.gateway.conftest import MODEL, World
from tests.gateway.fakes import Running
from tests.gateway.parsing.test_parsers import THINKS

TEMPLATE = (
    "{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}{% for m in messages %}{{ '<|' + m.role + '|>' }}"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments.city }}]{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TOOL: Any = {
    "name": "weather",
    "description": "Weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
HELLO: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tokenizers.write(tokenizers.tiny(), tmp_path_factory.mktemp("model"), TEMPLATE)


@pytest.fixture
async def claude(world: World) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(
        base_url=world.url, api_key="none", max_retries=0, timeout=PATIENCE_S
    ) as client:
        yield client


def prompt(world: World) -> str:
    """The last prompt that an engine got."""
    submit = world.groups[0].requests[-1].submit
    return str(tokenizers.tiny().decode(list(submit.token_ids), skip_special_tokens=False))


async def test_message_is_answered_with_its_counts_and_its_reason(
    world: World, claude: anthropic.AsyncAnthropic
) -> None:
    ids = world.say("one two")
    said = await claude.messages.create(model=MODEL, max_tokens=50, messages=HELLO, system="be brief", temperature=0.5)
    assert [(block.type, block.text) for block in said.content if block.type == "text"] == [("text", "one two")]
    assert (said.stop_reason, said.stop_sequence, said.role) == ("end_turn", None, "assistant")
    assert said.usage.output_tokens == len(ids)
    assert prompt(world) == "<|system|>be brief<|user|>hello<|assistant|>"
    submit = world.groups[0].requests[-1].submit
    assert said.usage.input_tokens == len(submit.token_ids) and submit.sampling.temperature == 0.5
    assert submit.sampling.max_new_tokens == 50

    cut = await claude.messages.create(model=MODEL, max_tokens=1, messages=HELLO)
    assert cut.stop_reason == "max_tokens"
    stopped = await claude.messages.create(model=MODEL, max_tokens=50, messages=HELLO, stop_sequences=["wo", "zzz"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "wo")
    assert stopped.content[0].type == "text" and stopped.content[0].text == "one t"


async def test_streamed_message_is_the_whole_one(world: World, claude: anthropic.AsyncAnthropic) -> None:
    ids = world.say("one two three")
    kinds: list[str] = []
    async with claude.messages.stream(model=MODEL, max_tokens=50, messages=HELLO) as stream:
        async for event in stream:
            kinds.append(event.type)
        final = await stream.get_final_message()
    assert final.content[0].type == "text" and final.content[0].text == "one two three"
    assert (final.stop_reason, final.usage.output_tokens) == ("end_turn", len(ids))
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop" and kinds.count("content_block_start") == 1


@pytest.mark.parametrize("streamed", [False, True])
async def test_tool_is_called_and_its_result_goes_back_to_the_model(
    world: World, claude: anthropic.AsyncAnthropic, streamed: bool
) -> None:
    world.say(f"Let me see.\n{CALL}")
    asked: Any = {"model": MODEL, "max_tokens": 200, "tools": [TOOL]}
    if streamed:
        async with claude.messages.stream(**asked, messages=HELLO) as stream:
            said = await stream.get_final_message()
    else:
        said = await claude.messages.create(**asked, messages=HELLO)
    text, call = said.content
    assert text.type == "text" and text.text.strip() == "Let me see."
    assert call.type == "tool_use" and (call.name, call.input) == ("weather", {"city": "Oslo"})
    assert said.stop_reason == "tool_use"
    assert '"parameters"' in prompt(world) and "Weather of a city." in prompt(world)

    world.say("Rain.")
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "wet"}]}
    history: Any = [
        *HELLO,
        {"role": "assistant", "content": said.content},
        {"role": "user", "content": [result, {"type": "text", "text": "and?"}]},
    ]
    said = await claude.messages.create(**asked, messages=history)
    assert said.content[0].type == "text" and said.content[0].text == "Rain."
    assert "[weather Oslo]<|tool|>wet<|user|>and?<|assistant|>" in prompt(world)


async def test_tool_choice_any_has_the_answer_be_a_call(world: World, claude: anthropic.AsyncAnthropic) -> None:
    world.say('[{"name": "weather", "parameters": {"city": "Oslo"}}]')
    said = await claude.messages.create(
        model=MODEL, max_tokens=200, messages=HELLO, tools=[TOOL], tool_choice={"type": "any"}
    )
    assert [block.type for block in said.content] == ["tool_use"]
    assert world.groups[0].requests[-1].submit.sampling.ebnf


async def test_call_that_is_cut_has_what_is_whole_of_its_input_as_in_a_stream(
    world: World, claude: anthropic.AsyncAnthropic
) -> None:
    ids = world.say('[{"name": "weather", "parameters": {"days": 2, "city": "Oslo"}}]')
    short = len(world.ids('[{"name": "weather", "parameters": {"days": 2, "city": "Os'))
    assert short < len(ids)
    asked: Any = {
        "model": MODEL,
        "max_tokens": short,
        "messages": HELLO,
        "tools": [TOOL],
        "tool_choice": {"type": "any"},
    }
    async with claude.messages.stream(**asked) as stream:
        streamed = await stream.get_final_message()
    for said in (streamed, await claude.messages.create(**asked)):
        (call,) = said.content
        assert call.type == "tool_use" and (call.name, call.input) == ("weather", {"days": 2})
        assert said.stop_reason == "max_tokens"


KEPT: Any = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
"""What Claude Code sends of context_management."""


@pytest.mark.parametrize("asked", ["output_config", "output_format"])
async def test_schema_in_either_field_is_a_grammar_also_beside_what_claude_code_sends(
    world: World, claude: anthropic.AsyncAnthropic, asked: str
) -> None:
    world.say('{"city": "Oslo"}')
    form = {"type": "json_schema", "schema": TOOL["input_schema"]}
    said = await claude.messages.create(
        model=MODEL,
        max_tokens=200,
        messages=HELLO,
        extra_body={"context_management": KEPT, asked: {"format": form} if asked == "output_config" else form},
    )
    assert said.content[0].type == "text" and json.loads(said.content[0].text) == {"city": "Oslo"}
    assert "city" in world.groups[0].requests[-1].submit.sampling.ebnf


async def test_effort_is_the_templates_reasoning_effort(
    world: World, claude: anthropic.AsyncAnthropic, tmp_path: Path
) -> None:
    shown = "{{ reasoning_effort }}{{ enable_thinking }}{% for m in messages %}{{ m.content }}{% endfor %}"
    folder = tokenizers.write(tokenizers.tiny(), tmp_path / "effort", shown)
    await world.publish(fakes.route(MODEL, folder, fakes.place(world.groups[0])))
    world.say("one")
    for effort, thinking, expected in (("low", "adaptive", "lowTrue"), ("max", "disabled", "highFalse")):
        more: Any = {"output_config": {"effort": effort}, "thinking": {"type": thinking}}
        await claude.messages.create(model=MODEL, max_tokens=5, messages=HELLO, extra_body=more)
        assert prompt(world) == f"{expected}hello"


SPECIFIED = {
    "message": ("id type role model content stop_reason stop_sequence stop_details container usage"),
    "usage": (
        "input_tokens output_tokens output_tokens_details cache_creation cache_creation_input_tokens "
        "cache_read_input_tokens server_tool_use inference_geo service_tier"
    ),
    "text": "type text citations",
    "tool_use": "type id name input caller",
}
"""Fields that Anthropic's specification requires of a message and its parts."""


async def test_message_has_the_fields_that_the_specification_requires(world: World) -> None:
    world.say(f"Let me see.\n{CALL}")
    body = {"model": MODEL, "max_tokens": 200, "messages": HELLO, "tools": [TOOL]}
    whole = (await world.http.post("/v1/messages", json=body)).json()
    stream = (await world.http.post("/v1/messages", json={**body, "stream": True})).text
    events = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: ")]
    begun = events[0]["message"]
    blocks = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    for message in (whole, begun):
        assert set(SPECIFIED["message"].split()) == set(message)
        assert set(SPECIFIED["usage"].split()) == set(message["usage"])
    for block in (*whole["content"], *blocks):
        assert set(SPECIFIED[block["type"]].split()) == set(block)


async def test_thinking_is_a_block_of_its_own_and_goes_back_with_the_history(
    world: World, claude: anthropic.AsyncAnthropic, tmp_path: Path
) -> None:
    folder = tokenizers.write(
        tokenizers.tiny(),
        tmp_path / "thinks",
        THINKS + "{% if messages|length > 1 %}{{ messages[1].reasoning_content }}{% endif %}",
    )
    await world.publish(fakes.route(MODEL, folder, fakes.place(world.groups[0])))
    world.say("<think>one</think>two")
    asked: Any = {"model": MODEL, "max_tokens": 200}
    whole = await claude.messages.create(**asked, messages=HELLO)
    async with claude.messages.stream(**asked, messages=HELLO) as stream:
        streamed = await stream.get_final_message()
    for said in (whole, streamed):
        thinking, text = said.content
        assert thinking.type == "thinking" and thinking.thinking == "one"
        assert text.type == "text" and text.text == "two"
    history: Any = [*HELLO, {"role": "assistant", "content": whole.content}, *HELLO]
    await claude.messages.create(**asked, messages=history, thinking={"type": "disabled"})
    assert prompt(world).endswith("<think>\n\n</think>\n\none")


async def test_count_of_tokens_is_that_of_the_message(world: World, claude: anthropic.AsyncAnthropic) -> None:
    world.say("one")
    for more in ({}, {"system": "be brief"}, {"tools": [TOOL]}):
        counted = await claude.messages.count_tokens(model=MODEL, messages=HELLO, **more)  # type: ignore[arg-type]
        said = await claude.messages.create(model=MODEL, max_tokens=5, messages=HELLO, **more)  # type: ignore[arg-type]
        assert counted.input_tokens == said.usage.input_tokens > 0


async def test_answer_goes_on_with_a_last_message_of_the_assistant(
    world: World, claude: anthropic.AsyncAnthropic
) -> None:
    world.say(" two")
    begun: Any = [*HELLO, {"role": "assistant", "content": "one"}]
    said = await claude.messages.create(model=MODEL, max_tokens=5, messages=begun)
    assert said.content[0].type == "text" and said.content[0].text == " two"
    assert prompt(world) == "<|user|>hello<|assistant|>one"


async def test_answer_to_a_last_message_that_calls_a_tool_begins_a_message(
    world: World, claude: anthropic.AsyncAnthropic
) -> None:
    world.say("two")
    call: Any = {"type": "tool_use", "id": "c", "name": "weather", "input": {"city": "Oslo"}}
    await claude.messages.create(model=MODEL, max_tokens=5, messages=[*HELLO, {"role": "assistant", "content": [call]}])
    assert prompt(world) == "<|user|>hello<|assistant|>[weather Oslo]<|assistant|>"


@pytest.mark.parametrize(
    "content", [[], [{"type": "redacted_thinking", "data": "x"}], [{"type": "text", "text": ""}], ""]
)
async def test_last_message_of_the_assistant_that_says_nothing_begins_its_answer(world: World, content: Any) -> None:
    world.say("one")
    messages = [*HELLO, {"role": "assistant", "content": content}]
    response = await world.http.post("/v1/messages", json={"model": MODEL, "max_tokens": 5, "messages": messages})
    assert response.status_code == 200, response.text
    assert prompt(world) == "<|user|>hello<|assistant|>"


def test_text_that_comes_before_the_end_of_a_call_is_a_block_after_it() -> None:
    """Parsers give the text that follows a call together with the end of the call."""
    events = MessageEvents({})
    sent = events.opening(7, 4)
    sent += events.calls([CallPart(0, "1", "f", '{"a": "x')])
    sent += events.text(" Done.") + events.calls([CallPart(0, "", "", 'y"}')]) + events.text(" All.")
    sent += events.calls([CallPart(1, "2", "g", "{}")]) + events.text(" And more.")
    sent += events.ending(End("tool_calls", None, prompt_tokens=7, cached_tokens=4, tokens=9, reasoning_tokens=0))
    said = [json.loads(line[6:]) for line in sent.decode().splitlines() if line.startswith("data: ")]
    blocks: list[list[str]] = []
    for event in said:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks), "blocks come one after the other"
            blocks.append([event["content_block"]["type"], ""])
        elif event["type"] == "content_block_delta":
            assert event["index"] == len(blocks) - 1
            blocks[-1][1] += event["delta"].get("partial_json", "") + event["delta"].get("text", "")
    assert blocks == [["tool_use", '{"a": "xy"}'], ["text", " Done. All."], ["tool_use", "{}"], ["text", " And more."]]
    begun, ended = said[0]["message"]["usage"], said[-2]["usage"]
    assert {name: begun[name] for name in COUNTS} == {name: ended[name] for name in COUNTS}
    assert begun["input_tokens"] == 3


COUNTS = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
MANY: Any = [{"type": "text", "text": ""}] * (MOST_PARTS + 1)
RESULT: Any = {"type": "tool_result", "tool_use_id": "c7", "content": "x"}
CALLED: Any = {"type": "tool_use", "id": "1", "name": "weather", "input": {}}
IMAGE: Any = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "'image'"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]}, "tool_use_id"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
        ({"tools": [{**TOOL, "name": "not a name"}]}, "tools[0].name"),
        ({"stop_sequences": [str(number) for number in range(9)]}, "stop_sequences"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"system": "s", "messages": [*HELLO, {"role": "user", "content": [RESULT]}]}, "messages[1].content[0]"),
        ({"messages": [{"role": "user", "content": [RESULT]}]}, "no call before it has the id 'c7'"),
        ({"messages": [{"role": "assistant", "content": [{**CALLED, "input": [1]}]}]}, "messages[0].content[0].input"),
        ({"messages": [{"role": "user", "content": MANY}]}, f"at most {MOST_PARTS} parts"),
        ({"messages": [{"role": "user", "content": [{**RESULT, "content": MANY}]}]}, f"at most {MOST_PARTS} parts"),
        ({"system": MANY}, "'system'"),
        ({"system": 5}, "'system': must be a string or a list"),
        ({"stop_sequences": [""]}, "'stop_sequences': a stop string"),
        ({"temperature": 2}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"container": "c"}, "container"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "clear_tool_uses_20250919"),
        ({"context_management": {"edits": [{"type": "clear_thinking_20251015"}]}}, "context_management.edits[0].keep"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"not": 1}}}}, "output_config.format"),
        ({"output_config": {"effort": "much"}}, "output_config.effort"),
    ],
)
async def test_message_that_cannot_be_served_is_refused_by_name(
    world: World, change: dict[str, Any], named: str
) -> None:
    body = {"model": MODEL, "max_tokens": 5, "messages": HELLO, **change}
    response = await world.http.post("/v1/messages", json=body)
    said = response.json()
    assert response.status_code == 400 and said["type"] == "error", said
    assert said["error"]["type"] == "invalid_request_error" and named in said["error"]["message"]


async def test_errors_are_those_that_the_client_raises(world: World, claude: anthropic.AsyncAnthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        await claude.messages.create(model="nobody", max_tokens=5, messages=HELLO)

    async def refuses(running: Running) -> None:
        running.tokens(world.ids("one"))
        running.finish(common_pb2.REJECTED, "impossible")

    world.groups[0].script = refuses
    with pytest.raises(anthropic.APIError, match="impossible"):
        async with claude.messages.stream(model=MODEL, max_tokens=5, messages=HELLO) as stream:
            await stream.get_final_message()


async def test_unknown_path_and_method_below_messages_are_errors_in_the_form_of_the_api(world: World) -> None:
    for path, status, kind in (("", 405, "invalid_request_error"), ("/batches", 404, "not_found_error")):
        response = await world.http.get(f"/v1/messages{path}")
        assert (response.status_code, response.json()["type"]) == (status, "error")
        assert response.json()["error"]["type"] == kind


class TestKeys:
    """A gateway with keys."""

    @pytest.fixture
    def key(self) -> str:
        return "sk-mine"

    @pytest.fixture
    def settings(self, tmp_path: Path, key: str) -> dict[str, Any]:
        file = tmp_path / "keys.toml"
        file.write_text(f'[[key]]\nname = "me"\nhash = "{keys.digest(key)}"\n')
        file.chmod(0o600)
        return {"keys_file": str(file)}

    async def test_key_is_taken_from_the_header_that_anthropics_clients_send(self, world: World, key: str) -> None:
        world.say("one")
        body = {"model": MODEL, "max_tokens": 5, "messages": HELLO}
        for headers, status in (({"x-api-key": key}, 200), ({"x-api-key": "other"}, 401), ({}, 401)):
            response = await world.http.post("/v1/messages", json=body, headers=headers)
            assert response.status_code == status, response.text
            if status == 401:
                assert json.loads(response.text)["error"]["type"] == "authentication_error"
        async with anthropic.AsyncAnthropic(
            base_url=world.url, api_key=key, max_retries=0, timeout=PATIENCE_S
        ) as client:
            assert [model.id async for model in client.models.list()] == [MODEL]
        steered = await world.http.post("/v1/models", json={}, headers={"x-api-key": key})
        assert steered.status_code == 401
        chat = await world.http.post("/v1/chat/completions", json=world.body(), headers={"x-api-key": key})
        assert chat.status_code == 401, "OpenAI's paths have one place for a key"
