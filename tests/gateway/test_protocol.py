"""Connections that take too much room or time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from starlette.types import Receive, Scope, Send

from gateway import errors, http, protocol
from gateway import server as gateway_server
from gateway.errors import PrismError
from gateway.server import HttpServer
from services import tasks

POST = b"POST / HTTP/1.1\r\nhost: x\r\n"


async def size(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers how long the body is."""
    try:
        body = await http.Bodies(200_000, 200_000).read(receive)
    except PrismError as error:
        await http.respond_error(send, error)
    except http.ClientGone:
        pass
    else:
        await http.respond(send, 200, b"%d" % len(body))


@pytest.fixture
async def server() -> AsyncIterator[HttpServer]:
    server = HttpServer(size, "127.0.0.1:0")
    await server.start()
    yield server
    await server.stop()


async def said(server: HttpServer, *parts: bytes) -> bytes:
    """All that is answered until the connection is closed by the server."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        for part in parts:
            writer.write(part)
        return await reader.read()
    except ConnectionResetError:  # it closed with something unread
        return b""
    finally:
        writer.close()


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(b"GET / HTTP/1.1\r\nx: " + b"a" * 100_000, id="a value without an end"),
        pytest.param(POST + b"x: y\r\n" * 20_000 + b"\r\n", id="many headers"),
        pytest.param(b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n", id="a long path"),
    ],
)
async def test_a_head_that_is_too_long_is_refused_and_the_connection_closed(server: HttpServer, sent: bytes) -> None:
    assert (await said(server, sent)).startswith(b"HTTP/1.1 431 ")


async def test_trailers_have_the_same_bound(server: HttpServer) -> None:
    head = POST + b"transfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n"
    assert b"200 OK" not in await said(server, head + b"x: " + b"a" * 1_000_000)
    assert (await said(server, head.replace(b"host", b"connection: close\r\nhost") + b"x: y\r\n\r\n")).endswith(b"5")


async def test_a_large_body_in_many_chunks_is_no_large_head(server: HttpServer) -> None:
    chunks = b"1\r\na\r\n" * 50_000 + b"0\r\n\r\n"
    answer = await said(server, POST + b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n", chunks)
    assert answer.endswith(b"\r\n\r\n50000")


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nho"], ids=["nothing", "half a head"])
async def test_a_head_that_does_not_come_ends_the_connection(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(protocol, "HEAD_TIME_OUT_S", 0.5)
    assert (await said(server, sent)).startswith(b"HTTP/1.1 408 ")


async def test_a_body_that_does_not_come_is_refused(server: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "BODY_TIME_OUT_S", 0.05)
    answer = await said(server, POST + b"content-length: 5\r\n\r\nhe")
    assert answer.startswith(b"HTTP/1.1 408 ") and b"request_time_out" in answer


async def test_large_bodies_have_so_much_room_together_and_small_ones_always(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http, "SMALL_BODY_BYTES", 100)
    bodies = http.Bodies(1000, 500)

    def part(size: int, more: bool = True) -> dict[str, object]:
        return {"type": "http.request", "body": bytes(size), "more_body": more}

    async def coming(*parts: dict[str, object]) -> tuple[asyncio.Queue[dict[str, object]], asyncio.Task[bytes]]:
        """A body of which these have been read."""
        queue = asyncio.Queue[dict[str, object]]()
        for one in parts:
            queue.put_nowait(one)
        reading = tasks.spawn(bodies.read(queue.get), "a test")
        while not queue.empty() and not reading.done():
            await asyncio.sleep(0)
        return queue, reading

    first, reading = await coming(part(400), part(100))
    _, refused = await coming(part(150), part(60))
    with pytest.raises(errors.NoRoomForBody, match="500 bytes of large bodies"):
        await refused
    _, small = await coming(part(50), part(40, more=False))
    assert len(await small) == 90
    first.put_nowait(part(10, more=False))
    assert len(await reading) == 510
    _, gone = await coming(part(600), {"type": "http.disconnect"})
    with pytest.raises(http.ClientGone):
        await gone
    _, again = await coming(part(600), part(1, more=False))
    assert len(await again) == 601


async def test_a_body_that_is_too_long_is_413_and_the_rest_is_not_waited_for(server: HttpServer) -> None:
    answer = await said(server, POST + b"content-length: 999999999\r\n\r\n", bytes(300_000))
    assert answer == b"" or answer.startswith(b"HTTP/1.1 413 ")


async def refused_unread(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers before the body has come."""
    await http.respond(send, 401, b"")


@pytest.mark.parametrize("sent", [b"hello", b"he", b"hello\r\n"], ids=["its body", "half its body", "an empty line"])
async def test_what_comes_after_an_answer_does_not_keep_the_connection(
    monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(gateway_server, "_KEEP_ALIVE_S", 0.05)
    server = HttpServer(refused_unread, "127.0.0.1:0")
    await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(POST + b"content-length: 5\r\n\r\n")
    assert b" 401 " in await reader.readuntil(b"\r\n\r\n")
    monkeypatch.setattr(protocol, "HEAD_TIME_OUT_S", 0.05)
    writer.write(sent)
    async with asyncio.timeout(10):
        await reader.read()
    writer.close()
    await server.stop()
