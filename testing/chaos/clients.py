"""Clients that behave badly, and sockets that are cut, while the load goes on."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import socket
import struct
from pathlib import Path
from urllib.parse import urlsplit

from services.ipc.sockets import stream_path
from testing import descriptors
from testing.chaos.faults import Replaced
from testing.chaos.load import body
from testing.chaos.world import Chaos
from testing.systems.local import MODELS

_CLIENTS = 20
_SLOW = 6
_SLOW_S = 15.0
_TOKENS = 900
_SYS_PIDFD_GETFD = 438
_libc = ctypes.CDLL(None, use_errno=True)


async def _connected(base: str, **options: int) -> socket.socket:
    where = urlsplit(base)
    client = socket.socket()
    for name, value in options.items():
        client.setsockopt(socket.SOL_SOCKET, getattr(socket, name), value)
    client.setblocking(False)
    await asyncio.get_running_loop().sock_connect(client, (where.hostname, where.port))
    return client


def _request(content: bytes) -> bytes:
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(content)}"
    )
    return head.encode() + b"\r\n\r\n" + content


def _reset(client: socket.socket) -> None:
    """Closes it as a host does that was switched off and is back: the other side is not waited for."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


async def slow_readers(it: Chaos) -> Replaced:
    """A byte a second each, of eight answers at once, until they go away."""
    loop = asyncio.get_running_loop()
    base = next(iter(it.bases.values()))
    content = json.dumps({**body(MODELS[0], 0, _TOKENS), "n": 8}).encode()
    clients = [await _connected(base, SO_RCVBUF=2048) for _ in range(_SLOW)]

    async def read(client: socket.socket) -> None:
        await loop.sock_sendall(client, _request(content))
        while await loop.sock_recv(client, 1):
            await asyncio.sleep(1.0)

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_SLOW_S):
            await asyncio.gather(*(read(client) for client in clients))
    for client in clients:
        client.close()
    return {}


async def readers_gone(it: Chaos) -> Replaced:
    """Streams whose reader goes away after its first bytes."""
    loop = asyncio.get_running_loop()
    for base in it.bases.values():
        for i in range(_CLIENTS):
            client = await _connected(base)
            await loop.sock_sendall(client, _request(json.dumps(body(MODELS[i % 3], 0, _TOKENS)).encode()))
            told = b""
            while b"data: " not in told:
                told = await loop.sock_recv(client, 4096)
                assert told and (b"data: " in told or told.startswith(b"HTTP/1.1 200")), told
            _reset(client)
    return {}


async def bodies_cut(it: Chaos) -> Replaced:
    """Requests that end in the middle of their body, or of their head."""
    loop = asyncio.get_running_loop()
    whole = _request(json.dumps(body(MODELS[0], 0)).encode())
    for base in it.bases.values():
        for i in range(_CLIENTS):
            client = await _connected(base)
            await loop.sock_sendall(client, whole[: len(whole) - 20 if i % 2 else 30])
            _reset(client)
    return {}


def _streams_of(pid: int, path: str) -> list[socket.socket]:
    """The connections that a process has taken on a Unix socket, as descriptors of ours."""
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    taken = {f"socket:[{row[6]}]" for row in rows if len(row) > 7 and row[7] == path and row[5] == "03"}
    process = os.pidfd_open(pid)
    try:
        numbers = [int(fd.name) for fd, link in descriptors.links(pid).items() if link in taken]
        fds = [_libc.syscall(_SYS_PIDFD_GETFD, process, number, 0) for number in numbers]
    finally:
        os.close(process)
    if any(fd < 0 for fd in fds):
        raise OSError(ctypes.get_errno(), "pidfd_getfd")
    return [socket.socket(fileno=fd) for fd in fds]


async def group_streams_cut(it: Chaos) -> Replaced:
    """All streams between gateways and groups, in the middle of a message."""
    cut = 0
    for group in it.local.group_names:
        name = it.local.scheduler(group)
        path = stream_path(it.local.unix(name))
        assert path is not None
        for stream in _streams_of(it.system.running[name].pid, path):
            with stream, contextlib.suppress(BlockingIOError):
                stream.send(struct.pack("<I", 1000) + b"half of it")
                stream.shutdown(socket.SHUT_RDWR)
                cut += 1
    assert cut == len(it.bases) * len(it.local.group_names), "every gateway has a stream to every group"
    return {}
