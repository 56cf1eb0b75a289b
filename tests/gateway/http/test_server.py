"""The HTTP server in a process that is not its own."""

from __future__ import annotations

import asyncio
import socket

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from gateway.http import messages
from gateway.http.server import HttpServer
from services.errors import Unavailable
from services.runtime import tasks
from testing.patience import PATIENCE_S


async def hello(scope: Scope, receive: Receive, send: Send) -> None:
    await messages.respond(send, 200, b'"hello"')


async def test_http_server_serves_until_it_is_stopped() -> None:
    server = HttpServer(hello, "127.0.0.1:0")
    await server.start()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=PATIENCE_S) as client:
        assert (await client.get("/")).json() == "hello"
        await server.stop()
        with pytest.raises(httpx.ConnectError):
            await client.get("/")


async def test_http_port_in_use_is_refused_in_one_line() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(Unavailable, match=address) as refused:
            await HttpServer(hello, address).start()
    assert "\n" not in str(refused.value)


async def test_http_address_of_another_host_is_refused_in_one_line() -> None:
    with pytest.raises(Unavailable, match="cannot serve HTTP"):
        await HttpServer(hello, "192.0.2.1:80").start()


async def test_http_server_that_withdraws_answers_and_closes_each_connection() -> None:
    server = HttpServer(hello, "127.0.0.1:0")
    await server.start()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=PATIENCE_S) as client:
        assert "connection" not in (await client.get("/")).headers
        server.withdraw()
        for _ in range(2):
            answer = await client.get("/")
            assert (answer.json(), answer.headers["connection"]) == ("hello", "close")
        await server.stop()


async def test_a_connection_made_before_the_stop_is_answered_after_it() -> None:
    server = HttpServer(hello, "127.0.0.1:0", first_request_s=PATIENCE_S)
    await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    second_reader, second = await asyncio.open_connection("127.0.0.1", server.port)
    second.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
    assert (await second_reader.readline()).startswith(b"HTTP/1.1 200")  # so the first one was taken too
    stopping = tasks.spawn(server.stop(), "stop")
    while True:
        try:
            async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
                await client.get(f"http://127.0.0.1:{server.port}/")
        except httpx.HTTPError:
            break
    assert (await second_reader.read()).endswith(b'"hello"')  # and it is closed
    writer.write(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    assert (await reader.read()).endswith(b'"hello"')
    await stopping


async def test_http_listening_socket_passed_in_outlives_its_server() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        first, second = HttpServer(hello, "127.0.0.1:1"), HttpServer(hello, "127.0.0.1:1")
        await first.start(listener.dup())
        async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
            assert (await client.get(url)).json() == "hello"
        await first.stop()
        reader, writer = await asyncio.open_connection(*listener.getsockname())  # nobody serves it: it waits
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        await second.start(listener.dup())
        assert (await reader.read()).endswith(b'"hello"')
        await second.stop()
