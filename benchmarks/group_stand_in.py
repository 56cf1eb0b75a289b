"""A gpu_scheduler without a queue and without engines: all streams get a token every 50 ms, in one message, as an
engine's decode step sends them. What the request path costs with it is the gateway's own cost.

    python benchmarks/group_stand_in.py unix:/tmp/group.sock
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import uvloop

from protos import common_pb2, gpu_scheduler_pb2, gpu_scheduler_pb2_grpc
from services import rpc, tasks

STEP_S = 0.05


class StandIn(gpu_scheduler_pb2_grpc.GpuSchedulerServicer):
    """Repeats the prompt's last tokens."""

    async def Serve(self, messages: AsyncIterator[gpu_scheduler_pb2.FromGateway], context: Any) -> Any:
        outgoing: asyncio.Queue[list[common_pb2.TokenChunk]] = asyncio.Queue()
        running: dict[str, list[Any]] = {}

        def advance(name: str) -> common_pb2.TokenChunk:
            ids, left = running[name]
            running[name][1] = left - 1
            chunk = common_pb2.TokenChunk(request_id=name, token_ids=[ids[left % 8]])
            if left == 1:
                chunk.finish = common_pb2.LENGTH
                del running[name]
            return chunk

        async def read() -> None:
            async for message in messages:
                submit = message.submit
                if message.WhichOneof("message") == "submit":
                    running[submit.request_id] = [list(submit.token_ids[-8:]), submit.sampling.max_new_tokens]
                    outgoing.put_nowait([advance(submit.request_id)])
                else:
                    running.pop(message.cancel.request_id, None)

        async def beat() -> None:
            loop = asyncio.get_running_loop()
            due = loop.time()
            while True:
                due += STEP_S
                await asyncio.sleep(due - loop.time())
                if running:
                    outgoing.put_nowait([advance(name) for name in list(running)])

        work = [tasks.spawn(read(), "read"), tasks.spawn(beat(), "beat")]
        try:
            while True:
                chunks = await outgoing.get()
                while not outgoing.empty():
                    chunks += outgoing.get_nowait()
                yield gpu_scheduler_pb2.ToGateway(chunks=chunks)
        finally:
            await tasks.cancel(*work)


async def main(address: str) -> None:
    server = rpc.Server(address)
    server.add(
        gpu_scheduler_pb2_grpc.add_GpuSchedulerServicer_to_server, StandIn(), "prism.gpu_scheduler.v1.GpuScheduler"
    )
    await server.start()
    await server.set_serving(True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1]))
