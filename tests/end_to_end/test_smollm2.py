"""SmolLM2-135M-Instruct, as `make serve MODELS=smollm2` serves it: what it says is what Transformers says."""

import asyncio
import json

import jsonschema
import pytest
import pytest_asyncio
from openai import AsyncOpenAI
from transformers import AutoTokenizer

from deploy.local import sizing
from deploy.local.devices import MIB, host_bytes_free
from deploy.local.models import read_all
from protos import common_pb2
from testing.patience import PATIENCE_S
from testing.systems.local import catalogue, world
from tests.end_to_end.reference import greedy

pytestmark = [pytest.mark.sglang, pytest.mark.asyncio(loop_scope="module")]
MODEL = "smollm2"
NEW = 10
"""Tokens of an answer; "short" ends by itself before."""
CALL = 14
"""Tokens of the beginning of a call, to the function's name."""
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Name of the city"}},
            "required": ["city"],
        },
    },
}


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def call(city):
    function = {"name": "get_weather", "arguments": json.dumps({"city": city})}
    return assistant(None) | {"tool_calls": [{"id": city, "type": "function", "function": function}]}


def result(city, **weather):
    return {"role": "tool", "tool_call_id": city, "content": json.dumps(weather)}


# It learns from two calls to make a third.
ASKED = [
    *(user("What is the weather in Oslo?"), call("Oslo"), result("Oslo", temperature=4, sky="rain")),
    *(assistant("It is 4 degrees in Oslo, with rain."), user("What is the weather in Rome?"), call("Rome")),
    *(result("Rome", temperature=25, sky="sun"), assistant("It is 25 degrees in Rome, with sun.")),
    user("What is the weather in Paris?"),
]
TOLD = [*ASKED, call("Paris"), result("Paris", temperature=21, sky="sun")]
CHATS = {
    "short": [user("What is the capital of France?")],
    "cut": [user("What is gravity?")],
    "system": [{"role": "system", "content": "You are a pirate."}, user("Hello!")],
    "turns": [user("What is 2+2?"), assistant("4"), user("And  2+3? Numbers:\n\n  10  20")],
}
TOOL_CHATS = {"asked": ASKED, "told": TOLD}
TEXTS = {
    "prose": "The largest ocean on Earth is",
    "code": "def fibonacci(n):\n    if n  <  2:\n        return",
    "other": "¿Qué hora es? Son las  12",
}


def as_templates_take_it(message):
    """The arguments of calls are objects there."""
    if not message.get("tool_calls"):
        return message
    calls = [
        {**each, "function": {**each["function"], "arguments": json.loads(each["function"]["arguments"])}}
        for each in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


@pytest.fixture(scope="module")
def tokenizer(smollm2):
    return AutoTokenizer.from_pretrained(smollm2)


@pytest.fixture(scope="module")
def prompts(tokenizer):
    """Name -> token ids of a chat's or a text's prompt, as Transformers makes it."""

    def templated(messages, tools=None):
        messages = list(map(as_templates_take_it, messages))
        options = {"tools": tools, "add_generation_prompt": True, "return_dict": False}
        return tokenizer.apply_chat_template(messages, **options)

    return {
        **{name: templated(messages) for name, messages in CHATS.items()},
        **{name: templated(messages, [WEATHER]) for name, messages in TOOL_CHATS.items()},
        **{name: tokenizer(text, add_special_tokens=False).input_ids for name, text in TEXTS.items()},
    }


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def system(smollm2, prompts, tokenizer, tmp_path_factory, executed):
    """(world, client, name -> (text that Transformers says to a prompt, whether it has ended))."""
    new = [CALL if name == "asked" else NEW for name in prompts]
    reference = asyncio.get_running_loop().create_task(greedy(smollm2, list(prompts.values()), new))
    models = {MODEL: {"path": str(smollm2)}}
    listed = read_all(catalogue(tmp_path_factory.mktemp("catalogue"), "sglang", models))
    ((mib,),) = sizing.sized(listed, host_bytes_free()).mib
    local = {"devices": {"cpu:0": mib * MIB}, "host_capacity_bytes": 1 << 30, "warm": 0}
    async with world("sglang", models, **local) as it:
        await it.complete(MODEL, TEXTS["prose"], 1)  # it comes up beside the reference
        said = {
            name: (tokenizer.decode(tokens, skip_special_tokens=True), tokens[-1] == tokenizer.eos_token_id)
            for name, tokens in zip(prompts, await reference, strict=True)
        }
        async with AsyncOpenAI(base_url=it.base + "/v1", api_key="none", timeout=PATIENCE_S, max_retries=0) as client:
            yield it, client, said


async def whole_chat(client, messages, **keys):
    answer = await client.chat.completions.create(model=MODEL, messages=messages, max_tokens=NEW, temperature=0, **keys)
    (choice,) = answer.choices
    return choice.message.content, choice.finish_reason == "stop"


async def streamed_chat(client, messages, **keys):
    text, reasons = "", []
    async for chunk in await client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=NEW, temperature=0, stream=True, **keys
    ):
        text += chunk.choices[0].delta.content or ""
        reasons.append(chunk.choices[0].finish_reason)
    return text, reasons[-1] == "stop"


async def whole_text(client, prompt):
    answer = await client.completions.create(model=MODEL, prompt=prompt, max_tokens=NEW, temperature=0)
    return answer.choices[0].text, answer.choices[0].finish_reason == "stop"


async def streamed_text(client, prompt):
    text, reasons = "", []
    async for chunk in await client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=NEW, temperature=0, stream=True
    ):
        text += chunk.choices[0].text
        reasons.append(chunk.choices[0].finish_reason)
    return text, reasons[-1] == "stop"


async def answers(client, chat, text):
    """Name -> (what is answered, whether it has ended), all asked at once."""
    asked = {name: chat(client, messages) for name, messages in CHATS.items()}
    asked |= {"told": chat(client, TOLD, tools=[WEATHER])}
    asked |= {name: text(client, prompt) for name, prompt in TEXTS.items()}
    return dict(zip(asked, await asyncio.gather(*asked.values()), strict=True))


async def test_smollm2_greedy_answers_are_those_of_transformers(system):
    _, client, said = system
    expected = {name: said[name] for name in said if name != "asked"}
    assert await answers(client, whole_chat, whole_text) == expected
    assert await answers(client, streamed_chat, streamed_text) == expected
    # It is the model that it should be, not only the same one twice.
    assert said["short"] == ("The capital of France is Paris.", True) and not said["cut"][1]


async def test_smollm2_chat_prompts_are_those_of_transformers(system, prompts):
    it, client, _ = system
    for name, messages in CHATS.items():
        status, answer = await it.post("/tokenize", {"model": MODEL, "messages": messages})
        assert (status, answer["tokens"]) == (200, prompts[name])
    for name, messages in TOOL_CHATS.items():
        answer = await client.chat.completions.create(model=MODEL, messages=messages, tools=[WEATHER], max_tokens=1)
        assert answer.usage.prompt_tokens == len(prompts[name])


@pytest.mark.parametrize("stream", [False, True])
async def test_smollm2_tool_call_made_by_choice_is_found(system, stream):
    _, client, said = system
    body = {"model": MODEL, "messages": ASKED, "tools": [WEATHER], "max_tokens": 60, "temperature": 0}
    if stream:
        chunks = [chunk.choices[0] async for chunk in await client.chat.completions.create(**body, stream=True)]
        reason, parts = chunks[-1].finish_reason, [part for one in chunks for part in one.delta.tool_calls or []]
        calls = [part for part in parts if part.function.name]
        assert len(calls) == 1 < len(parts), "arguments come in pieces"
        calls[0].function.arguments = "".join(part.function.arguments for part in parts)
        content = "".join(one.delta.content or "" for one in chunks)
    else:
        (choice,) = (await client.chat.completions.create(**body)).choices
        reason, calls, content = choice.finish_reason, choice.message.tool_calls, choice.message.content
    assert said["asked"][0].startswith('<tool_call>\n{"name": "get_weather"')
    assert reason == "tool_calls" and not content
    assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == [
        ("get_weather", {"city": "Paris"})
    ]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
async def test_smollm2_required_tool_call_fits_the_schema_of_the_function(system, choice):
    _, client, _ = system
    parameters = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["city", "days"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": parameters}}
    answer = await client.chat.completions.create(
        model=MODEL, messages=[user("What is the weather in Paris?")], tools=[tool], tool_choice=choice, max_tokens=60,
        temperature=0, parallel_tool_calls=False,
    )  # fmt: skip
    (made,) = answer.choices[0].message.tool_calls
    assert made.function.name == "get_weather"
    jsonschema.validate(json.loads(made.function.arguments), parameters)


async def test_smollm2_answer_with_a_json_schema_fits_it(system):
    _, client, _ = system
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Paris"]}, "rivers": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["city", "rivers"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "capital", "schema": schema, "strict": True}}
    answer = await client.chat.completions.create(
        model=MODEL, messages=CHATS["short"], response_format=form, max_tokens=60, temperature=0
    )
    assert answer.choices[0].finish_reason == "stop"
    told = json.loads(answer.choices[0].message.content)
    jsonschema.validate(told, schema)
    assert told["city"] == "Paris"


async def test_smollm2_after_hibernation_gives_the_same_answers(system):
    it, client, said = system
    await it.evict(MODEL, common_pb2.HIBERNATING)
    await it.wait_residency(MODEL, common_pb2.HIBERNATING)
    asked = {"cut": streamed_chat(client, CHATS["cut"]), "code": whole_text(client, TEXTS["code"])}
    answered = dict(zip(asked, await asyncio.gather(*asked.values()), strict=True))
    assert answered == {name: said[name] for name in asked}
