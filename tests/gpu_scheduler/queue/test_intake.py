"""Requests whose grammars have not been tried yet, in front of a queue that writes down what it gets."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from gpu_scheduler.policy.permitted_grammars import MOST_CHARACTERS
from gpu_scheduler.queue.dispatcher import Dispatcher
from gpu_scheduler.queue.grammar_sandbox import GrammarSandbox
from gpu_scheduler.queue.intake import Intake
from gpu_scheduler.queue.streams import GatewayStream
from protos import common_pb2, gpu_scheduler_pb2
from services.errors import Unavailable


class Queue:
    def __init__(self) -> None:
        self.came: list[gpu_scheduler_pb2.Submit] = []
        self.cancelled: list[object] = []

    def submit(self, submit: gpu_scheduler_pb2.Submit, stream: GatewayStream) -> None:
        self.came.append(submit)

    def cancel(self, stream: GatewayStream, gateway_id: str) -> None:
        self.cancelled.append(gateway_id)

    def cancel_stream(self, stream: GatewayStream) -> None:
        self.cancelled.append(stream)

    @property
    def ids(self) -> list[str]:
        return [submit.request_id for submit in self.came]


class Tried:
    """Verdicts as the test gives them."""

    def __init__(self) -> None:
        self._verdicts: dict[str, asyncio.Future[str]] = {}
        self.closed = False

    def says(self, text: str) -> asyncio.Future[str]:
        return self._verdicts.setdefault(text, asyncio.get_running_loop().create_future())

    def known(self, kind: str, text: str) -> str | None:
        future = self._verdicts.get(text)
        return future.result() if future is not None and future.done() and not future.exception() else None

    async def verdict(self, kind: str, text: str) -> str:
        return await asyncio.shield(self.says(text))

    async def close(self) -> None:
        self.closed = True


class Desk:
    def __init__(self, compiles: bool = True) -> None:
        self.queue, self.tried, self.time = Queue(), Tried(), 100.0
        self.stream = GatewayStream(1, lambda: None)
        self.intake = Intake(
            cast(Dispatcher, self.queue), cast(GrammarSandbox, self.tried), lambda model: compiles, lambda: self.time
        )

    def ask(self, name: str, regex: str = "", **fields: int) -> None:
        sampling = common_pb2.Sampling(regex=regex) if regex else common_pb2.Sampling()
        submit = gpu_scheduler_pb2.Submit(request_id=name, model="m", sampling=sampling, **fields)
        self.intake.submit(submit, self.stream)

    def chunks(self) -> list[common_pb2.TokenChunk]:
        message = self.stream.take()
        return [] if message is None else list(message.chunks)

    def told(self) -> list[tuple[str, common_pb2.Finish, str]]:
        return [(chunk.request_id, chunk.finish, chunk.error) for chunk in self.chunks()]


async def settled() -> None:
    """Tasks that can go on have gone on."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_request_waits_until_its_grammar_was_tried_and_others_pass_it() -> None:
    desk = Desk()
    desk.ask("first", "a+")
    desk.ask("plain")
    await settled()
    assert desk.queue.ids == ["plain"]
    desk.tried.says("a+").set_result("")
    await settled()
    assert desk.queue.ids == ["plain", "first"]
    desk.ask("again", "a+")  # it is known
    assert desk.queue.ids == ["plain", "first", "again"] and desk.told() == []


async def test_grammar_that_cannot_be_compiled_is_refused_with_the_reason() -> None:
    desk = Desk()
    desk.ask("waits", "b+")
    desk.tried.says("b+").set_result("it is bad")
    await settled()
    desk.ask("known", "b+")
    desk.ask("too long", "b" * (MOST_CHARACTERS + 1))
    assert desk.queue.ids == []
    refused = desk.chunks()
    assert [(chunk.request_id, chunk.finish, chunk.grammar_refused) for chunk in refused] == [
        (name, common_pb2.REJECTED, True) for name in ("waits", "known", "too long")
    ]
    assert refused[0].error == refused[1].error == "its grammar cannot be followed: it is bad"
    assert "characters" in refused[2].error


async def test_request_fails_retryably_where_its_grammar_cannot_be_tried() -> None:
    desk = Desk()
    desk.ask("first", "a+")
    desk.tried.says("a+").set_exception(Unavailable("ask again"))
    await settled()
    assert desk.told() == [("first", common_pb2.FAILED, "ask again")] and desk.queue.ids == []


async def test_time_spent_on_trying_a_grammar_is_deducted_from_the_requests_targets() -> None:
    desk = Desk()
    desk.ask("timed", "a+", ttft_left_ms=500, time_out_left_ms=900)
    desk.ask("nearly over", "a+", ttft_left_ms=500, time_out_left_ms=300)
    desk.ask("endless", "a+", ttft_left_ms=500)
    await settled()
    desk.time += 0.7
    desk.tried.says("a+").set_result("")
    await settled()
    left = {submit.request_id: (submit.ttft_left_ms, submit.time_out_left_ms) for submit in desk.queue.came}
    assert left == {"timed": (-200, 200), "nearly over": (-200, 1), "endless": (-200, 0)}


async def test_request_cancelled_while_its_grammar_is_tried_never_comes_into_the_queue() -> None:
    desk = Desk()
    for name in ("one", "other"):
        desk.ask(name, "a+")
    await settled()
    desk.intake.cancel(desk.stream, "one")
    desk.intake.cancel(desk.stream, "there already")
    desk.tried.says("a+").set_result("")
    await settled()
    assert desk.queue.ids == ["other"] and desk.queue.cancelled == ["there already"] and desk.told() == []


async def test_request_cancelled_right_after_its_grammar_was_tried_is_cancelled_in_the_queue() -> None:
    desk = Desk()
    desk.ask("one", "a+")
    came = desk.queue.submit

    def cancelled_at_once(submit: gpu_scheduler_pb2.Submit, stream: GatewayStream) -> None:
        came(submit, stream)
        desk.intake.cancel(stream, submit.request_id)

    desk.queue.submit = cancelled_at_once  # type: ignore[method-assign]
    desk.tried.says("a+").set_result("")
    await settled()
    assert desk.queue.ids == desk.queue.cancelled == ["one"]


async def test_stream_that_ends_cancels_the_requests_that_wait_for_their_grammars() -> None:
    desk, gone = Desk(), GatewayStream(2, lambda: None)
    desk.ask("stays", "a+")
    submit = gpu_scheduler_pb2.Submit(request_id="goes", model="m", sampling=common_pb2.Sampling(regex="a+"))
    desk.intake.submit(submit, gone)
    await settled()
    desk.intake.cancel_stream(gone)
    desk.tried.says("a+").set_result("")
    await settled()
    assert desk.queue.ids == ["stays"] and desk.queue.cancelled == [gone]


async def test_id_of_a_request_that_waits_for_its_grammar_is_in_use_on_its_stream() -> None:
    desk = Desk()
    desk.ask("one", "a+")
    desk.ask("one")
    assert [(name, finish) for name, finish, _ in desk.told()] == [("one", common_pb2.REJECTED)]
    desk.tried.says("a+").set_result("")
    await settled()
    assert desk.queue.ids == ["one"]


@pytest.mark.parametrize("grammar", ["a+", "b" * 70_000])
async def test_grammar_for_an_engine_without_grammars_goes_into_the_queue_untried(grammar: str) -> None:
    desk = Desk(compiles=False)
    desk.ask("one", grammar)
    assert desk.queue.ids == ["one"]


async def test_closed_intake_passes_no_waiting_request_on() -> None:
    desk = Desk()
    desk.ask("one", "a+")
    await settled()
    await desk.intake.close()
    desk.tried.says("a+").set_result("")
    await settled()
    assert desk.queue.ids == [] and desk.tried.closed
