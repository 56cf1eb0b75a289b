"""The HTTP server: uvicorn inside a process whose signals and logging are the chassis'."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from gateway.http.protocol import BoundedProtocol
from services.errors import Unavailable
from services.rpc.tls import Identity
from services.runtime import tasks
from services.wording import addresses

_BACKLOG = 2048
_KEEP_ALIVE_S = 75.0
"""Seconds for which a connection without a request is kept."""
_LOOK_S = 0.01
"""Seconds from one look at the connections that are left to the next."""
FIRST_REQUEST_S = 1.0
"""Seconds that a connection taken before a stop has for its first request, which may already be on its way."""


class _Protocol(BoundedProtocol):
    def __init__(self, *arguments: Any, first_request_s: float, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._first_request_s = first_request_s

    def shutdown(self) -> None:
        if self.cycle is None and not self.transport.is_closing():
            self.loop.call_later(self._first_request_s, super().shutdown)
        else:
            super().shutdown()


class _Uvicorn(uvicorn.Server):
    """Waits for its stop, and then for connections, where uvicorn looks at both every tenth of a second."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.stopping = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Does nothing: the process has signal handlers of its own."""
        yield

    async def main_loop(self) -> None:
        await self.stopping.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for each in (*self.servers, *(sockets or ())):
            each.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        while self.server_state.connections or self.server_state.tasks:
            await asyncio.sleep(_LOOK_S)


class HttpServer:
    """Serves `app` on "host:port", with TLS where there is an `identity`."""

    def __init__(
        self,
        app: ASGIApp,
        address: str,
        identity: Identity | None = None,
        *,
        keep_alive_s: float = _KEEP_ALIVE_S,
        first_request_s: float = FIRST_REQUEST_S,
    ) -> None:
        """`keep_alive_s`: seconds for which a connection without a request is kept. `first_request_s`: seconds that a
        connection taken before a stop has for its first request."""
        self._address = address
        self._uvicorn = _Uvicorn(
            uvicorn.Config(
                app,
                loop="none",
                http=partial(_Protocol, first_request_s=first_request_s),  # type: ignore[arg-type]
                ws="none",
                lifespan="off",
                access_log=False,
                log_config=None,
                log_level="warning",
                proxy_headers=False,
                server_header=False,
                date_header=False,
                timeout_keep_alive=keep_alive_s,  # type: ignore[arg-type]
                backlog=_BACKLOG,
                ssl_context_factory=None if identity is None else lambda config, default: identity.server_context(),
            )
        )
        self._serving: asyncio.Task[None] | None = None
        self.port = 0
        """The port in use, once started."""

    async def start(self, listener: socket.socket | None = None) -> None:
        """Serves on `listener`, if one was handed over, or else at the address. Raises Unavailable with one line if the
        address cannot be had."""
        if listener is None:
            listener = self._listen()
        self.port = listener.getsockname()[1]
        self._serving = tasks.spawn(self._uvicorn.serve(sockets=[listener]), "http server")

    def _listen(self) -> socket.socket:
        host, port = addresses.host_and_port(self._address)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # By its name: asyncio sends answers without delay (TCP_NODELAY) only where it knows that the protocol is TCP.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen(_BACKLOG)  # clients that connect from now on wait, and are not refused
        except OSError as error:
            listener.close()
            raise Unavailable(f"cannot serve HTTP on {self._address}: {error.strerror or error}") from None
        return listener

    def withdraw(self) -> None:
        """Has every connection end with its next response from now on. Otherwise a connection that a client keeps would
        be closed at the stop, maybe under a request that is on its way."""
        self._uvicorn.config.encoded_headers.append((b"connection", b"close"))
        self._uvicorn.server_state.default_headers = list(self._uvicorn.config.encoded_headers)

    async def stop(self) -> None:
        """Takes no more connections, closes those that had a request and have none now, and waits for the others'
        responses. Cancelling this call cuts those off."""
        self._uvicorn.stopping.set()
        if self._serving is not None:
            await self._serving
