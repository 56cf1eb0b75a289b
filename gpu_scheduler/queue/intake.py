"""Requests on their way from gateways into the queue: one whose grammar has not been compiled yet waits until that was
tried (`grammar_sandbox.py`), the others pass."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial

from gpu_scheduler.policy import permitted_grammars
from gpu_scheduler.queue.dispatcher import Dispatcher
from gpu_scheduler.queue.grammar_sandbox import GrammarSandbox
from gpu_scheduler.queue.streams import GatewayStream
from protos import common_pb2, gpu_scheduler_pb2
from services.errors import Unavailable
from services.runtime import tasks

_Key = tuple[GatewayStream, str]


class Intake:
    """Stands in front of a dispatcher and has the same methods for requests."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        grammar_sandbox: GrammarSandbox,
        compiles: Callable[[str], bool],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`compiles`: whether a model's engine compiles grammars; one that does not refuses them itself."""
        self._dispatcher = dispatcher
        self._grammar_sandbox = grammar_sandbox
        self._compiles = compiles
        self._now = now
        self._waiting: dict[_Key, asyncio.Task[None]] = {}

    def submit(self, submit: gpu_scheduler_pb2.Submit, stream: GatewayStream) -> None:
        """Puts a request into the queue, at once or after its grammar was tried; or refuses it."""
        key = stream, submit.request_id
        kind = submit.sampling.WhichOneof("grammar")
        if key in self._waiting:
            _end(submit, stream, common_pb2.REJECTED, f"request id {submit.request_id} is in use on this stream")
        elif kind is None or not self._compiles(submit.model):
            self._dispatcher.submit(submit, stream)
        else:
            text = getattr(submit.sampling, kind)
            why = permitted_grammars.problem(kind, text) or self._grammar_sandbox.known(kind, text)
            if why is not None:
                self._pass(submit, stream, why)
            else:
                waiting = tasks.spawn(self._try(submit, stream, kind, text), f"try the grammar of {submit.request_id}")
                self._waiting[key] = waiting
                waiting.add_done_callback(partial(self._through, key))

    def cancel(self, stream: GatewayStream, gateway_id: str) -> None:
        """Cancels a request that its gateway gave up. No further chunk is sent."""
        waiting = self._waiting.get((stream, gateway_id))
        if waiting is not None:
            waiting.cancel()
        else:
            self._dispatcher.cancel(stream, gateway_id)

    def cancel_stream(self, stream: GatewayStream) -> None:
        """Cancels all requests of a gateway that is gone."""
        for (of_stream, _), waiting in list(self._waiting.items()):
            if of_stream is stream:
                waiting.cancel()
        self._dispatcher.cancel_stream(stream)

    def follow_outlook(self, stream: GatewayStream, follow: bool) -> None:
        """Has a gateway be told the group's outlook, or no more."""
        self._dispatcher.outlook_news.follow(stream, follow)

    def take(self, message: gpu_scheduler_pb2.FromGateway, stream: GatewayStream) -> None:
        """Does what a gateway's message says."""
        kind = message.WhichOneof("message")
        if kind == "submit":
            self.submit(message.submit, stream)
        elif kind == "follow_outlook":
            self.follow_outlook(stream, message.follow_outlook.follow)
        else:
            self.cancel(stream, message.cancel.request_id)

    async def close(self) -> None:
        """Cancels the requests that still wait, without an answer: the group has ended."""
        await tasks.cancel(*self._waiting.values())
        await self._grammar_sandbox.close()

    async def _try(self, submit: gpu_scheduler_pb2.Submit, stream: GatewayStream, kind: str, text: str) -> None:
        began = self._now()
        try:
            why = await self._grammar_sandbox.verdict(kind, text)
            del self._waiting[stream, submit.request_id]  # a cancellation from now on is the queue's matter
        except Unavailable as error:
            _end(submit, stream, common_pb2.FAILED, str(error))
            return
        except Exception:  # our own fault, which is logged; the client gets an answer all the same
            _end(submit, stream, common_pb2.FAILED, "its grammar could not be tried")
            raise
        took_ms = round(1e3 * (self._now() - began))
        submit.ttft_left_ms -= took_ms
        if submit.time_out_left_ms > 0:
            submit.time_out_left_ms = max(1, submit.time_out_left_ms - took_ms)
        self._pass(submit, stream, why)

    def _through(self, key: _Key, waited: asyncio.Task[None]) -> None:
        if self._waiting.get(key) is waited:
            del self._waiting[key]

    def _pass(self, submit: gpu_scheduler_pb2.Submit, stream: GatewayStream, why: str) -> None:
        if why:
            error = f"its grammar cannot be followed: {why}"
            _end(submit, stream, common_pb2.REJECTED, error, grammar_refused=True)
        else:
            self._dispatcher.submit(submit, stream)


def _end(
    submit: gpu_scheduler_pb2.Submit,
    stream: GatewayStream,
    finish: common_pb2.Finish,
    error: str,
    *,
    grammar_refused: bool = False,
) -> None:
    stream.push(
        common_pb2.TokenChunk(request_id=submit.request_id, finish=finish, error=error, grammar_refused=grammar_refused)
    )
