"""An owner's end of the keeper's socket, in a running loop (for balloond and the loader).

The keeper may die and come back empty: on every connection the owner puts everything back (`everything`), and what the
keeper has beyond that is forgotten. `keep` returns once the records are held, even if the keeper dies meanwhile.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable, Iterable, Sequence

from protos import keeper_pb2
from services.errors import Unavailable
from services.ipc import seqpacket
from services.runtime import tasks
from services.telemetry import log

_log = log.get(__name__)
_BATCH_BYTES = seqpacket.MAX_BYTES // 2
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.02, 0.5

Kept = tuple[keeper_pb2.Record, int | None]
"""A record with its descriptor (None: it has none), which stays the owner's."""


class KeeperLost(Exception):
    """Raised when the connection broke."""


class KeeperClient:
    """One owner's connection, made again whenever it breaks."""

    def __init__(self, path: str, owner: str) -> None:
        self.path = path
        self._owner = owner
        self._connection: seqpacket.SeqpacketConnection | None = None
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._lists: dict[int, list[tuple[keeper_pb2.Record, int]]] = {}
        self._restored = asyncio.Event()
        self._gone = asyncio.Event()
        self._everything: Callable[[], Iterable[Kept]] = tuple
        self._following: asyncio.Task[None] | None = None

    async def start(self, timeout_s: float) -> list[tuple[keeper_pb2.Record, int]]:
        """Connects and returns all records of this owner with their descriptors (-1: none), now the caller's. Raises
        Unavailable when no keeper answers in time."""
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    try:
                        await self._connect()
                        return await self._list(with_descriptors=True)
                    except (OSError, KeeperLost):
                        await asyncio.sleep(_FIRST_WAIT_S)
        except TimeoutError:
            raise Unavailable(f"{self.path}: no keeper answers") from None

    @property
    def pid(self) -> int:
        """Pid of the keeper that is connected. Raises Unavailable if it is gone, or not visible here."""
        assert self._connection is not None
        peer = seqpacket.peer(self._connection.sock)
        os.close(peer.pidfd)
        return peer.pid

    def follow(
        self, everything: Callable[[], Iterable[Kept]], on_failure: Callable[[BaseException], None] | None = None
    ) -> None:
        """From now on a lost connection is made again, and `everything` put back. `on_failure` is called if that cannot
        be done: nothing may be given out that no keeper holds."""
        self._everything = everything
        self._restored.set()
        self._following = tasks.spawn(self._follow(), "follow keeper", on_failure)

    async def close(self) -> None:
        if self._following is not None:
            await tasks.cancel(self._following)
        if self._connection is not None:
            self._connection.close()

    # --- requests

    def keep(self, kept: Sequence[Kept]) -> asyncio.Task[None]:
        """Sends records at once. The task ends when the keeper holds them. They must be part of `everything` already:
        after a lost connection it is `everything` that is put back, since descriptors named here may be closed by
        then."""
        answers = None
        if self._restored.is_set():
            answers = [self._ask(_keep(batch), _descriptors(batch)) for batch in _batches(kept)]
        return tasks.spawn(self._settled(answers), "keep")

    def forget(self, ids: Sequence[str]) -> asyncio.Task[None]:
        """Sends the ids of records to forget at once. The task ends when the keeper has closed the last of their
        descriptors. The records must not be part of `everything` any more."""
        answers = [self._ask(request) for request in _forgets(ids)] if self._restored.is_set() else None
        return tasks.spawn(self._settled(answers), "forget")

    async def answers(self, within_s: float) -> bool:
        """Whether the keeper is connected and answers within `within_s` seconds: a connection to one that hangs looks
        like any other."""
        try:
            async with asyncio.timeout(within_s):
                await self._restored.wait()
                await self._call(keeper_pb2.ToKeeper(keep=keeper_pb2.Keep()))
        except (TimeoutError, KeeperLost):
            return False
        return True

    async def _settled(self, answers: Sequence[asyncio.Future[None]] | None) -> None:
        """Waits until all requests are answered; or, if they were not sent or the connection was lost, until the keeper
        has what `everything` says."""
        if answers is not None:
            results = await asyncio.gather(*answers, return_exceptions=True)
            if not any(isinstance(result, KeeperLost) for result in results):
                return
        while True:
            await self._restored.wait()
            try:
                await self._call(keeper_pb2.ToKeeper(keep=keeper_pb2.Keep()))
                return
            except KeeperLost:
                self._restored.clear()

    def keep_soon(self, kept: Sequence[Kept]) -> None:
        """Sends records as `keep` does, and does not wait."""
        if self._restored.is_set():
            for batch in _batches(kept):
                self._send(_keep(batch), _descriptors(batch))

    def forget_soon(self, ids: Sequence[str]) -> None:
        """Sends the ids of records to forget, and does not wait: an owner that dies before finds the records of things
        that no process has any more."""
        if self._restored.is_set():
            for request in _forgets(ids):
                self._send(request)

    # --- the connection

    async def _connect(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = await seqpacket.connect_async(self.path)
        tasks.spawn(self._receive(self._connection), "receive from keeper")

    def _send(self, request: keeper_pb2.ToKeeper, fds: Sequence[int] = ()) -> int:
        request.request_id = next(self._ids)
        if self._connection is not None:
            self._connection.send(request.SerializeToString(), fds)
        return request.request_id

    def _ask(self, request: keeper_pb2.ToKeeper, fds: Sequence[int] = ()) -> asyncio.Future[None]:
        """Sends at once; the future ends with the answer, or with KeeperLost."""
        answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._connection is None or self._connection.closed:
            answered.set_exception(KeeperLost())
            return answered
        request_id = self._send(request, fds)
        self._waiting[request_id] = answered
        answered.add_done_callback(lambda _: self._waiting.pop(request_id, None))
        return answered

    async def _call(self, request: keeper_pb2.ToKeeper) -> int:
        """Sends and waits for the answer. Raises KeeperLost."""
        await self._ask(request)
        return request.request_id

    async def _list(self, with_descriptors: bool) -> list[tuple[keeper_pb2.Record, int]]:
        request = keeper_pb2.ToKeeper(list=keeper_pb2.List(owner=self._owner, with_descriptors=with_descriptors))
        return self._lists.pop(await self._call(request), [])

    async def _receive(self, connection: seqpacket.SeqpacketConnection) -> None:
        while (received := await connection.recv()) is not None:
            message, fds = received
            answer = keeper_pb2.FromKeeper.FromString(message)
            if answer.WhichOneof("message") == "records":
                arrived = iter(fds)
                known = self._lists.setdefault(answer.request_id, [])
                known += [(record, next(arrived) if record.has_descriptor else -1) for record in answer.records.records]
                if not answer.records.last:
                    continue
            elif answer.WhichOneof("message") == "error":
                _log.warning("keeper refused", reason=answer.error.reason)
            waiting = self._waiting.get(answer.request_id)
            if waiting is not None and not waiting.done():
                waiting.set_result(None)
        if connection is self._connection:
            self._lost()

    def _lost(self) -> None:
        self._restored.clear()
        for _, fd in itertools.chain.from_iterable(self._lists.values()):
            if fd >= 0:
                os.close(fd)
        self._lists.clear()
        for waiting in list(self._waiting.values()):
            if not waiting.done():
                waiting.set_exception(KeeperLost())
        self._gone.set()

    async def _follow(self) -> None:
        wait = _FIRST_WAIT_S
        while True:
            await self._gone.wait()
            _log.warning("keeper lost; putting everything back when it returns")
            while True:
                self._gone.clear()
                try:
                    await self._connect()
                    await self._restore()
                    break
                except (OSError, KeeperLost):
                    await asyncio.sleep(wait)
                    wait = min(2 * wait, _LONGEST_WAIT_S)
            wait = _FIRST_WAIT_S
            _log.info("keeper is back")

    async def _restore(self) -> None:
        there = {record.id for record, _ in await self._list(with_descriptors=False)}
        # From here to `_restored` nothing is awaited: no change can slip in between.
        everything = list(self._everything())
        for batch in _batches(everything):
            self._send(_keep(batch), _descriptors(batch))
        self._restored.set()
        self.forget_soon(sorted(there - {record.id for record, _ in everything}))


def _forgets(ids: Sequence[str]) -> Iterable[keeper_pb2.ToKeeper]:
    for start in range(0, len(ids), 2000):
        yield keeper_pb2.ToKeeper(forget=keeper_pb2.Forget(ids=ids[start : start + 2000]))


def _keep(batch: Sequence[Kept]) -> keeper_pb2.ToKeeper:
    return keeper_pb2.ToKeeper(keep=keeper_pb2.Keep(records=[record for record, _ in batch]))


def _descriptors(batch: Sequence[Kept]) -> list[int]:
    return [fd for _, fd in batch if fd is not None]


def _batches(kept: Sequence[Kept]) -> Iterable[Sequence[Kept]]:
    """Parts of `kept`, each as large as fits one message."""
    batch: list[Kept] = []
    size = 0
    for record, fd in kept:
        length = record.ByteSize() + 8
        if batch and (len(batch) == seqpacket.MAX_DESCRIPTORS or size + length > _BATCH_BYTES):
            yield batch
            batch, size = [], 0
        batch.append((record, fd))
        size += length
    if batch:
        yield batch
