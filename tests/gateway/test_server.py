"""The HTTP server in a process that is not its own."""

from __future__ import annotations

import socket

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from gateway import http
from gateway.server import HttpServer
from services.errors import Unavailable


async def hello(scope: Scope, receive: Receive, send: Send) -> None:
    await http.respond(send, 200, b'"hello"')


async def test_it_serves_until_it_is_stopped() -> None:
    server = HttpServer(hello, "127.0.0.1:0")
    await server.start()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}") as client:
        assert (await client.get("/")).json() == "hello"
        await server.stop()
        with pytest.raises(httpx.ConnectError):
            await client.get("/")


async def test_a_port_in_use_is_one_clear_line() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(Unavailable, match=address) as refused:
            await HttpServer(hello, address).start()
    assert "\n" not in str(refused.value)


async def test_an_address_that_is_not_ours_is_one_clear_line() -> None:
    with pytest.raises(Unavailable, match="cannot serve HTTP"):
        await HttpServer(hello, "192.0.2.1:80").start()
