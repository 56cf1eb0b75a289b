"""A gpu_scheduler without a queue and without engines: all streams get a token every 50 ms, in one message, as an
engine's decode step sends them. What the request path costs with it is the gateway's own cost.

    python benchmarks/group_stand_in.py unix:/tmp/group.sock
"""

from __future__ import annotations

import asyncio
import sys

import uvloop

from protos import common_pb2, gpu_scheduler_pb2
from services.ipc import sockets
from services.ipc.framing import FramedChannel
from services.rpc import rpc

STEP_S = 0.05


class StandIn:
    """One gateway's stream. Repeats the prompt's last tokens."""

    def __init__(self) -> None:
        self._running: dict[str, tuple[list[int], int]] = {}
        """By request: what it repeats, and how many tokens are left."""
        self.channel = FramedChannel(gpu_scheduler_pb2.FromGateway, self._take)

    def _take(self, message: gpu_scheduler_pb2.FromGateway) -> None:
        submit = message.submit
        if message.WhichOneof("message") == "submit":
            self._running[submit.request_id] = (list(submit.token_ids[-8:]), submit.sampling.max_new_tokens)
            self._send([submit.request_id])
        else:
            self._running.pop(message.cancel.request_id, None)

    def step(self) -> None:
        if self._running:
            self._send(list(self._running))

    def _send(self, names: list[str]) -> None:
        self.channel.send(gpu_scheduler_pb2.ToGateway(chunks=[self._advance(name) for name in names]))

    def _advance(self, name: str) -> common_pb2.TokenChunk:
        ids, left = self._running[name]
        chunk = common_pb2.TokenChunk(request_id=name, token_ids=[ids[left % len(ids)]])
        if left > 1:
            self._running[name] = (ids, left - 1)
        else:
            chunk.finish = common_pb2.LENGTH
            del self._running[name]
        return chunk


async def main(address: str) -> None:
    server = rpc.Server(address)
    await server.start()
    streams: list[StandIn] = []

    def connect() -> asyncio.Protocol:
        streams.append(StandIn())
        return streams[-1].channel

    loop = asyncio.get_running_loop()
    await loop.create_unix_server(connect, sockets.stream_path(address))
    await server.set_serving(True)
    due = loop.time()
    while True:
        due += STEP_S
        await asyncio.sleep(due - loop.time())
        for stream in streams:
            stream.step()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1]))
