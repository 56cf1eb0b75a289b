"""Links to groups: one stream each way to each gpu_scheduler, kept open, that carries all requests of this gateway.

A link comes back by itself. What was unfinished on a stream that broke is told so, at once and all of it: the other
side has cancelled it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Protocol

from gateway.routing.transports import transport
from protos import common_pb2, gpu_scheduler_pb2
from services.runtime import tasks
from services.telemetry import log

_log = log.get(__name__)
_CONNECT_S = 1.0
"""How long a request waits for a connection that is being made before it looks for another group."""
_PAUSE_S = 0.02
"""Between a broken stream and the next, against spinning where a server refuses each."""


class Receiver(Protocol):
    """Who waits for the tokens of one request."""

    def deliver(self, chunk: common_pb2.TokenChunk) -> None:
        """Some of its tokens, in order; the last chunk has `finish`."""

    def lost(self, reason: str, was_sent: bool) -> None:
        """Nothing more comes: the stream broke, or there is no connection (then it never was sent)."""


class GroupLink:
    """The stream of one group. Its methods are for the loop that runs `run`."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._transport = transport(address)
        self._open: dict[str, Receiver] = {}
        self._waiting: list[gpu_scheduler_pb2.FromGateway] = []
        """Submitted while there is no stream."""
        self.connected = False
        """Whether a stream is open: what is submitted otherwise waits for one, but not for long."""

    @property
    def in_flight(self) -> int:
        return len(self._open)

    def submit(self, submit: gpu_scheduler_pb2.Submit, receiver: Receiver) -> None:
        """Sends a request; `receiver` hears of it until it has finished, was lost, or is cancelled."""
        self._open[submit.request_id] = receiver
        self._send(gpu_scheduler_pb2.FromGateway(submit=submit))

    def cancel(self, request_id: str) -> None:
        """Ends a request; its receiver hears no more."""
        if self._open.pop(request_id, None) is not None:
            self._send(gpu_scheduler_pb2.FromGateway(cancel=gpu_scheduler_pb2.Cancel(request_id=request_id)))

    def _send(self, message: gpu_scheduler_pb2.FromGateway) -> None:
        if self.connected:
            self._transport.send(message)
        else:
            self._waiting.append(message)

    async def run(self) -> None:
        """Keeps the stream, for ever."""
        try:
            while True:
                try:
                    async with asyncio.timeout(_CONNECT_S):
                        await self._transport.connect(self._take)
                except TimeoutError:
                    self._lose_all(f"no connection to {self.address}")
                    continue
                self.connected = True
                waiting, self._waiting = self._waiting, []
                for message in waiting:
                    self._transport.send(message)
                reason = await self._transport.broken()
                _log.warning("stream to a group broke", address=self.address, reason=reason, open=len(self._open))
                self._lose_all(reason)
                await asyncio.sleep(_PAUSE_S)
        finally:
            self._lose_all(f"the link to {self.address} is closed")
            await self._transport.close()

    def _take(self, message: gpu_scheduler_pb2.ToGateway) -> None:
        receivers = self._open
        for chunk in message.chunks:
            receiver = receivers.get(chunk.request_id)
            if receiver is None:
                continue  # cancelled meanwhile
            if chunk.finish:
                del receivers[chunk.request_id]
            receiver.deliver(chunk)

    def _lose_all(self, reason: str) -> None:
        was_sent, self.connected = self.connected, False
        lost, self._open = self._open, {}
        self._waiting.clear()
        for receiver in lost.values():
            receiver.lost(reason, was_sent)


class GroupLinks:
    """The links to all groups that routes name or requests need."""

    def __init__(self) -> None:
        self._links: dict[str, tuple[GroupLink, asyncio.Task[None]]] = {}

    def get(self, address: str) -> GroupLink:
        """The link to a group, opened if there is none."""
        known = self._links.get(address)
        if known is None:
            link = GroupLink(address)
            known = self._links[address] = (link, tasks.spawn(link.run(), f"link to {address}"))
        return known[0]

    def keep(self, addresses: Iterable[str]) -> None:
        """Opens what is missing; closes those that are not named and have no request in flight."""
        wanted = set(addresses)
        for address in wanted:
            self.get(address)
        for address in [known for known, (link, _) in self._links.items() if known not in wanted]:
            link, task = self._links[address]
            if not link.in_flight:
                del self._links[address]
                task.cancel()

    async def close(self) -> None:
        links, self._links = self._links, {}
        await tasks.cancel(*(task for _, task in links.values()))
