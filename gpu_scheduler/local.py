"""The stream of `GpuScheduler.Serve` over a plain Unix socket, for gateways of the same node.

The messages are the same, each with its length in front (`services/ipc/framing.py`). gRPC's asyncio server passes each
message through a thread of its own: without that a first token comes 0.1 ms (quick cores) to 0.4 ms (slow ones) sooner,
and gateway and gpu_scheduler together take a quarter less processor time for each token.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from functools import partial

from gpu_scheduler.queue.intake import Intake
from gpu_scheduler.queue.streams import GatewayStream
from protos import gpu_scheduler_pb2
from services.ipc import sockets
from services.ipc.framing import FramedChannel


class LocalStream:
    """The connection of one gateway."""

    def __init__(self, number: int, intake: Intake, gone: Callable[[LocalStream], None]) -> None:
        self._intake = intake
        self._gone = gone
        self._loop = asyncio.get_running_loop()
        self._stream = GatewayStream(number, self._soon)
        self.channel = FramedChannel(gpu_scheduler_pb2.FromGateway, self._take, self._lost, self._flush)

    def _take(self, message: gpu_scheduler_pb2.FromGateway) -> None:
        self._intake.take(message, self._stream)

    def _soon(self) -> None:
        """Sends in the next iteration of the event loop, so that chunks that come in one iteration share a message."""
        self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        if not self.channel.congested and (message := self._stream.take()) is not None:
            self.channel.send(message)

    def _lost(self) -> None:
        self._intake.cancel_stream(self._stream)
        self._gone(self)


class LocalServer:
    """Listens beside the gRPC server of `address`; does nothing if that is not a Unix socket."""

    def __init__(self, address: str, intake: Intake, socket_mode: int) -> None:
        self._path = sockets.stream_path(address)
        self._socket_mode = socket_mode
        self._intake = intake
        self._server: asyncio.AbstractServer | None = None
        self._streams: set[LocalStream] = set()
        self._numbers = 0

    async def start(self) -> None:
        """Starts to listen. Raises Unavailable if that fails."""
        if self._path is None:
            return
        here = sockets.bound(partial(socket.socket, socket.AF_UNIX), self._path, self._socket_mode)
        self._server = await asyncio.get_running_loop().create_unix_server(self._connect, sock=here)

    def _connect(self) -> asyncio.Protocol:
        self._numbers += 1
        stream = LocalStream(self._numbers, self._intake, self._streams.discard)
        self._streams.add(stream)
        return stream.channel

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            for stream in list(self._streams):
                stream.channel.close()
