"""The whole system with real SGLang: what `make serve` promises, seen through the official client."""

import asyncio
import json
import math
import os
import shutil
import signal

import jsonschema
import pytest
from openai import AsyncOpenAI, BadRequestError
from transformers import AutoTokenizer

from protos import common_pb2
from testing.patience import PATIENCE_S
from testing.systems.local import FOLDER, MODELS, world
from tests.end_to_end.reference import everything

pytestmark = pytest.mark.sglang
TEXTS = (
    "The file is opened",
    "A list is",
    "This function returns",
    "In the simplest case, the",
    "Note that the value of",
)


def path(model):
    return FOLDER / model


def prompts(model):
    tokenizer = AutoTokenizer.from_pretrained(path(model))
    return [tokenizer(text, add_special_tokens=False).input_ids for text in TEXTS]


def text_of(model, tokens):
    return AutoTokenizer.from_pretrained(path(model)).decode(tokens, skip_special_tokens=True)


async def expected_texts(new=40):
    """model -> (prompts, the texts that Transformers continues them with), and model -> all that it says of them."""
    said = await everything({path(model): prompts(model) for model in MODELS}, new)
    expected = {
        model: (prompts(model), [text_of(model, each) for each in said[path(model)].tokens]) for model in MODELS
    }
    return expected, {model: said[path(model)] for model in MODELS}


async def stream_text(client, model, prompt, new=40):
    text, usage = "", None
    stream = await client.completions.create(
        model=model,
        prompt=prompt,
        max_tokens=new,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    async for event in stream:
        usage = event.usage or usage
        for choice in event.choices:
            text += choice.text
    assert usage.prompt_tokens == len(prompt)
    return text


def with_tools(model, folder):
    """A copy of a model whose chat template shows it the tools there are."""
    shutil.copytree(path(model), folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = "{% if tools %}{{ tools | tojson }}{% endif %}" + settings["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return str(folder)


async def structured(client, model):
    """Answers of a JSON schema, calls that are required, and what cannot be compiled."""
    schema = {
        "type": "object",
        "properties": {
            "suite": {"enum": ["stable", "testing", "unstable"]},
            "packages": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
        },
        "required": ["suite", "packages"],
        "additionalProperties": False,
    }
    question = {"model": model, "messages": [{"role": "user", "content": "What is Debian?"}], "max_tokens": 500}

    def format(schema):
        return {"type": "json_schema", "json_schema": {"name": "debian", "schema": schema, "strict": True}}

    for temperature in (0, 1):
        answer = await client.chat.completions.create(
            **question, response_format=format(schema), temperature=temperature, seed=3
        )
        assert answer.choices[0].finish_reason == "stop", answer
        jsonschema.validate(json.loads(answer.choices[0].message.content), schema)
    with pytest.raises(BadRequestError, match="'type' at '#' must be"):
        await client.chat.completions.create(**question, response_format=format({"type": "strin"}), stream=True)
    with pytest.raises(BadRequestError, match="'uniqueItems' at '#/items' cannot be kept"):
        unkept = {"items": {"type": "array", "items": {"type": "string"}, "uniqueItems": True}}
        await client.chat.completions.create(**question, response_format=format(unkept))
    with pytest.raises(BadRequestError, match="its grammar cannot be followed: Invalid repetition range") as refused:
        await client.chat.completions.create(**question, extra_body={"regex": "a{1,2147483648}"})
    assert refused.value.param == "regex"

    tools = [{"type": "function", "function": {"name": name, "parameters": schema}} for name in ("search", "count")]
    answer = await client.chat.completions.create(
        **question, tools=tools, tool_choice="required", parallel_tool_calls=False, temperature=1, seed=4
    )
    (call,) = answer.choices[0].message.tool_calls
    assert answer.choices[0].finish_reason == "tool_calls" and call.function.name in ("search", "count")
    jsonschema.validate(json.loads(call.function.arguments), schema)
    chosen = {"type": "function", "function": {"name": "count"}}
    calls, reasons = [], []
    async for chunk in await client.chat.completions.create(
        **question, tools=tools, tool_choice=chosen, temperature=1, seed=5, stream=True
    ):
        assert not chunk.choices[0].delta.content
        calls += chunk.choices[0].delta.tool_calls or []
        reasons.append(chunk.choices[0].finish_reason)
    assert calls[0].function.name == "count" and {call.index for call in calls} == {0} and reasons[-1] == "tool_calls"
    jsonschema.validate(json.loads("".join(call.function.arguments for call in calls)), schema)


async def test_models_that_do_not_fit_together_answer_as_transformers_does_through_every_fault(tmp_path):
    """One system for the whole story: starting SGLang is what takes time."""
    expected, said = await expected_texts()
    models = {name: {} for name in MODELS} | {MODELS[0]: {"path": with_tools(MODELS[0], tmp_path / "tools")}}
    # Without a time to drain, whatever runs on the source of a move goes on at its target.
    async with world(
        "sglang", models, idle_s=0.5, poison=True, warm=0, placement={"rebalance": False, "drain_ms": 0}
    ) as it:
        client = AsyncOpenAI(base_url=it.base + "/v1", api_key="none", timeout=PATIENCE_S, max_retries=0)

        # All three at once: more than the two devices hold, so somebody has to leave and come back.
        async def all_of(model):
            ids, texts = expected[model]
            return [await stream_text(client, model, prompt) for prompt in ids] == texts

        assert await asyncio.gather(*(all_of(model) for model in MODELS)) == [True] * 3
        cluster = await it.placement.cluster()
        active = [m.model for g in cluster.groups for m in g.models if m.residency == common_pb2.ACTIVE]
        assert len(active) < 3, "three models were active at once: the test's devices are too large to show anything"

        # A chat by the model's own template.
        answer = await client.chat.completions.create(
            model=MODELS[0], messages=[{"role": "user", "content": "What is a list?"}], max_tokens=20, temperature=0
        )
        assert answer.choices[0].message.content and answer.usage.completion_tokens <= 20
        await structured(client, MODELS[0])
        await embeds(it, client, said[MODELS[2]].embeddings)
        await likelihoods(it, MODELS[0], expected[MODELS[0]][0], said[MODELS[0]].likely)

        # An engine killed in the middle of ten streams.
        model = MODELS[0]
        ids, texts = expected[model]
        await stream_text(client, model, ids[0])
        started = [asyncio.Event() for _ in range(10)]
        streams = [
            asyncio.get_running_loop().create_task(it.stream(model, ids[i % 5], 40, started[i])) for i in range(10)
        ]
        await asyncio.wait(
            [asyncio.get_running_loop().create_task(event.wait()) for event in started], timeout=PATIENCE_S
        )
        os.kill((await it.measured(model)).engine_pid, signal.SIGKILL)
        assert [text for text, _, _ in await asyncio.gather(*streams)] == [texts[i % 5] for i in range(10)]

        # balloond killed under the same.
        streams = [asyncio.get_running_loop().create_task(it.stream(model, ids[i % 5], 40)) for i in range(10)]
        it.kill("balloond")
        assert [text for text, _, _ in await asyncio.gather(*streams)] == [texts[i % 5] for i in range(10)]

        # Asleep and awake again, beside another that streams.
        await it.evict(model, common_pb2.HIBERNATING)
        beside = asyncio.get_running_loop().create_task(all_of(MODELS[1]))
        assert await stream_text(client, model, ids[1]) == texts[1]
        assert await beside
        await client.close()
        await moves_under_streams(it, MODELS[1], expected[MODELS[1]][0][:3])


async def embeds(it, client, vectors):
    """A checkpoint that makes text also makes embeddings, under another name, and in an engine that had another."""
    model, prompts_of_it = MODELS[2], prompts(MODELS[2])
    listing = common_pb2.ModelListing(name="embedder", path=str(path(model)), engine="sglang", task="embed")
    await it.placement.add_model(listing)

    async def listed():
        return "embedder" in {one["id"] for one in (await it.get("/v1/models"))[1]["data"]}

    await it.until(listed, "the gateway never heard of it")
    answer = await client.embeddings.create(model="embedder", input=prompts_of_it)
    for one, vector in zip(answer.data, vectors, strict=True):
        assert one.embedding == pytest.approx(vector, abs=1e-3)
    with pytest.raises(BadRequestError, match="makes embeddings"):
        await client.completions.create(model="embedder", prompt="The")
    await it.placement.remove_model("embedder", force=True)


async def likelihoods(it, model, ids, likely):
    """As lm-evaluation-harness asks for them, of tokens and of text; and of streams whose engine is killed."""
    asked = {"logprobs": 1, "echo": True, "seed": 1234}

    def check(told, right, answers):
        own, best = told["token_logprobs"], told["top_logprobs"]
        assert (own[0], best[0], len(own), len(best)) == (None, None, *[1 + len(right) + answers] * 2)
        best = [max(top.values()) for top in best[1:]]
        for one, top, (right_one, right_top) in zip(own[1:], best, right, strict=answers == 0):
            assert (one, top) == pytest.approx((right_one, right_top), abs=1e-3)
            assert (one == top) == (right_one == right_top) or right_top - right_one < 1e-3

    for tokens in (0, 1):
        choices = (await it.complete(model, ids, tokens, **asked))["choices"]
        assert [choice["index"] for choice in choices] == list(range(len(ids)))
        for choice, right in zip(choices, likely, strict=True):
            check(choice["logprobs"], right, tokens)
    for text, right in zip(TEXTS, likely, strict=True):
        told = (await it.complete(model, text, 0, **asked))["choices"][0]["logprobs"]
        added = len(told["tokens"]) - 1 - len(right)  # where the tokenizer adds none it is the same prompt
        assert added or check(told, right, 0) is None
        assert "".join(told["tokens"][added:]) == text and told["text_offset"][added] == 0

    for prompt, right in zip(ids, likely, strict=True):
        asked_of = {"query": prompt[:-2], "items": [prompt[-2:-1]], "label_token_ids": [prompt[-1]]}
        status, answer = await it.post("/v1/score", {"model": model, **asked_of})
        assert status == 200 and math.log(answer["scores"][0][0]) == pytest.approx(right[-1][0], abs=1e-3)

    async def streamed(i, started):
        told = {"token_logprobs": [], "top_logprobs": []}
        body = {"model": model, "prompt": ids[i], "max_tokens": 40, "temperature": 0, "stream": True, **asked}
        async with it.http.post(it.base + "/v1/completions", json=body | {"ignore_eos": True}) as answer:
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    scores = json.loads(line[6:])["choices"][0]["logprobs"] or {}
                    for name, values in told.items():
                        values += scores.get(name, [])
                    started.set()
        check(told, likely[i], 40)

    started = [asyncio.Event() for _ in ids]
    async with asyncio.TaskGroup() as streams:
        for i, event in enumerate(started):
            streams.create_task(streamed(i, event))
        await started[0].wait()
        os.kill((await it.measured(model)).engine_pid, signal.SIGKILL)


async def moves_under_streams(it, model, prompts, new=100):
    """The model moves to the other device. It serves there and here all the while, and no stream changes a token."""
    for one in MODELS:
        await it.away(one)

    async def answer(i, started=None):
        text, usage, finish = await it.stream(model, prompts[i], new, started, ignore_eos=True)
        return text, usage["prompt_tokens"], usage["completion_tokens"], finish

    undisturbed = await asyncio.gather(*map(answer, range(len(prompts))))
    here = (await it.resident(model))[0]
    there = {"cpu:0": "cpu:1", "cpu:1": "cpu:0"}[here]

    async def residencies():
        groups = (await it.placement.cluster()).groups
        return {group.group: m.residency for group in groups for m in group.models if m.model == model}

    async def move(source, target):
        moved, started = asyncio.Event(), [asyncio.Event() for _ in prompts]

        async def keep_asking(i):
            while not moved.is_set():
                assert await answer(i, started[i]) == undisturbed[i]

        async def wakes_while_it_serves():
            return await residencies() == {source: common_pb2.ACTIVE, target: common_pb2.WAKING}

        async def is_there():
            return list(await residencies()) == [target]

        replays = await replayed(it, model)
        async with asyncio.TaskGroup() as streams:
            for i in range(len(prompts)):
                streams.create_task(keep_asking(i))
            for event in started:
                await event.wait()
            loader = it.system.running["loader"].pid
            os.kill(loader, signal.SIGSTOP)  # the target wakes until it has its weights
            try:
                moving = streams.create_task(it.migrate(model, target))
                await it.until(wakes_while_it_serves, "the source did not serve while the target woke")
            finally:
                os.kill(loader, signal.SIGCONT)
            await moving
            moved.set()
        await it.until(is_there, "the source kept it")
        assert (await it.measured(model)).weights_from == [source], "the weights took another way"
        return await replayed(it, model) > replays, (told(it, "KV handed over") or [{"requests": 0}])[-1]

    # All streams may be between two requests when the source stops, or have computed nothing yet: then there was
    # nothing to hand over.
    for source, target in ((here, there), (there, here)) * 3:
        went_on, handed = await move(source, target)
        if went_on and handed["requests"] and handed["bytes"]:
            break
    assert went_on, "no stream was handed over"
    assert handed["requests"] > 0 and handed["model"] == model and handed["bytes"] > 0


def told(it, event):
    """What gpu_schedulers logged of it."""
    lines = [line for log in it.local.state.glob("logs/gpu_scheduler*.log") for line in log.read_text().splitlines()]
    events = [json.loads(line) for line in lines if line.startswith("{") and event in line]
    return [each for each in events if each.get("event") == event]


async def replayed(it, model):
    """How many requests of the model were sent to a second place."""
    async with it.http.get(it.base + "/metrics") as answer:
        lines = (await answer.text()).splitlines()
    name = f'prism_gateway_replays_total{{model="{model}"}}'
    return next((float(line.split()[-1]) for line in lines if line.startswith(name)), 0.0)
