"""How much is taken at once."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from typing import Any

import grpc
import httpx
import pytest

from gateway import app, metrics
from gateway.http import protocol
from protos import common_pb2, gateway_pb2, gateway_pb2_grpc
from services.rpc import rpc
from testing.patience import PATIENCE_S
from tests.gateway.conftest import MODEL, World
from tests.gateway.fakes import Running
from tests.gateway.openai.test_completions import events
from tests.gateway.test_app import refusal
from tokenization.tokenizer import Tokenizer


@pytest.fixture
def settings() -> dict[str, Any]:
    return {"most_in_flight": 2}


async def test_requests_beyond_the_most_in_flight_are_a_429_with_retry_after(world: World) -> None:
    release = asyncio.Event()

    async def waits(running: Running) -> None:
        await release.wait()
        running.finish(common_pb2.STOP)

    world.groups[0].script = waits
    taken = [asyncio.get_running_loop().create_task(world.chat()) for _ in range(2)]
    await asyncio.wait_for(world.groups[0].arrived(2), PATIENCE_S)
    response = await world.chat()
    assert refusal(response, 429)["code"] == "too_many_in_flight"
    assert int(response.headers["retry-after"]) > 0
    release.set()
    for task in taken:
        assert (await task).status_code == 200
    assert (await world.chat()).status_code == 200


async def test_choices_each_count_as_in_flight(world: World) -> None:
    world.say("one")
    assert refusal(await world.chat(n=3), 429)
    assert (await world.chat(n=2)).status_code == 200


async def test_a_refused_request_leaves_nothing_in_flight(world: World) -> None:
    for _ in range(5):
        refusal(await world.chat(max_tokens=10_000), 400)
    world.say("one")
    assert (await world.chat(n=2)).status_code == 200


@pytest.mark.parametrize("kind", ["json_schema", "regex", "ebnf"])
async def test_grammar_that_no_engine_accepts_is_refused_by_the_gateway(world: World, kind: str) -> None:
    error = refusal(await world.chat(**{kind: "a" * (1 + (1 << 16))}), 400)
    assert error["param"] == kind and not world.groups[0].requests
    world.say("one")
    assert (await world.chat(n=2)).status_code == 200


async def test_long_grammar_with_very_many_answers_is_refused(world: World) -> None:
    error = refusal(await world.chat(regex="a" * 40_000, n=128), 400)
    assert error["param"] == "regex" and "5120000 with 128 answers" in str(error["message"])
    world.say("one")
    assert (await world.chat(regex="a" * 40_000, n=2)).status_code == 200


async def test_long_prompts_and_tool_call_arguments_are_tokenized_in_a_thread(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []
    encode = Tokenizer.encode

    def noted(tokenizer: Tokenizer, text: str, special: bool, most: int | None = None) -> list[int]:
        threads.append(threading.get_ident())
        return encode(tokenizer, text, special)

    world.say("one")
    await world.complete(prompt="a")  # the tokenizer is loaded
    monkeypatch.setattr(Tokenizer, "encode", noted)
    here = threading.get_ident()
    await world.complete(prompt=["a" * 100] * 2)
    assert threads == [here, here]
    threads.clear()
    await world.complete(prompt=["a" * 3000] * 2)
    assert len(threads) == 2 and here not in threads
    threads.clear()
    call = {"function": {"name": "f", "arguments": '{"a": "%s"}' % ("a" * 5000)}}
    await world.chat(messages=[{"role": "assistant", "tool_calls": [call]}, {"role": "user", "content": "so?"}])
    assert len(threads) == 1 and here not in threads


_CAME_AS_GRPC_STOPPED = (grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED)
"""Codes of a call that arrives while grpc.aio stops taking calls: it is cancelled, or (3 of 1,000 that come just then)
it stays without an answer until the server's grace is over."""


@pytest.mark.parametrize("settings", [{"drain_s": 60}])
async def test_gateway_that_stops_finishes_its_requests_and_accepts_no_more(world: World) -> None:
    release = asyncio.Event()

    async def waits(running: Running) -> None:
        running.tokens(world.ids("one"))
        if running is world.groups[0].requests[0]:  # others may come before it stops
            await release.wait()
        running.finish(common_pb2.STOP)

    world.groups[0].script = waits
    open_stream = asyncio.get_running_loop().create_task(world.chat(stream=True))
    await asyncio.wait_for(world.groups[0].arrived(1), PATIENCE_S)
    stopping = asyncio.get_running_loop().create_task(world.service._end())
    async with rpc.channel(world.grpc_address) as channel:
        while True:
            try:
                request = gateway_pb2.GenerateRequest(model=MODEL, text="hello")
                await gateway_pb2_grpc.InferenceStub(channel).Generate(request, timeout=PATIENCE_S).read()
            except grpc.aio.AioRpcError as refused:
                assert refused.code() in (grpc.StatusCode.UNAVAILABLE, *_CAME_AS_GRPC_STOPPED)
                break
    release.set()
    assert (await open_stream).text.endswith("data: [DONE]\n\n")
    await stopping


@pytest.mark.parametrize("settings", [{"drain_s": 60}])
@pytest.mark.parametrize("waits", [{"first_request_s": PATIENCE_S}])
async def test_request_on_a_connection_made_before_the_stop_is_answered(world: World) -> None:
    world.say("one")
    host, _, port = world.url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    await world.chat()  # so it was taken
    stopping = asyncio.get_running_loop().create_task(world.service._end())
    while True:
        try:
            async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
                await client.get(f"{world.url}/health")
        except httpx.HTTPError:  # nobody is taken any more
            break
    body = b'{"model": "%s", "prompt": "hello"}' % MODEL.encode()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
    writer.close()
    await stopping


@pytest.mark.parametrize("settings", [{"drain_s": 4.0}])
async def test_gateway_requests_cut_off_by_a_stop_get_an_error(world: World) -> None:
    async def never_ends(running: Running) -> None:
        running.tokens(world.ids("one"))

    world.groups[0].script = never_ends
    loop = asyncio.get_running_loop()
    stream, whole = loop.create_task(world.chat(stream=True)), loop.create_task(world.chat())
    await asyncio.wait_for(world.groups[0].arrived(2), PATIENCE_S)
    await world.service._end()
    said = events(await stream)
    assert said[0]["choices"][0]["delta"] and said[-1]["error"]["message"] == "this gateway is stopping"
    assert refusal(await whole, 503)["message"] == "this gateway is stopping"


async def test_client_that_reads_nothing_loses_its_requests_after_a_timeout(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "READ_TIME_OUT_S", 0.2)
    over = asyncio.Event()

    async def says_much(running: Running) -> None:
        words = world.ids("hello " * 50)
        try:
            while not over.is_set():
                running.tokens(words)
                await asyncio.sleep(0)
        finally:
            over.set()

    world.groups[0].script = says_much
    body = json.dumps({"model": MODEL, "prompt": "hello", "max_tokens": 500, "stream": True, "ignore_eos": True})
    head = f"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: {len(body)}\r\n\r\n"
    host, port = world.url.removeprefix("http://").split(":")
    quiet = socket.create_connection((host, int(port)))
    try:
        quiet.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        quiet.sendall((head + body).encode())
        await asyncio.wait_for(world.groups[0].arrived(1), PATIENCE_S)
        async with asyncio.timeout(PATIENCE_S):
            while metrics.IN_FLIGHT._value.get():
                await asyncio.sleep(0.01)
    finally:
        over.set()
        quiet.close()


async def test_gateway_request_above_a_size_bound_is_refused_by_field(world: World) -> None:
    stops = refusal(await world.complete(stop=["x" * 1025]), 400)
    assert (stops["param"], "at most 1024 characters" in str(stops["message"])) == ("stop", True)
    deep = '{"a":' * 70 + "1" + "}" * 70
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": deep}}]}
    arguments = refusal(await world.chat(messages=[call]), 400)
    assert (arguments["param"], "64 levels" in str(arguments["message"])) == ("messages[0].tool_calls", True)
    for number in (400, 982):  # as deep as Python reads, and deeper than it writes
        call["tool_calls"][0]["function"]["arguments"] = '{"a":' * number + "1" + "}" * number  # type: ignore[index]
        assert refusal(await world.chat(messages=[call]), 400)["param"] == "messages[0].tool_calls"
    long = await world.http.post("/tokenize", json={"model": MODEL, "prompt": "a" * (app.MOST_CHARACTERS + 1)})
    assert refusal(long, 400)["param"] == "prompt"
    request = gateway_pb2.GenerateRequest(model=MODEL, text="hello", stop=["x" * 1025])
    async with rpc.channel(world.grpc_address) as channel:
        with pytest.raises(grpc.aio.AioRpcError, match="at most 1024 characters"):
            await gateway_pb2_grpc.InferenceStub(channel).Generate(request).read()
    assert not world.groups[0].requests
