"""Streams whose model is not up."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from gateway.metrics import Count
from gateway.openai.endpoint import Reply
from protos import common_pb2, placement_pb2
from services.errors import Unavailable
from services.runtime import tasks
from services.telemetry.spans import UNTRACED
from testing.patience import PATIENCE_S
from tests.gateway import fakes
from tests.gateway.conftest import MODEL, World
from tests.gateway.fakes import Running
from tests.gateway.openai.test_completions import MESSAGES
from tests.gateway.test_app import refusal
from tests.gateway.test_metrics import CHAT, Since

WAKING, COMMENT = common_pb2.WAKING, ": waking"


@pytest.fixture
def settings() -> dict[str, Any]:
    return {"waking_comment_s": 0.02, "park_time_out_s": 60.0}


class Held:
    """A script that says nothing until it is let go, and then `text`."""

    def __init__(self, world: World, text: str) -> None:
        self.go = asyncio.Event()
        self._output = fakes.Output(world.ids(text))

    async def __call__(self, running: Running) -> None:
        await self.go.wait()
        await self._output(running)


@contextlib.asynccontextmanager
async def streamed(world: World, **more: Any) -> AsyncIterator[tuple[httpx.Response, AsyncIterator[str]]]:
    """A response that has begun, and its lines but empty ones."""
    async with world.http.stream("POST", CHAT, json=world.body(stream=True, **more)) as response:
        lines = (line async for line in response.aiter_lines() if line)
        yield response, lines


async def comments(lines: AsyncIterator[str], count: int) -> None:
    for _ in range(count):
        assert await anext(lines) == COMMENT


def said(lines: list[str]) -> dict[int, str]:
    """The text of each choice."""
    assert lines[-1] == "data: [DONE]"
    texts: dict[int, str] = {}
    for line in lines[:-1]:
        for choice in json.loads(line.removeprefix("data: "))["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + (choice["delta"].get("content") or "")
    return texts


@pytest.mark.parametrize("n", [1, 2])
async def test_waking_stream_gets_comments_until_its_model_is_active(world: World, n: int) -> None:
    held = world.groups[0].script = Held(world, "one two")
    await world.publish(world.route(fakes.place(world.groups[0], WAKING)))
    async with streamed(world, n=n) as (response, lines):
        assert (response.status_code, response.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        assert response.headers["x-request-id"]
        await comments(lines, 3)
        held.go.set()
        rest = [line async for line in lines if line != COMMENT]
    assert said(rest) == dict.fromkeys(range(n), "one two")


async def test_waking_stream_of_a_model_without_a_place_gets_comments(world: World) -> None:
    found = asyncio.Event()

    async def activate(request: placement_pb2.ActivateRequest) -> placement_pb2.Place:
        await found.wait()
        return fakes.place(world.groups[1], WAKING)

    world.placement.activate = activate
    world.say("one")
    await world.publish(world.route())
    async with streamed(world) as (_, lines):
        await comments(lines, 2)
        found.set()
        assert said([line async for line in lines if line != COMMENT]) == {0: "one"}


async def test_waking_stream_of_an_active_model_gets_no_comments(world: World) -> None:
    held = world.groups[0].script = Held(world, "one")
    up = fakes.place(world.groups[0])
    slow = fakes.place(world.groups[1], WAKING)
    world.groups[1].script = Held(world, "never")
    await world.publish(world.route(up), world.route(slow, name="org/asleep"), world.route(slow, up, name="org/both"))
    waiting = [tasks.spawn(world.chat(stream=True, model=model), "a test") for model in (MODEL, "org/both")]
    await world.groups[0].arrived(2)
    async with streamed(world, model="org/asleep") as (_, lines):
        await comments(lines, 5)
    held.go.set()
    for each in waiting:
        assert said((await each).text.split("\n\n")[:-1]) == {0: "one"}


async def test_waking_stream_gets_no_more_comments_once_its_model_is_active(world: World) -> None:
    held = world.groups[0].script = Held(world, "one")
    await world.publish(world.route(fakes.place(world.groups[0], WAKING)))
    async with streamed(world) as (_, lines):
        await comments(lines, 1)
        await world.publish(world.route(fakes.place(world.groups[0])))
        assert not world.placement.activations
        held.go.set()
        rest = [line async for line in lines]
    first_event = next(index for index, line in enumerate(rest) if line.startswith("data: "))
    assert COMMENT not in rest[first_event:]


async def test_waking_comments_are_sent_to_a_begun_stream_that_waits_for_another_place(world: World) -> None:
    said_before = world.ids("one two")

    async def breaks(running: Running) -> None:
        running.tokens(said_before[:1])
        running.finish(common_pb2.FAILED, "its engine died")

    world.groups[0].script = breaks
    held = world.groups[1].script = Held(world, "one two")

    async def activate(request: placement_pb2.ActivateRequest) -> placement_pb2.Place:
        await world.publish(world.route(fakes.place(world.groups[1], WAKING)))
        return fakes.place(world.groups[1], WAKING)

    world.placement.activate = activate
    async with streamed(world) as (_, lines):
        before = [line async for line in _until(lines, COMMENT)]
        await comments(lines, 2)
        held.go.set()
        rest = [line async for line in lines if line != COMMENT]
    assert said(before + rest) == {0: "one two"}


async def _until(lines: AsyncIterator[str], last: str) -> AsyncIterator[str]:
    async for line in lines:
        if line == last:
            return
        yield line


@pytest.mark.parametrize("settings", [{"waking_comment_s": 0.02, "park_time_out_s": 0.5}])
async def test_waking_failure_after_a_comment_is_an_error_event(world: World) -> None:
    world.groups[0].script = Held(world, "never")
    await world.publish(world.route(fakes.place(world.groups[0], WAKING)))
    since = Since()
    async with streamed(world) as (response, lines):
        assert response.status_code == 200
        *first, error, done = [line async for line in lines]
    assert set(first) == {COMMENT} and done == "data: [DONE]"
    told = json.loads(error.removeprefix("data: "))["error"]
    assert (told["code"], told["type"]) == ("model_not_ready", "service_unavailable_error")
    assert await since.all_requests(1) == {(MODEL, CHAT, "200", "model_not_ready"): 1}
    with pytest.raises(openai.APIError, match="could not be brought up"):
        async for _ in await world.openai.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True):
            pass
    refused = await world.chat()
    assert refusal(refused, 503)["code"] == "model_not_ready" and refused.headers["retry-after"]


@pytest.mark.parametrize("settings", [{"waking_comment_s": 0, "park_time_out_s": 0.3}])
async def test_waking_failure_with_comments_off_has_its_status(world: World) -> None:
    world.groups[0].script = Held(world, "never")
    await world.publish(world.route(fakes.place(world.groups[0], WAKING)))
    refused = await world.chat(stream=True)
    assert refusal(refused, 503)["code"] == "model_not_ready" and refused.headers["retry-after"]


@pytest.mark.parametrize("settings", [{"waking_comment_s": 60}])
async def test_waking_failure_before_the_first_comment_has_its_status(world: World) -> None:
    async def fails(running: Running) -> None:
        running.finish(common_pb2.REJECTED, "impossible")

    world.groups[0].script = fails
    await world.publish(world.route(fakes.place(world.groups[0], WAKING)))
    assert refusal(await world.chat(stream=True), 400)["message"] == "impossible"


async def test_waking_client_that_leaves_a_stream_of_comments_cancels_its_request(world: World) -> None:
    world.groups[0].script = Held(world, "never")
    await world.publish(world.route(fakes.place(world.groups[0], WAKING)))
    since = Since()
    async with httpx.AsyncClient(base_url=world.url, timeout=PATIENCE_S) as leaving:
        async with leaving.stream("POST", CHAT, json=world.body(stream=True)) as response:
            await comments((line async for line in response.aiter_lines() if line), 2)
    assert await since.all_requests(1) == {(MODEL, CHAT, "200", "client_gone"): 1}
    await asyncio.wait_for((await world.groups[0].arrived(1)).cancelled.wait(), PATIENCE_S)


@pytest.mark.parametrize("stream", [False, True])
async def test_waking_comment_after_the_answer_is_not_sent(stream: bool) -> None:
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    reply = Reply(send, [], UNTRACED, Count("a test"))
    if stream:
        await reply.events(b"data: [DONE]\n\n", more=False)
    else:
        await reply.fail(Unavailable("no"))
    answered = list(sent)
    await reply.comment()
    assert sent == answered and not sent[-1].get("more_body", False)
