"""One gateway's stream: its requests come in, chunks of all of them go out, as many as are ready in one message."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from protos import common_pb2, gpu_scheduler_pb2


class GatewayStream:
    """The outgoing side. `push` never waits; a gateway that reads slowly gets larger messages, not more of them."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.closed = False
        self._chunks: list[common_pb2.TokenChunk] = []
        self._ready = asyncio.Event()

    def push(self, chunk: common_pb2.TokenChunk) -> None:
        if not self.closed:
            self._chunks.append(chunk)
            self._ready.set()

    def close(self) -> None:
        self.closed = True
        self._ready.set()

    async def messages(self) -> AsyncIterator[gpu_scheduler_pb2.ToGateway]:
        """Until `close`."""
        while True:
            await self._ready.wait()
            if self.closed:
                return
            self._ready.clear()
            chunks, self._chunks = self._chunks, []
            yield gpu_scheduler_pb2.ToGateway(chunks=chunks)
