"""Packed bodies."""

from __future__ import annotations

import asyncio
import gzip
import json
import tracemalloc
import zlib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.datastructures import Headers

from gateway.errors import BadField, BodyTooLarge, OtherEncoding
from gateway.http import decompression, messages
from tests.gateway.conftest import MODEL, World
from tests.gateway.test_app import refusal

MOST = 100_000


def raw(data: bytes) -> bytes:
    pack = zlib.compressobj(wbits=-15)
    return pack.compress(data) + pack.flush()


PACKERS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "gzip": ("gzip", gzip.compress),
    "its old name": ("X-GZip", gzip.compress),
    "deflate": ("deflate", zlib.compress),
    "deflate without zlib's head": ("deflate", raw),
    "members": ("gzip", lambda data: gzip.compress(data[:3]) + gzip.compress(b"") + gzip.compress(data[3:])),
    "filled up": ("gzip", lambda data: gzip.compress(data) + bytes(500)),
    "one in another": ("deflate, gzip", lambda data: gzip.compress(zlib.compress(data))),
    "twice the same": ("gzip,gzip", lambda data: gzip.compress(gzip.compress(data))),
    "not at all": ("identity", lambda data: data),
    "said to be nothing": ("", lambda data: data),
}


async def unpacked(encoding: str, *parts: bytes, most: int = MOST) -> bytes:
    """What `Bodies.read` makes of a body that comes in these parts."""
    coming = iter(parts or (b"",))
    left = len(parts or (b"",))

    async def receive() -> dict[str, Any]:
        nonlocal left
        left -= 1
        return {"type": "http.request", "body": next(coming), "more_body": left > 0}

    bodies = messages.Bodies(most, most * 10)
    return await bodies.read(bodies.unpacked(Headers({"content-encoding": encoding}), receive))


def cut(data: bytes, size: int) -> list[bytes]:
    return [data[start : start + size] for start in range(0, len(data), size)] or [b""]


@given(
    st.sampled_from(list(PACKERS.values())),
    st.one_of(st.binary(max_size=300), st.integers(0, MOST).map(lambda size: b"ab" * (size // 2))),
    st.integers(1, 200),
)
@settings(deadline=None)
def test_decompression_compressed_body_is_unpacked_however_it_is_cut(
    packer: tuple[str, Callable[[bytes], bytes]], data: bytes, size: int
) -> None:
    name, pack = packer
    assert asyncio.run(unpacked(name, *cut(pack(data), size))) == data


@pytest.mark.parametrize(("name", "pack"), list(PACKERS.values())[:8], ids=list(PACKERS)[:8])
async def test_decompression_truncated_or_damaged_body_is_refused(name: str, pack: Callable[[bytes], bytes]) -> None:
    data = bytes(range(256)) * 20
    whole = pack(data).rstrip(b"\0")
    first = len(gzip.compress(data[:3]))
    members = (first, first + len(gzip.compress(b""))) if pack is PACKERS["members"][1] else ()
    for end in range(1, len(whole) - 1):
        if end in members:  # what has come is whole
            continue
        with pytest.raises(BadField, match="cut off|cannot be unpacked"):
            await unpacked(name, *cut(whole[:end], 100))
    for at in range(len(whole)):
        damaged = whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :]
        try:
            await unpacked(name, damaged)
        except BadField as error:
            assert error.field == "content-encoding" or isinstance(error, BodyTooLarge)
    if "gzip" not in name.lower():
        with pytest.raises(BadField, match="follows its end"):
            await unpacked(name, whole + b"more")


@pytest.mark.parametrize("data", [b"", b"\0", b"{}", b"\x1f\x8b", b"\x1f\x8b\x08" + bytes(20)])
async def test_decompression_body_that_is_not_compressed_is_refused(data: bytes) -> None:
    if not data:
        assert await unpacked("gzip") == b""
        return
    with pytest.raises(BadField, match="gzip"):
        await unpacked("gzip", data)


@pytest.mark.parametrize(("name", "pack"), list(PACKERS.values())[:8], ids=list(PACKERS)[:8])
async def test_decompression_of_a_bomb_ends_at_the_bound(name: str, pack: Callable[[bytes], bytes]) -> None:
    bomb = pack(bytes(50 << 20))
    assert len(bomb) < MOST
    tracemalloc.start()
    with pytest.raises(BodyTooLarge, match=f"{MOST} bytes"):
        await unpacked(name, bomb)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20
    assert await unpacked(name, pack(b"a" * MOST)) == b"a" * MOST
    with pytest.raises(BodyTooLarge):
        await unpacked(name, pack(b"a" * (MOST + 1)))


async def test_decompression_of_many_empty_parts_or_nested_bombs_is_refused() -> None:
    empty = gzip.compress(b"")
    with pytest.raises(BadField, match="more than 1024 members"):
        await unpacked("gzip", empty * 1025)
    assert await unpacked("gzip", empty * 1024) == b""
    with pytest.raises(BodyTooLarge):  # empty blocks, without an end
        await unpacked("deflate", zlib.compress(b"")[:2] + b"\0\0\0\xff\xff" * MOST)
    with pytest.raises(BodyTooLarge):  # what holds nothing, within what is small
        await unpacked("gzip, gzip", gzip.compress(empty + bytes(50 << 20)))
    with pytest.raises(OtherEncoding, match="3 content-encodings"):
        await unpacked("gzip, gzip, gzip", b"")


@pytest.mark.parametrize("name", ["br", "zstd", "compress", "gzip, br", "x" * 500, "\xff", "gzip;q=1"])
async def test_decompression_refuses_an_unknown_encoding_by_name_before_reading_the_body(name: str) -> None:
    async def receive() -> dict[str, Any]:
        raise AssertionError("nothing is asked for")

    names = decompression.encodings(Headers(raw=[(b"content-encoding", name.encode("latin-1"))]))
    with pytest.raises(OtherEncoding, match="content-encoding '.{1,40}' is not supported, only gzip and deflate"):
        await decompression.Unpacked(receive, names, MOST)()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize"])
async def test_compressed_body_gets_the_answer_of_the_plain_one(world: World, path: str) -> None:
    world.say("one")
    body = json.dumps({**world.body(), "prompt": "hello"} if "chat" in path else {"model": MODEL, "prompt": "hello"})

    async def ask(encoding: str, data: bytes) -> Any:
        return await world.http.post(path, content=data, headers={"content-encoding": encoding})

    plain = await world.http.post(path, content=body)
    for encoding, pack in PACKERS.values():
        answer = await ask(encoding, pack(body.encode()))
        assert answer.status_code == plain.status_code == 200, answer.text
    damaged = refusal(await ask("gzip", b"{}"), 400)
    assert (damaged["code"], damaged["param"]) == ("invalid_encoding", "content-encoding")
    other = await ask("br", b"...")
    assert refusal(other, 415)["code"] == "unsupported_encoding"
    assert other.headers["accept-encoding"] == "gzip, deflate"
    large = refusal(await ask("gzip", gzip.compress(bytes(9 << 20))), 413)
    assert large["code"] == "body_too_large"
    assert (await world.http.post(path, content=body)).status_code == 200


async def test_decompression_unknown_encoding_is_refused_before_the_body_is_sent(world: World) -> None:
    host, _, port = world.url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 9\r\n")
    writer.write(b"content-encoding: br\r\n\r\n")
    assert (await reader.readline()).startswith(b"HTTP/1.1 415 ")
    writer.close()


async def test_content_encoding_of_a_request_without_a_body_is_ignored(world: World) -> None:
    assert (await world.http.get("/v1/models", headers={"content-encoding": "br"})).status_code == 200
