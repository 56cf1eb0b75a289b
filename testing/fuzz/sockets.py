"""Datagrams with descriptors to balloond and the keeper, frames to gpu_schedulers, and bytes to whoever listens."""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence

from google.protobuf.message import Message

from protos import handoff_pb2, keeper_pb2
from services.ipc import seqpacket
from testing.fuzz.mutate import Mutator
from testing.fuzz.outcome import SurfaceOutcome
from testing.patience import PATIENCE_S

_HANGING = 40
"""Connections that are left open in mid-conversation."""
_ROUND = 100
"""Cases between two looks whether a proper peer is still answered."""
_OURS = ("balloond", "loader")
"""Owners of records that are not to be touched."""
Talk = Callable[[socket.socket], None]


async def fuzz_handoff(path: str, mutator: Mutator, cases: int, outcome: SurfaceOutcome) -> None:
    """Sessions of an engine or a loader, of which each message may be anything."""

    def session() -> Iterator[bytes]:
        if mutator.draw.random() < 0.7:
            attach = handoff_pb2.Attach(
                role=mutator.draw.choice((1, 1, 2)),
                device=mutator.draw.choice(mutator.words["device"]),
                model=mutator.draw.choice(mutator.words["model"]),
            )
            yield handoff_pb2.ToBalloond(attach=attach).SerializeToString()
        for _ in range(mutator.draw.randrange(1, 6)):
            yield mutator.wire(handoff_pb2.ToBalloond)

    def proper(sock: socket.socket) -> None:
        attach = handoff_pb2.Attach(role=handoff_pb2.Attach.LOADER)
        _ask(sock, handoff_pb2.ToBalloond(attach=attach), handoff_pb2.FromBalloond)

    await _datagrams(path, session, proper, mutator, cases, outcome)


async def fuzz_keeper(path: str, mutator: Mutator, cases: int, outcome: SurfaceOutcome) -> None:
    """Requests about records of nobody's; what is kept of them is forgotten at the end."""
    names = {"id": [f"fuzz/{number}" for number in range(50)], "ids": ["fuzz/1", "fuzz/2"], "owner": ["fuzz"]}
    mutator = mutator.with_words(**names)

    def session() -> Iterator[bytes]:
        for _ in range(mutator.draw.randrange(1, 6)):
            yield mutator.wire(keeper_pb2.ToKeeper)

    def proper(sock: socket.socket) -> None:
        request = keeper_pb2.ToKeeper(list=keeper_pb2.List(owner="nobody"))
        _ask(sock, request, keeper_pb2.FromKeeper)

    await _datagrams(path, session, proper, mutator, cases, outcome)
    await asyncio.to_thread(_forget_all, path)


def _forget_all(path: str) -> None:
    with contextlib.closing(_connect(path)) as sock:
        seqpacket.send(sock, keeper_pb2.ToKeeper(list=keeper_pb2.List()).SerializeToString())
        records, last = list[keeper_pb2.Record](), False
        while not last:
            answer = keeper_pb2.FromKeeper.FromString(seqpacket.recv(sock)[0]).records
            records, last = [*records, *answer.records], answer.last
        for record in records:
            if record.owner not in _OURS:
                forget = keeper_pb2.ToKeeper(forget=keeper_pb2.Forget(ids=[record.id]))
                _ask(sock, forget, keeper_pb2.FromKeeper)


async def _datagrams(
    path: str,
    session: Callable[[], Iterator[bytes]],
    proper: Talk,
    mutator: Mutator,
    cases: int,
    outcome: SurfaceOutcome,
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with contextlib.ExitStack() as open_ones:
        hanging: list[socket.socket] = []
        while outcome.cases < cases:
            for _ in range(_ROUND):
                sock = _connect(path)
                sock.setblocking(False)
                for message in session():
                    outcome.cases += 1
                    outcome.answers[_send(sock, message, mutator)] += 1
                await asyncio.sleep(0)
                if mutator.draw.random() < 0.7:
                    _read_all(sock, outcome)
                if len(hanging) < _HANGING and mutator.draw.random() < 0.02:
                    hanging.append(open_ones.enter_context(sock))
                else:
                    sock.close()
            await _look(path, proper, outcome)
    leaked = len(os.listdir("/proc/self/fd")) - before
    if leaked > 0:
        outcome.fault(f"this program has {leaked} descriptors more: it did not close what it got")


async def _look(path: str, proper: Talk, outcome: SurfaceOutcome) -> None:
    """Whether a proper peer is still answered."""

    def talk() -> None:
        with contextlib.closing(_connect(path)) as sock:
            proper(sock)

    try:
        await asyncio.to_thread(talk)
    except OSError as error:
        outcome.hangs += 1
        outcome.fault(f"a proper peer at {os.path.basename(path)} is not answered: {error}")


def _connect(path: str) -> socket.socket:
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            sock = seqpacket.connect(path, PATIENCE_S)
            break
        except BlockingIOError:  # more connections wait than its queue holds
            if time.monotonic() > until:
                raise
            time.sleep(0.01)
    sock.settimeout(PATIENCE_S)
    return sock


def _ask(sock: socket.socket, request: Message, answer: type[Message]) -> None:
    """Raises OSError when there is no answer, or none that can be understood."""
    seqpacket.send(sock, request.SerializeToString())
    message, fds = seqpacket.recv(sock)
    for fd in fds:
        os.close(fd)
    if not message:
        raise OSError("closed")
    answer.FromString(message)


def _send(sock: socket.socket, message: bytes, mutator: Mutator) -> str:
    """With descriptors that nobody asked for, and a length that may be too long."""
    count = mutator.draw.choice((0, 0, 0, 1, 2, 17, seqpacket.MAX_DESCRIPTORS))
    if mutator.draw.random() < 0.02:
        message += bytes(seqpacket.MAX_BYTES)
    null = os.open("/dev/null", os.O_RDONLY)
    try:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [null] * count))] if count else []
        sock.sendmsg([message], rights)
    except BlockingIOError:
        return "not taken"  # the other end reads nothing while its answers are not read
    except OSError as error:
        return f"closed: {error.strerror}"
    finally:
        os.close(null)
    return f"sent with {count} descriptors" if count else "sent"


def _read_all(sock: socket.socket, outcome: SurfaceOutcome) -> None:
    while True:
        try:
            message, fds = seqpacket.recv(sock)
        except OSError:
            return
        for fd in fds:
            os.close(fd)
        if not message:
            return
        outcome.answers["answered"] += 1


# --- streams


async def fuzz_frames(path: str, kind: type[Message], mutator: Mutator, cases: int, outcome: SurfaceOutcome) -> None:
    """Connections to a stream of framed messages."""

    def pieces() -> Sequence[bytes]:
        made = []
        for _ in range(mutator.draw.randrange(1, 8)):
            data = mutator.wire(kind)
            wrong = mutator.draw.random() < 0.1
            length = mutator.draw.choice((0, 1, len(data) + 5, (64 << 20) + 1, 0xFFFFFFFF)) if wrong else len(data)
            made.append(struct.pack("<I", length) + data)
        return made

    await _streams(lambda: asyncio.open_unix_connection(path), pieces, mutator, cases, outcome)


async def fuzz_bytes(path: str, mutator: Mutator, cases: int, outcome: SurfaceOutcome) -> None:
    """Connections to a gRPC server that do not speak HTTP/2, or begin it and stop."""
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    settings = b"\0\0\0\4\0\0\0\0\0"

    def pieces() -> Sequence[bytes]:
        start = mutator.draw.choice((b"", preface, preface + settings, preface[:7], b"GET / HTTP/1.1\r\n\r\n"))
        frame = struct.pack(">I", mutator.draw.randrange(1 << 24))[1:] + mutator.draw.randbytes(6)
        return [start, mutator.draw.choice((b"", mutator.draw.randbytes(200), frame, settings * 50))]

    await _streams(lambda: asyncio.open_unix_connection(path), pieces, mutator, cases, outcome)


async def _streams(
    connect: Callable[[], object],
    pieces: Callable[[], Sequence[bytes]],
    mutator: Mutator,
    cases: int,
    outcome: SurfaceOutcome,
) -> None:
    hanging: list[asyncio.StreamWriter] = []
    while outcome.cases < cases:
        try:
            reader, writer = await connect()  # type: ignore[misc]
        except OSError as error:
            outcome.fault(f"nobody listens any more: {error}")
            return
        for piece in pieces():
            outcome.cases += 1
            writer.write(piece)
        with contextlib.suppress(OSError):
            async with asyncio.timeout(PATIENCE_S):
                await writer.drain()
        if len(hanging) < _HANGING and mutator.draw.random() < 0.05:
            hanging.append(writer)
            outcome.answers["left open"] += 1
            continue
        # What has arrived by now: whether more would come cannot be waited for.
        said = b""
        with contextlib.suppress(TimeoutError, OSError):
            async with asyncio.timeout(0.002):
                said = await reader.read(1 << 16)
        outcome.answers["answered" if said else "no answer, or closed"] += 1
        writer.close()
    for writer in hanging:
        writer.close()
