"""OpenAI's client for Python: each call as an application writes it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pydantic
import pytest

from gpu_scheduler.engines.echo.rule import embedding
from testing.patience import PATIENCE_S
from tests.clients.conftest import COMMENTS, DIMENSIONS, EMBEDDER, KEY, SLEEPER
from tests.gateway.conftest import MODEL, World

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "strict": True,
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
SAID = 'Look: <tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
ENFORCED = '[{"name": "weather", "parameters": {"city": "Bern"}}, {"name": "weather", "parameters": {"city": "Chur"}}]'


def ask(text: str) -> Any:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}]}


@pytest.fixture
async def client(parrot: World) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{parrot.url}/v1", api_key=KEY, max_retries=0, timeout=PATIENCE_S
    ) as client:
        yield client


async def test_python_client_lists_models_and_retrieves_one(client: openai.AsyncOpenAI) -> None:
    assert sorted([model.id async for model in client.models.list()]) == sorted([MODEL, EMBEDDER, SLEEPER])
    assert (await client.models.retrieve(MODEL)).id == MODEL


async def test_python_client_gets_a_chat_whole_and_streamed(client: openai.AsyncOpenAI) -> None:
    whole = await client.chat.completions.create(**ask("hello"), n=2, stop=["never"], seed=1)
    assert [choice.message.content for choice in whole.choices] == ["hello", "hello"]
    stream = await client.chat.completions.create(
        **ask("héllo 世界"), stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "héllo 世界"
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens > 0


async def test_python_client_gets_a_completion_whole_and_streamed(client: openai.AsyncOpenAI) -> None:
    whole = await client.completions.create(model=MODEL, prompt=["one two", "hello"], max_tokens=2)
    assert [choice.finish_reason for choice in whole.choices] == ["length", "stop"]
    stream = await client.completions.create(model=MODEL, prompt="one two", stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "one two"


async def test_stop_string_ends_a_chat_of_the_python_client(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(**ask("one two three"), stop=" two")
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("one", "stop")


async def test_python_client_gets_tool_calls_and_sends_the_turns_after_them(
    client: openai.AsyncOpenAI, parrot: World
) -> None:
    choice = (await client.chat.completions.create(**ask(SAID), tools=TOOLS, tool_choice="auto")).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Look: ")
    calls = choice.message.tool_calls or []
    assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == [
        ("weather", {"city": "Bern"})
    ]
    turns: Any = [
        *ask(SAID)["messages"],
        choice.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": calls[0].id, "content": "rain"},
    ]
    after = await client.chat.completions.create(model=MODEL, messages=turns, tools=TOOLS)
    assert (after.choices[0].message.content, after.choices[0].finish_reason) == ("rain", "stop")
    sent = parrot.groups[0].requests[-1].submit
    assert sent.sampling.WhichOneof("grammar") == "structural_tag", "the function is strict"
    written = (
        await parrot.http.post(
            "/detokenize", json={"model": MODEL, "tokens": list(sent.token_ids)}, headers=parrot.bearer(KEY)
        )
    ).json()["prompt"]
    assert written.startswith("<tool_call>[{") and "[Bern]" in written


async def test_tool_calls_are_streamed_to_the_python_client(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(**ask(SAID), tools=TOOLS, stream=True)
    text, calls, reasons = "", [], []
    async for chunk in stream:
        text += chunk.choices[0].delta.content or ""
        calls += chunk.choices[0].delta.tool_calls or []
        reasons.append(chunk.choices[0].finish_reason)
    assert (text, reasons[-1]) == ("Look: ", "tool_calls")
    assert [(call.index, call.function.name, call.function.arguments) for call in calls if call.function] == [
        (0, "weather", '{"city": "Bern"}')
    ]


async def test_required_tool_calls_of_the_python_client_have_a_grammar(
    client: openai.AsyncOpenAI, parrot: World
) -> None:
    async with client.chat.completions.stream(**ask(ENFORCED), tools=TOOLS, tool_choice="required") as stream:
        final = await stream.get_final_completion()
    message = final.choices[0].message
    assert not message.content and [call.function.name for call in message.tool_calls or []] == ["weather"] * 2
    assert 'root ::= "[" r' in (many := parrot.groups[0].requests[-1].submit.sampling.ebnf)
    named: Any = {"type": "function", "function": {"name": "weather"}}
    one = await client.chat.completions.create(**ask(ENFORCED), tools=TOOLS, tool_choice=named)
    assert len(one.choices[0].message.tool_calls or []) == 2, "the grammar, which a parrot does not keep, has one"
    assert many != parrot.groups[0].requests[-1].submit.sampling.ebnf
    none = await client.chat.completions.create(**ask(SAID), tools=TOOLS, tool_choice="none")
    assert none.choices[0].message.content == SAID and not none.choices[0].message.tool_calls
    single = await client.chat.completions.create(**ask(SAID + SAID), tools=TOOLS, parallel_tool_calls=False)
    assert len(single.choices[0].message.tool_calls or []) == 1


async def test_answer_with_tools_and_a_response_format_is_calls_or_has_the_format(
    client: openai.AsyncOpenAI, parrot: World
) -> None:
    form: Any = {"type": "json_object"}
    for said, reason in (('{"city": "Bern"}', "stop"), (SAID, "tool_calls")):
        answer = await client.chat.completions.create(**ask(said), tools=TOOLS, response_format=form)
        assert answer.choices[0].finish_reason == reason
        ebnf = parrot.groups[0].requests[-1].submit.sampling.ebnf
        assert '"<tool_call>\\n{\\"name\\": \\"weather\\", \\"arguments\\": "' in ebnf and "object" in ebnf
    must: Any = "required"
    answer = await client.chat.completions.create(**ask(ENFORCED), tools=TOOLS, tool_choice=must, response_format=form)
    assert len(answer.choices[0].message.tool_calls or []) == 2


class City(pydantic.BaseModel):
    name: str
    people: int


async def test_json_schema_answer_is_parsed_by_the_python_client(client: openai.AsyncOpenAI, parrot: World) -> None:
    answer = await client.chat.completions.parse(**ask('{"name": "Bern", "people": 5}'), response_format=City)
    assert answer.choices[0].message.parsed == City(name="Bern", people=5)
    assert '", " "\\"people\\": " integer "}"' in parrot.groups[0].requests[-1].submit.sampling.ebnf


@pytest.mark.parametrize("written", [{}, {"encoding_format": "float"}], ids=["base64", "float"])
async def test_python_client_gets_embeddings_of_texts_and_tokens(client: openai.AsyncOpenAI, written: Any) -> None:
    """Base64 is what the client asks for where its user says nothing."""
    answer = await client.embeddings.create(model=EMBEDDER, input=[[5, 6, 7], [8, 9]], **written)
    assert [one.index for one in answer.data] == [0, 1] and answer.usage.prompt_tokens == 5
    for one, tokens in zip(answer.data, ([5, 6, 7], [8, 9]), strict=True):
        assert one.embedding == pytest.approx(embedding(tokens, DIMENSIONS), abs=1e-6)
    first, again = (await client.embeddings.create(model=EMBEDDER, input=["hello", "hello"], **written)).data
    assert first.embedding == again.embedding and len(first.embedding) == DIMENSIONS
    short = (await client.embeddings.create(model=EMBEDDER, input="hello", dimensions=2, **written)).data[0].embedding
    assert len(short) == 2 and sum(value * value for value in short) == pytest.approx(1)


async def test_model_of_the_wrong_kind_is_refused_to_the_python_client(client: openai.AsyncOpenAI) -> None:
    for asked in (
        client.embeddings.create(model=MODEL, input="hello"),
        client.chat.completions.create(model=EMBEDDER, messages=[{"role": "user", "content": "hello"}]),
        client.completions.create(model=EMBEDDER, prompt="hello"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            await asked
        assert refused.value.param == "model"


async def test_errors_are_raised_as_classes_of_the_python_client(client: openai.AsyncOpenAI) -> None:
    create: Any = client.chat.completions.create
    with pytest.raises(openai.NotFoundError):
        await create(model="none", messages=ask("hello")["messages"])
    with pytest.raises(openai.BadRequestError) as refused:
        await create(**ask("hello"), temperature=3)
    assert refused.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as refused:
        await create(**ask("hello"), tools=TOOLS, extra_body={"regex": "a"})
    assert refused.value.param == "regex"
    with pytest.raises(openai.AuthenticationError):
        await client.with_options(api_key="wrong").models.list()


async def test_comments_of_a_waking_model_are_ignored_by_the_python_client(
    client: openai.AsyncOpenAI, parrot: World
) -> None:
    asked = {**ask("one two"), "model": SLEEPER}
    stream = await client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "one two"
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens
    async with client.chat.completions.stream(**asked) as gathered:
        assert (await gathered.get_final_completion()).choices[0].message.content == "one two"
    stream = await client.completions.create(model=SLEEPER, prompt="one two", stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "one two"
    raw = await client.chat.completions.with_raw_response.create(**asked, stream=True)
    assert (await raw.http_response.aread()).count(b": waking\n\n") >= COMMENTS, "there were any"
    with pytest.raises(openai.APIError, match="this is impossible"):
        async for _ in await client.chat.completions.create(**{**ask("impossible"), "model": SLEEPER}, stream=True):
            pass


async def test_timeout_or_closed_stream_of_the_python_client_frees_the_engine(
    client: openai.AsyncOpenAI, parrot: World
) -> None:
    requests = parrot.groups[0].requests
    before = len(requests)
    while len(requests) == before:  # on a busy machine it may give up before it has asked
        with pytest.raises(openai.APITimeoutError):
            await client.chat.completions.create(**ask("for ever"), timeout=0.3)
    stream = await client.chat.completions.create(**ask("for ever"), stream=True)
    await anext(stream)
    await stream.close()
    async with asyncio.timeout(PATIENCE_S):
        for running in requests[before:]:
            await running.cancelled.wait()
