"""A gRPC channel that is opened anew when its certificate has changed: gRPC's own channel keeps the one that it began
with.

Running calls stay on the old channel, which closes after the last of them. Later calls go by the new one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc

from services.runtime import tasks

_AS_LONG_AS_IT_TAKES_S = 365 * 24 * 3600.0


class RenewedChannel(grpc.aio.Channel):  # type: ignore[misc]
    """A channel over the present certificate. `open` opens a gRPC channel with the state of the moment; a new one is
    opened when `revision` has changed."""

    def __init__(self, open: Callable[[], grpc.aio.Channel], revision: Callable[[], int]) -> None:
        self._open = open
        self._revision = revision
        self._opened_at = revision()
        self._channel = open()

    def _now(self) -> grpc.aio.Channel:
        revision = self._revision()
        if revision != self._opened_at:
            old, self._channel, self._opened_at = self._channel, self._open(), revision
            tasks.spawn(old.close(_AS_LONG_AS_IT_TAKES_S), "close an old channel")
        return self._channel

    def _calls(self, kind: str, *method: Any, **options: Any) -> Callable[..., Any]:
        def call(*request: Any, **settings: Any) -> Any:
            return getattr(self._now(), kind)(*method, **options)(*request, **settings)

        return call

    # grpc.aio.Channel

    def unary_unary(self, *method: Any, **options: Any) -> Any:
        return self._calls("unary_unary", *method, **options)

    def unary_stream(self, *method: Any, **options: Any) -> Any:
        return self._calls("unary_stream", *method, **options)

    def stream_unary(self, *method: Any, **options: Any) -> Any:
        return self._calls("stream_unary", *method, **options)

    def stream_stream(self, *method: Any, **options: Any) -> Any:
        return self._calls("stream_stream", *method, **options)

    async def channel_ready(self) -> None:
        await self._now().channel_ready()

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._now().get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._now().wait_for_state_change(last_observed_state)

    async def close(self, grace: float | None = None) -> None:
        """Closes the present channel; calls that still run on an older one run to their end."""
        await self._channel.close(grace)

    async def __aenter__(self) -> RenewedChannel:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()
