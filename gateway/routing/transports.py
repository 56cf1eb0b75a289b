"""Transports of a group's stream: gRPC (`GpuScheduler.Serve`), or on the group's own node the same messages over a
plain Unix socket (`gpu_scheduler/local.py` says what that saves)."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Protocol

import grpc

from protos import gpu_scheduler_pb2, gpu_scheduler_pb2_grpc
from services.ipc import sockets
from services.ipc.framing import FramedChannel
from services.rpc import rpc
from services.runtime import tasks

Take = Callable[[gpu_scheduler_pb2.ToGateway], None]
_RETRY_S = 0.02
"""Seconds between attempts: a connection to a Unix socket that no process serves is refused at once."""


class Transport(Protocol):
    """Streams to one address, one at a time."""

    async def connect(self, take: Take) -> None:
        """Opens a stream, whose messages go to `take`. Returns once it is open, if need be after many attempts."""
        ...

    def send(self, message: gpu_scheduler_pb2.FromGateway) -> None:
        """Sends on the open stream; never waits. The message is lost if the stream breaks."""
        ...

    async def broken(self) -> str:
        """Waits for the end of the open stream, and returns why it ended."""
        ...

    async def close(self) -> None: ...


def transport(address: str) -> Transport:
    path = sockets.stream_path(address)
    return GrpcTransport(address) if path is None else LocalTransport(path)


class LocalTransport:
    """Streams over a Unix socket."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._channel: FramedChannel[gpu_scheduler_pb2.ToGateway] | None = None
        self._closed = asyncio.Event()

    async def connect(self, take: Take) -> None:
        while True:
            self._closed.clear()
            channel = FramedChannel(gpu_scheduler_pb2.ToGateway, take, self._closed.set)
            try:
                self._channel = await channel.connect(self._path)
                return
            except OSError:
                await asyncio.sleep(_RETRY_S)

    def send(self, message: gpu_scheduler_pb2.FromGateway) -> None:
        assert self._channel is not None
        self._channel.send(message)

    async def broken(self) -> str:
        await self._closed.wait()
        return "closed by the group"

    async def close(self) -> None:
        if self._channel is not None:
            self._channel.close()


class GrpcTransport:
    """Streams over gRPC."""

    def __init__(self, address: str) -> None:
        self._channel = rpc.channel(address)
        self._call: grpc.aio.StreamStreamCall | None = None
        self._take: Take | None = None
        self._outgoing: deque[gpu_scheduler_pb2.FromGateway] = deque()
        self._something_to_send = asyncio.Event()

    async def connect(self, take: Take) -> None:
        await self._channel.channel_ready()
        self._take = take
        self._outgoing.clear()
        self._call = gpu_scheduler_pb2_grpc.GpuSchedulerStub(self._channel).Serve()

    def send(self, message: gpu_scheduler_pb2.FromGateway) -> None:
        self._outgoing.append(message)
        self._something_to_send.set()

    async def broken(self) -> str:
        call, take = self._call, self._take
        assert call is not None and take is not None
        # A writer that fails ends the stream: half a stream would leave requests waiting for ever.
        writer = tasks.spawn(self._write(call), "write to a group", lambda failure: call.cancel())
        try:
            while (message := await call.read()) is not grpc.aio.EOF:
                take(message)
            return "closed by the group"
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            return "writing failed"
        finally:
            call.cancel()
            await tasks.cancel(writer)

    async def _write(self, call: grpc.aio.StreamStreamCall) -> None:
        try:
            while True:
                while self._outgoing:
                    await call.write(self._outgoing.popleft())
                self._something_to_send.clear()
                await self._something_to_send.wait()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass  # the reader gets the error too

    async def close(self) -> None:
        await self._channel.close()
