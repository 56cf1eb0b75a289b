"""One gateway's stream: its requests come in, chunks of all of them go out, all that are ready in one message."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from protos import common_pb2, gpu_scheduler_pb2

MOST_SCORED = 4096
"""Prompt tokens whose log-probabilities share a message: with 20 alternatives each it has 1 MB. A message may have at
most 64 MB, and those of a long prompt alone are tens."""


class GatewayStream:
    """The outgoing side of a gateway's stream. `push` never waits; a gateway that reads slowly gets larger messages,
    not more of them, except for log-probabilities of prompts.

    `ready` is called when there is a message to `take` or the stream was closed, once until the next `take`.
    """

    def __init__(self, number: int, ready: Callable[[], None]) -> None:
        self.number = number
        self.closed = False
        self._chunks: list[common_pb2.TokenChunk] = []
        self._outlook: gpu_scheduler_pb2.Outlook | None = None
        """The group's outlook, if there is one to be sent."""
        self._ready = ready

    def push(self, chunk: common_pb2.TokenChunk) -> None:
        if not self.closed:
            self._chunks.append(chunk)
            if len(self._chunks) == 1 and self._outlook is None:
                self._ready()

    def tell(self, outlook: gpu_scheduler_pb2.Outlook) -> None:
        """Sends the group's outlook with the next message."""
        if not self.closed:
            waits = self._outlook is not None or self._chunks
            self._outlook = outlook
            if not waits:
                self._ready()

    def close(self) -> None:
        self.closed = True
        self._ready()

    def take(self) -> gpu_scheduler_pb2.ToGateway | None:
        """All ready chunks in one message; None if there are none. Many log-probabilities of prompts are split: then
        `ready` is called again for the rest."""
        if self.closed or not (self._chunks or self._outlook is not None):
            return None
        chunks, self._chunks = self._chunks, []
        outlook, self._outlook = self._outlook, None
        scored = 0
        for number, chunk in enumerate(chunks, start=1):
            scored += len(chunk.prompt_logprobs)
            if scored >= MOST_SCORED and number < len(chunks):
                self._chunks = chunks[number:]
                self._ready()
                return gpu_scheduler_pb2.ToGateway(chunks=chunks[:number], outlook=outlook)
        return gpu_scheduler_pb2.ToGateway(chunks=chunks, outlook=outlook)


class PulledStream(GatewayStream):
    """A stream whose transport pulls the next message when it has sent the last: gRPC."""

    def __init__(self, number: int) -> None:
        self._something = asyncio.Event()
        super().__init__(number, self._something.set)

    async def messages(self) -> AsyncIterator[gpu_scheduler_pb2.ToGateway]:
        """Yields messages until `close`."""
        while not self.closed:
            self._something.clear()
            if (message := self.take()) is not None:
                yield message
            else:
                await self._something.wait()
