"""`python -m balloond.keeper --socket PATH`: holds one descriptor for each extent and image, with its record.

It does nothing else: no policy, no device, no allocation, so nothing that could make it fail. A process that holds an
extent's descriptor holds its memory: as long as this process lives, balloond and the loader may die and come back to
everything they had. It lives through whatever its clients send.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Iterable

from google.protobuf.message import DecodeError

from protos import keeper_pb2
from services.errors import PrismError
from services.ipc import seqpacket
from services.runtime import notify, tasks
from services.runtime.process_limits import allow_descriptors

_BATCH_BYTES = seqpacket.MAX_BYTES // 2
_LONGEST_RECORD = seqpacket.MAX_BYTES - 64
"""Most bytes of a record: it has to fit the answer that lists it, with what is around it there."""


class Keeper:
    """Records with their descriptors, by id."""

    def __init__(self) -> None:
        self._records: dict[str, keeper_pb2.Record] = {}
        self._fds: dict[str, int] = {}

    def keep(self, records: Iterable[keeper_pb2.Record], fds: list[int]) -> None:
        """Takes the records and their descriptors over. Raises ValueError when they do not match, or for a record that
        is too long; then the descriptors are closed."""
        records = list(records)
        try:
            _check(records)
            if sum(record.has_descriptor for record in records) != len(fds):
                raise ValueError(f"{len(fds)} descriptors for {len(records)} records")
        except ValueError:
            for fd in fds:
                os.close(fd)
            raise
        arrived = iter(fds)
        for record in records:
            old = self._fds.pop(record.id, None)
            if old is not None:
                os.close(old)
            self._records[record.id] = record
            if record.has_descriptor:
                self._fds[record.id] = next(arrived)

    def update(self, records: Iterable[keeper_pb2.Record]) -> None:
        """Changes records; their descriptors stay. Raises ValueError for an unknown id, after the other records were
        changed, and for a record that is too long; then none is changed."""
        records = list(records)
        _check(records)
        unknown = []
        for record in records:
            if record.id not in self._records:
                unknown.append(record.id)
                continue
            record.has_descriptor = record.id in self._fds
            self._records[record.id] = record
        if unknown:
            raise ValueError(f"unknown: {', '.join(unknown)}")

    def forget(self, ids: Iterable[str]) -> None:
        """Forgets records and closes their descriptors. Unknown ids are forgotten already."""
        for id in ids:
            self._records.pop(id, None)
            fd = self._fds.pop(id, None)
            if fd is not None:
                os.close(fd)

    def list(self, owner: str, with_descriptors: bool) -> Iterable[tuple[keeper_pb2.Records, list[int]]]:
        """Messages that together are the answer, each with its descriptors, the last one marked. `owner`: all if it is
        empty."""
        batch, size = keeper_pb2.Records(), 0
        fds: list[int] = []
        for record in self._records.values():
            if owner and record.owner != owner:
                continue
            length = record.ByteSize() + 8
            if batch.records and (len(fds) == seqpacket.MAX_DESCRIPTORS or size + length > _BATCH_BYTES):
                yield batch, fds
                batch, fds, size = keeper_pb2.Records(), [], 0
            batch.records.append(record)
            size += length
            if not with_descriptors:
                batch.records[-1].has_descriptor = False
            elif record.has_descriptor:
                fds.append(self._fds[record.id])
        batch.last = True
        yield batch, fds


def _check(records: Iterable[keeper_pb2.Record]) -> None:
    longest = max((record.ByteSize() for record in records), default=0)
    if longest > _LONGEST_RECORD:
        raise ValueError(f"a record of {longest} bytes cannot be listed")


class _ClientSession:
    """One client's connection."""

    def __init__(self, keeper: Keeper, connection: seqpacket.SeqpacketConnection) -> None:
        self._keeper = keeper
        self._connection = connection

    async def run(self) -> None:
        while (received := await self._connection.recv()) is not None:
            message, fds = received
            try:
                request = keeper_pb2.ToKeeper.FromString(message)
            except DecodeError:
                for fd in fds:
                    os.close(fd)
                return
            try:
                self._answer(request, fds)
            except ValueError as error:
                self._send(request.request_id, error=keeper_pb2.Error(reason=str(error)[:1000]))
            await self._connection.drained()

    def _answer(self, request: keeper_pb2.ToKeeper, fds: list[int]) -> None:
        kind = request.WhichOneof("message")
        if kind == "keep":
            self._keeper.keep(request.keep.records, fds)
            self._send(request.request_id, kept=keeper_pb2.Kept())
            return
        for fd in fds:
            os.close(fd)
        if kind == "update":
            self._keeper.update(request.update.records)
            self._send(request.request_id, kept=keeper_pb2.Kept())
        elif kind == "forget":
            self._keeper.forget(request.forget.ids)
            self._send(request.request_id, kept=keeper_pb2.Kept())
        elif kind == "list":
            for records, there in self._keeper.list(request.list.owner, request.list.with_descriptors):
                self._send(request.request_id, there, records=records)
        else:
            raise ValueError("no such request")

    def _send(self, request_id: int, fds: list[int] | None = None, **answer: object) -> None:
        message = keeper_pb2.FromKeeper(request_id=request_id, **answer)  # type: ignore[arg-type]
        self._connection.send(message.SerializeToString(), fds or ())


async def serve(path: str) -> None:
    """Serves `path` until SIGTERM or SIGINT. Raises Unavailable when another process serves it."""
    keeper = Keeper()
    manager = notify.Manager()

    async def on_connect(connection: seqpacket.SeqpacketConnection) -> None:
        try:
            peer = seqpacket.peer(connection.sock)
        except PrismError:
            return  # gone already
        os.close(peer.pidfd)
        if peer.uid == os.getuid():
            await _ClientSession(keeper, connection).run()

    server = seqpacket.SeqpacketServer(path, on_connect)
    server.start()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    beating = tasks.spawn(manager.beat(), "watchdog")
    manager.ready(f"serving on {path}")
    await stop.wait()
    manager.stopping()
    await server.stop()
    await tasks.cancel(beating)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m balloond.keeper", description=__doc__.partition("\n\n")[0])
    parser.add_argument("--socket", required=True, metavar="PATH")
    allow_descriptors()  # one for each extent
    try:
        asyncio.run(serve(parser.parse_args().socket))
    except PrismError as error:
        sys.exit(f"keeper: {error}")
