"""Generation over HTTP, as OpenAI's clients and raw ones see it."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any

import httpx
import openai
import pytest

from gateway import metrics
from protos import common_pb2
from testing.patience import PATIENCE_S
from tests.gateway import fakes, tokenizers
from tests.gateway.conftest import MODEL, World
from tests.gateway.fakes import Running
from tests.gateway.test_app import refusal
from tests.gateway.test_grpc_api import ask, generate

MESSAGES: Any = [{"role": "user", "content": "hello"}]


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a streamed response, checked to end as they should."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


async def test_chat_is_answered_whole(world: World) -> None:
    said = world.say("the quick brown fox")
    answer = await world.openai.chat.completions.create(model=MODEL, messages=MESSAGES)
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == (
        "assistant",
        "the quick brown fox",
        "stop",
    )
    assert answer.usage is not None
    prompt = world.groups[0].requests[0].submit.token_ids
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), len(said))
    assert answer.usage.total_tokens == len(prompt) + len(said)


async def test_chat_is_streamed_in_whole_characters(world: World) -> None:
    world.say("héllo, 世界 😀")
    stream = await world.openai.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(texts) == "héllo, 世界 😀"
    assert not any("\ufffd" in text for text in texts)
    assert [chunk.choices[0].finish_reason for chunk in chunks][-2:] == [None, "stop"]
    assert len({chunk.id for chunk in chunks}) == 1


async def test_stream_ends_with_its_usage_if_requested(world: World) -> None:
    said = world.say("one two three")
    response = await world.chat(stream=True, stream_options={"include_usage": True})
    *tokens, last = events(response)
    assert all(event["usage"] is None for event in tokens)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == len(said)
    assert "usage" not in events(await world.chat(stream=True))[0]


async def test_stream_headers_disable_proxy_buffering_and_echo_the_request_id(world: World) -> None:
    world.say("one")
    response = await world.http.post(
        "/v1/chat/completions", json=world.body(stream=True), headers={"x-request-id": "mine-1"}
    )
    assert response.headers["x-accel-buffering"] == "no"
    assert response.headers["x-request-id"] == "mine-1"
    assert events(response)[0]["id"] == "chatcmpl-mine-1"
    assert (await world.chat()).headers["x-request-id"]
    assert world.groups[0].requests[0].submit.request_id.startswith("mine-1/")


@pytest.mark.parametrize("stream", [False, True])
async def test_completion_accepts_every_form_of_prompt(world: World, stream: bool) -> None:
    world.say("fox")
    ids = world.ids("hello")
    with_start = [0, *ids]
    for prompt, expected in [
        ("hello", [with_start]),
        (["hello", "hello"], [with_start, with_start]),
        (ids, [ids]),
        ([ids, with_start], [ids, with_start]),
    ]:
        before = len(world.groups[0].requests)
        response = await world.complete(prompt=prompt, stream=stream)
        texts = [""] * len(expected)
        for event in events(response) if stream else [response.json()]:
            for choice in event["choices"]:
                texts[choice["index"]] += choice["text"]
        assert texts == ["fox"] * len(expected)
        sent = [list(request.submit.token_ids) for request in world.groups[0].requests[before:]]
        assert sent == expected


async def test_n_choices_are_answered_and_the_prompt_counted_once(world: World) -> None:
    said = world.say("one two")
    answer = (await world.chat(n=3, seed=7)).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert {choice["message"]["content"] for choice in answer["choices"]} == {"one two"}
    requests = world.groups[0].requests
    assert [request.submit.sampling.seed for request in requests] == [7, 8, 9]
    assert answer["usage"]["prompt_tokens"] == len(requests[0].submit.token_ids)
    assert answer["usage"]["completion_tokens"] == 3 * len(said)


async def test_n_choices_are_streamed_side_by_side(world: World) -> None:
    world.say("one two")
    texts = {0: "", 1: ""}
    finished = []
    for event in events(await world.chat(n=2, stream=True)):
        for choice in event["choices"]:
            texts[choice["index"]] += choice["delta"].get("content") or ""
            if choice["finish_reason"]:
                finished.append(choice["index"])
    assert texts == {0: "one two", 1: "one two"}
    assert sorted(finished) == [0, 1]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_across_tokens_ends_the_answer_and_frees_the_engine(world: World, stream: bool) -> None:
    said = world.ids("one two three four five")

    async def goes_on(running: Running) -> None:
        for token in said:
            running.tokens([token])
        await running.cancelled.wait()

    world.groups[0].script = goes_on
    response = await world.chat(stop=["o three"], stream=stream)
    if stream:
        told = events(response)
        text = "".join(event["choices"][0]["delta"].get("content") or "" for event in told)
        reason = told[-1]["choices"][0]["finish_reason"]
    else:
        choice = response.json()["choices"][0]
        text, reason = choice["message"]["content"], choice["finish_reason"]
        counted = response.json()["usage"]["completion_tokens"]
        assert world.ids("one two three") == said[:counted]
    assert (text, reason) == ("one tw", "stop")
    await asyncio.wait_for((await world.groups[0].arrived(1)).cancelled.wait(), PATIENCE_S)


async def test_max_tokens_limits_and_defaults_to_the_rest_of_the_context(world: World) -> None:
    world.say("one two three four five", end=False)
    answer = (await world.chat(max_tokens=2)).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 2
    world.say("one")
    await world.chat(max_completion_tokens=5, max_tokens=400)
    await world.chat()
    await world.complete()
    limited, chat, completion = (request.submit for request in world.groups[0].requests[-3:])
    assert limited.sampling.max_new_tokens == 5
    assert chat.sampling.max_new_tokens == 512 - len(chat.token_ids)
    assert completion.sampling.max_new_tokens == 16


async def test_sampling_parameters_reach_the_engine(world: World) -> None:
    world.say("one")
    await world.chat(
        temperature=0.5,
        top_p=0.9,
        seed=11,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        top_k=40,
        min_p=0.05,
        stop_token_ids=[7],
        user="ignored",
        store=True,
    )
    sampling = world.groups[0].requests[0].submit.sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed, sampling.top_k) == (0.5, 0.9, 11, 40)
    assert sampling.min_p == 0.05
    assert (sampling.presence_penalty, sampling.frequency_penalty, list(sampling.stop_token_ids)[0]) == (0.5, -0.5, 7)
    assert [tokenizers.tiny().id_to_token(token) for token in sampling.stop_token_ids[1:]] == ["</s>"]
    await world.chat()
    sampling = world.groups[0].requests[1].submit.sampling
    assert (sampling.temperature, sampling.HasField("seed"), sampling.logprobs) == (1.0, False, False)


def _drawn(sampling: common_pb2.Sampling) -> tuple[float, float, int, float, float]:
    return sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p, sampling.repetition_penalty


SAYS = common_pb2.SamplingDefaults(temperature=0.6, top_p=0.9, top_k=20, min_p=0.1)


async def _publish_one_that_says(world: World) -> None:
    place = fakes.place(world.groups[0])
    await world.publish(world.route(place), world.route(place, name="says", sampling=SAYS))
    world.say("one")


async def test_sampling_defaults_of_a_model_apply_where_a_request_sets_none(world: World) -> None:
    await _publish_one_that_says(world)
    await world.chat(model="says")
    await world.openai.completions.create(model="says", prompt="hello")
    await world.chat(model="says", temperature=0, top_p=1.0, top_k=-1, min_p=0, repetition_penalty=1.2)
    await world.chat(model="says", temperature=1.5, n=2)
    await world.chat()
    drawn = [_drawn(request.submit.sampling) for request in world.groups[0].requests]
    assert drawn[:2] == [(0.6, 0.9, 20, 0.1, 0.0)] * 2
    assert drawn[2] == (0.0, 1.0, 0, 0.0, 1.2)
    assert drawn[3:5] == [(1.5, 0.9, 20, 0.1, 0.0)] * 2
    assert drawn[5] == (1.0, 0.0, 0, 0.0, 0.0)


@pytest.mark.parametrize("settings", [{"sampling_defaults": "openai"}])
async def test_sampling_defaults_of_openai_apply_if_the_gateway_is_set_to_them(world: World) -> None:
    await _publish_one_that_says(world)
    await world.chat(model="says")
    assert _drawn(world.groups[0].requests[0].submit.sampling) == (1.0, 0.0, 0, 0.0, 0.0)


async def test_grpc_request_gets_no_sampling_defaults_of_its_model(world: World) -> None:
    await _publish_one_that_says(world)
    request = ask()
    request.model = "says"
    await generate(world, request)
    assert _drawn(world.groups[0].requests[0].submit.sampling) == (0.0, 0.0, 0, 0.0, 0.0)


def _scored(world: World, text: str) -> fakes.Script:
    """Says `text`, each token with a log-probability of minus its position and one alternative."""
    ids = world.ids(text)

    async def script(running: Running) -> None:
        for position, token in enumerate(ids):
            top = [common_pb2.TopLogprob(token_id=ids[0], logprob=-0.5)]
            running.tokens([token], logprobs=[common_pb2.TokenLogprob(logprob=-position, top=top)])
        running.finish(common_pb2.STOP)

    return script


@pytest.mark.parametrize("stream", [False, True])
async def test_chat_logprobs_name_tokens_and_bytes(world: World, stream: bool) -> None:
    world.groups[0].script = _scored(world, "one 世")
    response = await world.chat(logprobs=True, top_logprobs=1, stream=stream)
    content = []
    for event in events(response) if stream else [response.json()]:
        content += (event["choices"][0]["logprobs"] or {"content": []})["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == "one 世"
    assert [entry["logprob"] for entry in content] == [-float(n) for n in range(len(content))]
    assert all(entry["top_logprobs"][0]["logprob"] == -0.5 for entry in content)
    sampling = world.groups[0].requests[0].submit.sampling
    assert (sampling.logprobs, sampling.top_logprobs) == (True, 1)


@pytest.mark.parametrize("stream", [False, True])
async def test_completion_logprobs_have_offsets(world: World, stream: bool) -> None:
    world.groups[0].script = _scored(world, "one two")
    response = await world.complete(logprobs=1, stream=stream)
    tokens: list[str] = []
    offsets: list[int] = []
    for event in events(response) if stream else [response.json()]:
        scores = event["choices"][0]["logprobs"]
        if scores:
            tokens += scores["tokens"]
            offsets += scores["text_offset"]
            assert len(scores["token_logprobs"]) == len(scores["tokens"]) == len(scores["top_logprobs"])
    assert "".join(tokens) == "one two"
    assert offsets == [len("".join(tokens[:n])) for n in range(len(tokens))]


@pytest.mark.parametrize("stream", [False, True])
async def test_completion_with_echo_begins_with_the_prompt(world: World, stream: bool) -> None:
    world.say(" fox")
    response = await world.complete(prompt=["the quick", "lazy"], echo=True, stream=stream)
    texts = ["", ""]
    for event in events(response) if stream else [response.json()]:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == ["the quick fox", "lazy fox"]


async def test_cached_prompt_tokens_are_in_the_usage(world: World) -> None:
    async def cached(running: Running) -> None:
        running.tokens(world.ids("one"), cached_tokens=4, prompt_tokens=len(running.submit.token_ids))
        running.finish(common_pb2.STOP)

    world.groups[0].script = cached
    assert (await world.chat()).json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}


async def test_chat_template_is_that_of_the_models_folder(world: World) -> None:
    world.say("one")
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
    ]
    await world.chat(messages=messages)
    ids = world.groups[0].requests[0].submit.token_ids
    expected = "<s><|system|>be brief\n<|user|>one two\n<|assistant|>"
    assert list(ids) == world.ids(expected)
    error = refusal(await world.chat(messages=[{"role": "forbidden", "content": ""}]), 400)
    assert error["param"] == "messages"
    assert "no such role" in str(error["message"])


async def test_slo_targets_come_from_headers_or_else_from_the_model(world: World) -> None:
    default = common_pb2.Slo(ttft_ms=5000, tpot_ms=100)
    await world.publish(world.route(fakes.place(world.groups[0]), default_slo=default))
    world.say("one")
    headers = {"x-slo-ttft-ms": "250000", "x-slo-drop": "late"}
    await world.http.post("/v1/chat/completions", json=world.body(), headers=headers)
    await world.chat()
    given, by_default = (request.submit for request in world.groups[0].requests)
    assert (given.slo.ttft_ms, given.slo.tpot_ms, given.slo.drop_late, given.has_target) == (250_000, 100, True, True)
    assert 0 < given.ttft_left_ms <= 250_000
    assert (by_default.slo.ttft_ms, by_default.slo.drop_late, by_default.has_target) == (5000, False, True)


@pytest.mark.parametrize(
    ("headers", "more", "ttft_ms"),
    [
        ({}, {}, 5000),
        ({"x-priority": "interactive"}, {}, 5000),
        ({"x-priority": "batch"}, {}, 0),
        ({}, {"service_tier": "flex"}, 0),
        ({}, {"service_tier": "priority"}, 5000),
        ({"x-slo-ttft-ms": "70"}, {"service_tier": "flex"}, 70),
    ],
)
async def test_request_of_priority_batch_has_no_targets(
    world: World, headers: dict[str, str], more: dict[str, Any], ttft_ms: int
) -> None:
    default = common_pb2.Slo(ttft_ms=5000, tpot_ms=100)
    await world.publish(world.route(fakes.place(world.groups[0]), default_slo=default))
    world.say("one")
    answer = await world.http.post("/v1/chat/completions", json=world.body(**more), headers=headers)
    assert answer.status_code == 200
    (request,) = world.groups[0].requests
    assert request.submit.slo.ttft_ms == ttft_ms and request.submit.has_target == bool(ttft_ms)


async def test_target_beside_priority_batch_is_refused_by_name(world: World) -> None:
    headers = {"x-priority": "batch", "x-slo-tpot-ms": "5"}
    response = await world.http.post("/v1/chat/completions", json=world.body(), headers=headers)
    assert refusal(response, 400)["param"] == "x-slo-tpot-ms"


@pytest.mark.parametrize("header", ["x-slo-ttft-ms", "x-slo-tpot-ms", "x-slo-drop", "x-priority"])
async def test_slo_header_that_is_no_number_is_named(world: World, header: str) -> None:
    response = await world.http.post("/v1/chat/completions", json=world.body(), headers={header: "soon"})
    assert refusal(response, 400)["param"] == header


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_client_that_goes_away_frees_the_engine(world: World, stream: bool, path: str) -> None:
    started = asyncio.Event()

    async def endless(running: Running) -> None:
        running.tokens(world.ids("one"))
        started.set()
        await running.cancelled.wait()

    world.groups[0].script = endless
    body = {"model": MODEL, "stream": stream, "messages": MESSAGES, "prompt": "hello"}
    async with httpx.AsyncClient(base_url=world.url, timeout=PATIENCE_S) as leaving:
        task = asyncio.get_running_loop().create_task(leaving.post(path, json=body))
        running = await asyncio.wait_for(world.groups[0].arrived(1), PATIENCE_S)
        await asyncio.wait_for(started.wait(), PATIENCE_S)
        task.cancel()
        await asyncio.wait_for(running.cancelled.wait(), PATIENCE_S)
    world.say("two")
    assert (await world.chat()).status_code == 200


async def test_chat_with_an_unknown_model_is_a_404(world: World) -> None:
    error = refusal(await world.chat(model="org/none"), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError):
        await world.openai.chat.completions.create(model="org/none", messages=MESSAGES)


async def test_request_of_a_model_whose_sizes_are_unknown_may_be_repeated(world: World) -> None:
    """An engine has it, but its files cannot be read: no prompt is too long for a context of 0."""
    await world.publish(world.route(fakes.place(world.groups[0])), world.route(fakes.place(world.groups[0]), name="x"))
    await world.publish(world.route(fakes.place(world.groups[0]), name="x", context_tokens=0))
    answer = await world.complete(model="x")
    error = refusal(answer, 503)
    assert (error["code"], error["message"]) == ("unavailable", "the files of model 'x' cannot be read now")
    assert answer.headers["retry-after"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_completion_beyond_the_context_is_refused_by_field(world: World, path: str) -> None:
    chat = path.startswith("/v1/chat")

    async def ask(text: str, **more: Any) -> httpx.Response:
        prompt = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
        return await world.http.post(path, json={"model": MODEL, **prompt, **more})

    error = refusal(await ask("z" * 600), 400)
    assert (error["param"], error["code"]) == ("messages" if chat else "prompt", "context_length_exceeded")
    assert "512" in str(error["message"])
    error = refusal(await ask("hello", max_tokens=512), 400)
    assert (error["param"], error["code"]) == ("max_tokens", "context_length_exceeded")
    if chat:
        assert refusal(await ask("hello", max_completion_tokens=512), 400)["param"] == "max_completion_tokens"
    assert not world.groups[0].requests


@pytest.mark.parametrize("settings", [{"max_tokens_beyond_context": "cut"}])
async def test_max_tokens_beyond_the_context_are_cut_if_the_gateway_is_set_to_that(world: World) -> None:
    world.say("one two three " * 300, end=False)
    for answer in (
        await world.chat(max_tokens=10_000),
        await world.chat(max_completion_tokens=512),
        await world.chat(max_tokens=1 << 62, min_tokens=600),
        await world.complete(max_tokens=10_000, prompt=["hello", "a b c"]),
    ):
        assert answer.status_code == 200, answer.text
        assert {choice["finish_reason"] for choice in answer.json()["choices"]} == {"length"}
        submits = [request.submit for request in world.groups[0].requests]
        assert all(len(each.token_ids) + each.sampling.max_new_tokens == 512 for each in submits)
    cut = ask()
    cut.sampling.max_new_tokens = 10_000
    assert (await generate(world, cut))[-1].finish == common_pb2.LENGTH
    await world.chat(max_tokens=5)
    assert world.groups[0].requests[-1].submit.sampling.max_new_tokens == 5
    for prompt in ("z" * 600, [5] * 512):
        error = refusal(await world.complete(prompt=prompt, max_tokens=100), 400)
        assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")


@pytest.mark.parametrize("prompt", [[], [[]], [10**6], [-1]])
async def test_empty_or_out_of_vocabulary_prompt_is_refused(world: World, prompt: Any) -> None:
    route = world.route(fakes.place(world.groups[0]))
    route.model.vocab_size = 500
    await world.publish(route)
    assert refusal(await world.complete(prompt=prompt), 400)["param"] == "prompt"


async def test_engine_failure_after_the_first_token_is_an_error_event(world: World) -> None:
    async def breaks(running: Running) -> None:
        running.tokens(world.ids("one"))
        running.finish(common_pb2.REJECTED, "impossible")

    world.groups[0].script = breaks
    told = events(await world.chat(stream=True))
    assert told[-1]["error"]["message"] == "impossible"
    with pytest.raises(openai.APIError, match="impossible"):
        stream = await world.openai.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
        async for _ in stream:
            pass


async def test_request_rejected_by_an_engine_is_a_400(world: World) -> None:
    async def rejects(running: Running) -> None:
        running.finish(common_pb2.REJECTED, "impossible")

    world.groups[0].script = rejects
    assert refusal(await world.chat(stream=True), 400)["message"] == "impossible"


@pytest.mark.parametrize(
    "asked",
    [
        {"regex": "a{2,1}"},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "string"}}}},
    ],
)
async def test_refusal_of_a_grammar_names_the_field_that_it_came_from(world: World, asked: dict[str, Any]) -> None:
    async def refuses(running: Running) -> None:
        running.tokens((), finish=common_pb2.REJECTED, error="its grammar cannot be followed", grammar_refused=True)

    world.groups[0].script = refuses
    for stream in (False, True):
        error = refusal(await world.chat(stream=stream, **asked), 400)
        assert (error["param"], error["message"]) == (next(iter(asked)), "its grammar cannot be followed")


async def test_request_whose_adapter_an_engine_cannot_use_is_a_503_of_the_model(world: World) -> None:
    async def breaks(running: Running) -> None:
        running.finish(common_pb2.BROKEN, "adapter a: it has values that are no numbers")

    world.groups[0].script = breaks
    error = refusal(await world.chat(), 503)
    assert error["code"] == "model_error" and "no numbers" in error["message"]


def outcomes() -> Counter[str]:
    """Of answers, so far."""
    samples = (sample for metric in metrics.ANSWERS.collect() for sample in metric.samples)
    found: Counter[str] = Counter()
    for each in samples:
        if each.name.endswith("_total"):
            found[each.labels["outcome"]] += int(each.value)
    return found


async def test_completion_late_request_with_slo_drop_is_a_503(world: World) -> None:
    async def late(running: Running) -> None:
        running.finish(common_pb2.LATE, "late: 1 s of prefill to do, 0 s of slack left")

    world.groups[0].script = late
    before = outcomes()
    headers = {"x-slo-ttft-ms": "5", "x-slo-drop": "late"}
    response = await world.http.post("/v1/chat/completions", json=world.body(stream=True), headers=headers)
    told = refusal(response, 503)
    assert told["code"] == "slo_ttft_missed"
    assert told["message"].startswith("the first token would have come after its target") and "slack" in told["message"]
    assert outcomes() - before == {"late": 1}, "nobody is to be called for what a client asked for"


async def test_chat_body_that_is_no_request_is_refused(world: World) -> None:
    for body in (b"{", b"", b"\xff\xfe", b"[]", b'"text"', b"{}"):
        error = refusal(await world.http.post("/v1/chat/completions", content=body), 400)
        assert error["type"] == "invalid_request_error"
