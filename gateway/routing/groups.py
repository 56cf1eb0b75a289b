"""Links to groups: one stream each way to each gpu_scheduler, kept open, that carries all requests of this gateway.

A link comes back by itself. When its stream breaks, the receivers of all its unfinished requests are notified at once:
the other side has cancelled them.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from gateway.policy.replica_choice import GroupOutlook, SentWork
from gateway.routing.transports import transport
from protos import common_pb2, gpu_scheduler_pb2
from services.runtime import tasks
from services.telemetry import log

_log = log.get(__name__)
_CONNECT_S = 1.0
"""Seconds that a request waits for a connection that is being made before it looks for another group."""
_PAUSE_S = 0.02
"""Seconds between a broken stream and the next, so that a server that refuses each is not called in a busy loop."""


class Receiver(Protocol):
    """The receiver of one request's tokens."""

    def deliver(self, chunk: common_pb2.TokenChunk) -> None:
        """Takes some of the request's tokens, in order; the last chunk has `finish`."""

    def lost(self, reason: str, was_sent: bool) -> None:
        """Ends the request: the stream broke, or there is no connection (then the request never was sent)."""


@dataclass(frozen=True, slots=True)
class ToldOutlook:
    """What a group told of a model that is active there."""

    at: float
    """Monotonic second at which it came."""
    queue_s: float
    """Seconds of prefill before that of a new request."""
    tokens_per_s: float
    """Prompt tokens that the model prefills in a second."""
    of_others: int
    """The requests of the model and its adapters there that are not this gateway's."""


class GroupLink:
    """The stream of one group. Its methods have to be called in the loop that runs `run`."""

    def __init__(self, address: str, connect_s: float = _CONNECT_S) -> None:
        self.address = address
        self._connect_s = connect_s
        self._transport = transport(address)
        self._open: dict[str, tuple[Receiver, str]] = {}
        """Receiver and model of each request in flight, by the request's name. The model of an adapter is its base."""
        self._of_model: Counter[str] = Counter()
        """Requests in flight by model, those of its adapters among them."""
        self._outlooks: dict[str, ToldOutlook] = {}
        """What the group last told of each model that is active there, while that is followed."""
        self._sent = SentWork()
        """Prefill that was sent to the group since its last outlook."""
        self._follows = False
        """Whether the group is to tell its outlook."""
        self._waiting: list[gpu_scheduler_pb2.FromGateway] = []
        """Messages submitted while there is no stream."""
        self.connected = False
        """Whether a stream is open; messages submitted meanwhile wait for one, but not for long."""

    @property
    def in_flight(self) -> int:
        return len(self._open)

    def outlook(self, model: str, cached_tokens: int = 0) -> GroupOutlook:
        """Queue and speed that a new request of the model, or of one of its adapters, finds at the group."""
        told = self._outlooks.get(model)
        mine = self._of_model[model]
        if told is None:
            return GroupOutlook(mine, cached_tokens=cached_tokens)
        now = time.monotonic()
        queue_s = max(0.0, told.queue_s - (now - told.at)) + self._sent.left_s(now)
        return GroupOutlook(mine + told.of_others, queue_s, told.tokens_per_s, cached_tokens)

    def follow(self, follow: bool) -> None:
        """Has the group tell its outlook from now on, or no more."""
        if follow == self._follows:
            return
        self._follows = follow
        self._outlooks.clear()
        if self.connected:
            self._ask_for_outlook()

    def _ask_for_outlook(self) -> None:
        asked = gpu_scheduler_pb2.FollowOutlook(follow=self._follows)
        self._transport.send(gpu_scheduler_pb2.FromGateway(follow_outlook=asked))

    def sends(self, seconds: float) -> None:
        """Notes that so many seconds of prefill are sent there, which its last outlook does not count."""
        self._sent.add(seconds, time.monotonic())

    def submit(self, submit: gpu_scheduler_pb2.Submit, receiver: Receiver, base: str = "") -> None:
        """Sends a request; `receiver` gets its tokens until the request has finished, was lost, or is cancelled.
        `base`: the base model of the adapter that the request names; empty: it names none."""
        model = base or submit.model
        self._open[submit.request_id] = receiver, model
        self._of_model[model] += 1
        self._send(gpu_scheduler_pb2.FromGateway(submit=submit))

    def cancel(self, request_id: str) -> None:
        """Ends a request; its receiver gets nothing more."""
        if request_id in self._open:
            self._closed(request_id)
            self._send(gpu_scheduler_pb2.FromGateway(cancel=gpu_scheduler_pb2.Cancel(request_id=request_id)))

    def _send(self, message: gpu_scheduler_pb2.FromGateway) -> None:
        if self.connected:
            self._transport.send(message)
        else:
            self._waiting.append(message)

    async def run(self) -> None:
        """Keeps the stream open, for ever."""
        try:
            while True:
                try:
                    async with asyncio.timeout(self._connect_s):
                        await self._transport.connect(self._take)
                except TimeoutError:
                    self._lose_all(f"no connection to {self.address}")
                    continue
                self.connected = True
                if self._follows:
                    self._ask_for_outlook()
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
        if message.HasField("outlook") and self._follows:
            now, self._sent = time.monotonic(), SentWork()
            self._outlooks = {
                each.model: ToldOutlook(
                    now, each.queue_s, each.tokens_per_s, max(0, each.requests - self._of_model[each.model])
                )
                for each in message.outlook.models
            }
        for chunk in message.chunks:
            known = self._open.get(chunk.request_id)
            if known is None:
                continue  # it was cancelled meanwhile
            if chunk.finish:
                self._closed(chunk.request_id)
            known[0].deliver(chunk)

    def _closed(self, request_id: str) -> None:
        _, model = self._open.pop(request_id)
        self._of_model[model] -= 1
        if not self._of_model[model]:
            del self._of_model[model]

    def _lose_all(self, reason: str) -> None:
        was_sent, self.connected = self.connected, False
        lost, self._open = self._open, {}
        self._waiting.clear()
        self._of_model.clear()
        self._outlooks.clear()
        for receiver, _ in lost.values():
            receiver.lost(reason, was_sent)


class GroupLinks:
    """The links to all groups that routes name or requests need."""

    def __init__(self, connect_s: float = _CONNECT_S) -> None:
        self._connect_s = connect_s
        self._links: dict[str, tuple[GroupLink, asyncio.Task[None]]] = {}

    def get(self, address: str) -> GroupLink:
        """The link to a group, opened if there is none."""
        known = self._links.get(address)
        if known is None:
            link = GroupLink(address, self._connect_s)
            known = self._links[address] = (link, tasks.spawn(link.run(), f"link to {address}"))
        return known[0]

    def keep(self, routes: Iterable[Sequence[str]]) -> None:
        """Opens the links that are missing to the groups of `routes`, addresses of the groups of each model; closes
        those to other groups that have no request in flight. Groups among which there is a choice tell their
        outlooks."""
        several = list(routes)
        wanted = {address for addresses in several for address in addresses}
        chosen = {address for addresses in several if len(addresses) > 1 for address in addresses}
        for address in wanted:
            self.get(address).follow(address in chosen)
        for address in [known for known, (link, _) in self._links.items() if known not in wanted]:
            link, task = self._links[address]
            if not link.in_flight:
                del self._links[address]
                task.cancel()

    async def close(self) -> None:
        links, self._links = self._links, {}
        await tasks.cancel(*(task for _, task in links.values()))
