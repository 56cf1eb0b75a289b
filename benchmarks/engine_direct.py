"""The echo engine called directly: its own protocol on the socket pair that it inherits, nothing in between."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.http_load import Stream
from protos import common_pb2, engine_pb2
from services.ipc.framing import FramedChannel
from services.runtime import tasks

ROOT = Path(__file__).resolve().parents[1]


class DirectEngine:
    """One engine process with one model."""

    def __init__(self) -> None:
        self._streams: dict[str, tuple[Stream, asyncio.Future[None]]] = {}
        self._number = 0
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] = self._loop.create_future()

    async def start(self, model: common_pb2.ModelSpec, step_ms: int) -> None:
        ours, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "gpu_scheduler.engines.echo", "--channel-fd", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            cwd=ROOT,
        )
        theirs.close()
        self._channel = await FramedChannel(engine_pb2.FromEngine).open(ours)
        self._reader = tasks.spawn(self._read(), "read the engine")
        load = engine_pb2.Load(command_id=1, model=model, device="cpu:0", options={"step_ms": str(step_ms)})
        self._channel.send(engine_pb2.ToEngine(load=load))
        await self._ready

    async def _read(self) -> None:
        while (message := await self._channel.recv()) is not None:
            kind = message.WhichOneof("message")
            if kind == "tokens":
                now = time.monotonic()
                for chunk in message.tokens.chunks:
                    stream, done = self._streams[chunk.request_id]
                    stream.token_s.extend([now] * len(chunk.token_ids))
                    if chunk.finish:
                        if chunk.finish != common_pb2.LENGTH:
                            stream.error = chunk.error or "ended early"
                        done.set_result(None)
            elif kind == "done":
                self._ready.set_result(None)
            elif kind == "failed":
                self._ready.set_exception(RuntimeError(message.failed.reason))
        for _, done in self._streams.values():
            done.set_exception(RuntimeError("the engine is gone"))
        if not self._ready.done():
            self._ready.set_exception(RuntimeError("the engine did not start"))

    async def ask(self, token_ids: list[int], tokens: int) -> Stream:
        self._number += 1
        name = str(self._number)
        sampling = common_pb2.Sampling(max_new_tokens=tokens, ignore_eos=True)
        generate = engine_pb2.Generate(request_id=name, token_ids=token_ids, sampling=sampling, priority=self._number)
        done = self._loop.create_future()
        stream = Stream(time.monotonic())
        self._streams[name] = (stream, done)
        self._channel.send(engine_pb2.ToEngine(generate=generate))
        await done
        del self._streams[name]
        return stream

    async def close(self) -> None:
        self._channel.send(engine_pb2.ToEngine(shutdown=engine_pb2.Shutdown()))
        await asyncio.to_thread(self._process.wait, 10)
        await tasks.cancel(self._reader)
