"""The group's outlook for new requests, told to gateways that follow it: they have other groups to choose from."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gpu_scheduler.queue.streams import GatewayStream
from protos import gpu_scheduler_pb2

LEAST_S = 0.1
"""Least seconds from one outlook to the next."""


class OutlookNews:
    """Has each stream that follows the outlook be told it, again within LEAST_S of every change."""

    def __init__(self, build: Callable[[], gpu_scheduler_pb2.Outlook]) -> None:
        self._build = build
        self._following: dict[GatewayStream, gpu_scheduler_pb2.Outlook] = {}
        """Stream -> the outlook that it was last told."""
        self._timer: asyncio.TimerHandle | None = None

    def follow(self, stream: GatewayStream, follow: bool) -> None:
        """Tells the stream the outlook now and from now on, or no more."""
        self._following.pop(stream, None)
        if follow and not stream.closed:
            self._following[stream] = outlook = self._build()
            stream.tell(outlook)

    def changed(self) -> None:
        """Notes that the outlook may have changed."""
        if self._following and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LEAST_S, self._tell)

    def _tell(self) -> None:
        self._timer = None
        outlook = self._build()
        for stream, told in list(self._following.items()):
            if stream.closed:
                del self._following[stream]
            elif told != outlook:
                self._following[stream] = outlook
                stream.tell(outlook)

    def close(self) -> None:
        """Tells nothing more."""
        self._following.clear()
        if self._timer is not None:
            self._timer.cancel()
