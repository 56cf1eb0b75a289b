"""Connections that take too much room or time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
from starlette.types import Receive, Scope, Send

from gateway import errors
from gateway.errors import PrismError
from gateway.http import messages, protocol
from gateway.http.server import HttpServer
from services.runtime import tasks
from testing.patience import PATIENCE_S

POST = b"POST / HTTP/1.1\r\nhost: x\r\n"


async def size(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers how long the body is."""
    try:
        body = await messages.Bodies(200_000, 200_000).read(receive)
    except PrismError as error:
        await messages.respond_error(send, error)
    except messages.ClientGone:
        pass
    else:
        await messages.respond(send, 200, b"%d" % len(body))


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


def refusal(answer: bytes) -> dict[str, str]:
    """The error of an answer, checked to be of OpenAI's form."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"content-type: application/json" in head and b"connection: close" in head
    assert b"content-length: %d" % len(body) in head
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    return dict(error)


@pytest.mark.parametrize("sent", [b"FOO / HTTP/1.1\r\nhost: x\r\n\r\n", b"nonsense\r\n\r\n"])
async def test_malformed_http_is_refused_in_the_form_of_other_errors(server: HttpServer, sent: bytes) -> None:
    answer = await said(server, sent)
    assert answer.startswith(b"HTTP/1.1 400 ") and refusal(answer)["code"] == "no_http"


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(b"GET / HTTP/1.1\r\nx: " + b"a" * 100_000, id="a value without an end"),
        pytest.param(POST + b"x: y\r\n" * 20_000 + b"\r\n", id="many headers"),
        pytest.param(b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n", id="a long path"),
    ],
)
async def test_request_head_that_is_too_long_is_refused_and_the_connection_closed(
    server: HttpServer, sent: bytes
) -> None:
    assert (await said(server, sent)).startswith(b"HTTP/1.1 431 ")


async def test_trailers_of_a_request_have_the_bound_of_its_head(server: HttpServer) -> None:
    head = POST + b"transfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n"
    assert b"200 OK" not in await said(server, head + b"x: " + b"a" * 1_000_000)
    assert (await said(server, head.replace(b"host", b"connection: close\r\nhost") + b"x: y\r\n\r\n")).endswith(b"5")


async def test_body_in_many_chunks_does_not_count_as_a_large_head(server: HttpServer) -> None:
    chunks = b"1\r\na\r\n" * 50_000 + b"0\r\n\r\n"
    answer = await said(server, POST + b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n", chunks)
    assert answer.endswith(b"\r\n\r\n50000")


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nho"], ids=["nothing", "half a head"])
async def test_request_head_that_does_not_arrive_is_a_408(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(protocol, "HEAD_TIME_OUT_S", 0.5)
    answer = await said(server, sent)
    assert answer.startswith(b"HTTP/1.1 408 ") and refusal(answer)["code"] == "head_time_out"


async def test_request_body_that_does_not_arrive_is_a_408(server: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "BODY_TIME_OUT_S", 0.05)
    answer = await said(server, POST + b"content-length: 5\r\n\r\nhe")
    assert answer.startswith(b"HTTP/1.1 408 ") and b"request_time_out" in answer


async def test_large_bodies_share_a_bound_and_small_ones_are_always_accepted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(messages, "SMALL_BODY_BYTES", 100)
    bodies = messages.Bodies(1000, 500)

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
    with pytest.raises(messages.ClientGone):
        await gone
    _, again = await coming(part(600), part(1, more=False))
    assert len(await again) == 601


async def test_request_body_that_is_too_long_is_a_413_without_reading_the_rest(server: HttpServer) -> None:
    answer = await said(server, POST + b"content-length: 999999999\r\n\r\n", bytes(300_000))
    assert answer == b"" or answer.startswith(b"HTTP/1.1 413 ")


async def refused_unread(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers before the body has come."""
    await messages.respond(send, 401, b"")


@pytest.mark.parametrize("sent", [b"hello", b"he", b"hello\r\n"], ids=["its body", "half its body", "an empty line"])
async def test_protocol_bytes_after_an_answer_do_not_keep_the_connection(
    monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    server = HttpServer(refused_unread, "127.0.0.1:0", keep_alive_s=0.05)
    await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(POST + b"content-length: 5\r\n\r\n")
    assert b" 401 " in await reader.readuntil(b"\r\n\r\n")
    monkeypatch.setattr(protocol, "HEAD_TIME_OUT_S", 0.05)
    writer.write(sent)
    async with asyncio.timeout(PATIENCE_S):
        await reader.read()
    writer.close()
    await server.stop()


H2C = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n"
OFFERS = {
    "h2c": H2C,
    "websocket": b"connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-key: AAAA\r\n",
    "a newer TLS": b"Upgrade: TLS/1.0\r\nConnection: keep-alive, Upgrade\r\n",
    "several": b"connection: upgrade\r\nupgrade: h2c, websocket\r\nupgrade: foo/2\r\n",
    "not for this connection": b"upgrade: foo\r\n",
}
CHUNKED = b"transfer-encoding: chunked\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\nx-trailer: y\r\n\r\n"
COUNTED = b"content-length: 5\r\n\r\nhello"
LAST = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


def bodies(answers: bytes) -> list[bytes]:
    """Of answers in a row, each of one byte."""
    return [answer[answer.index(b"\r\n\r\n") + 4 :][:1] for answer in answers.split(b"HTTP/1.1 200 OK")[1:]]


@pytest.mark.parametrize("offer", OFFERS.values(), ids=OFFERS)
@pytest.mark.parametrize("body", [CHUNKED, COUNTED], ids=["chunked", "counted"])
async def test_upgrade_offer_changes_no_answer(server: HttpServer, offer: bytes, body: bytes) -> None:
    asked = POST + offer + body
    assert bodies(await said(server, asked + asked + LAST)) == [b"5", b"5", b"0"], "all at once"
    bare = b"GET / HTTP/1.1\r\nhost: x\r\n" + offer + b"\r\n"
    assert bodies(await said(server, bare + asked + LAST)) == [b"0", b"5", b"0"], "one without a body first"


@pytest.mark.parametrize("size", [1, 7, 60])
async def test_upgrade_offer_in_pieces_changes_no_answer(server: HttpServer, size: int) -> None:
    asked = POST + H2C + COUNTED + POST + H2C + CHUNKED + LAST
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    for start in range(0, len(asked), size):
        writer.write(asked[start : start + size])
        await asyncio.sleep(0)  # the server reads in the same loop
    assert bodies(await reader.read()) == [b"5", b"5", b"0"]
    writer.close()


async def test_protocol_upgrade_offer_with_expect_continue_is_answered_with_100(server: HttpServer) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(POST + H2C + b"expect: 100-continue\r\ncontent-length: 5\r\n\r\n")
    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(b"hello" + LAST)
    assert bodies(await reader.read()) == [b"5", b"0"]
    writer.close()


async def test_upgrade_offer_by_http_1_0_is_ignored_and_in_too_long_a_head_refused(server: HttpServer) -> None:
    assert bodies(await said(server, POST.replace(b"1.1", b"1.0") + H2C + COUNTED)) == [b"5"]
    assert (await said(server, POST + H2C + b"x: y\r\n" * 20_000 + b"\r\n")).startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize("size", [18, 100])
async def test_protocol_http_2_preface_is_answered_with_505(server: HttpServer, size: int) -> None:
    sent = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    for start in range(0, len(sent), size):
        writer.write(sent[start : start + size])
        await asyncio.sleep(0)
    answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 505 ") and "use HTTP/1.1" in refusal(answer)["message"]
    writer.close()


@pytest.mark.parametrize("target", [b"/", b"example.org:443"])
async def test_connect_method_is_a_405(server: HttpServer, target: bytes) -> None:
    answer = await said(server, b"CONNECT " + target + b" HTTP/1.1\r\nhost: x\r\n\r\n" + LAST)
    assert answer.startswith(b"HTTP/1.1 405 ") and answer.count(b"HTTP/1.1") == 1
    assert refusal(answer)["code"] == "method_not_allowed"


async def until_gone(server: HttpServer, requests: asyncio.Queue[asyncio.Event], sent: bytes) -> None:
    """Sends several requests in a row, of which the first waits, and leaves: it hears of that."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(sent)
    gone = await requests.get()
    writer.close()
    async with asyncio.timeout(PATIENCE_S):
        await gone.wait()


@pytest.mark.parametrize("offer", [b"", H2C], ids=["plain", "offering"])
async def test_pipelined_requests_are_cancelled_when_their_client_is_gone(
    offer: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    requests = asyncio.Queue[asyncio.Event]()

    async def waits(scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.Event()
        requests.put_nowait(gone)
        await messages.Bodies(100, 100).read(receive)
        async with messages.WhileConnected(receive):
            await asyncio.Event().wait()
        await messages.respond(send, 200, b"")  # to nobody
        gone.set()

    server = HttpServer(waits, "127.0.0.1:0")
    await server.start()
    asked = POST + offer + COUNTED
    await until_gone(server, requests, asked * 3)
    assert requests.empty(), "the others never began"
    await until_gone(server, requests, asked)
    await server.stop()
    assert "Exception" not in caplog.text


async def test_request_followed_by_malformed_bytes_is_cancelled_with_its_connection(
    caplog: pytest.LogCaptureFixture,
) -> None:
    said_to = asyncio.Event()

    async def late(scope: Scope, receive: Receive, send: Send) -> None:
        async with messages.WhileConnected(receive):
            await asyncio.Event().wait()
        await messages.respond(send, 200, b"")
        said_to.set()

    server = HttpServer(late, "127.0.0.1:0")
    await server.start()
    bare = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
    assert await said(server, bare + bare + b"nonsense\r\n\r\n") == b""
    async with asyncio.timeout(PATIENCE_S):
        await said_to.wait()
    await server.stop()
    assert "Exception" not in caplog.text
