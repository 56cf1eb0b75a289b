"""The loader's end of balloond's handoff socket (protos/handoff.proto, role LOADER): extents borrowed for a copy.

balloond may die and come back. What was borrowed stays usable: a descriptor is the memory. The connection is made
again, borrows without an answer are requested again, and returns that the old connection may have lost are sent again.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections import deque
from collections.abc import AsyncIterator, Sequence
from weakref import WeakValueDictionary

from loader.transfers.base import Borrowed
from protos import handoff_pb2
from services.errors import NotFound, PrismError, Unavailable, Unmet
from services.ipc import seqpacket
from services.telemetry import log

_log = log.get(__name__)
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.02, 1.0
_REMEMBERED_RETURNS = 64
"""Number of returns that are remembered: more than a socket buffer can swallow between two copies."""


class _Loan:
    """One Borrow: it is under way until `answered`, then the extents are here until they are returned."""

    def __init__(self, lease_id: str, extent_ids: Sequence[int] = ()) -> None:
        self.lease_id = lease_id
        self.extent_ids = tuple(extent_ids)
        """Ids of KV extents; none: the weights extents."""
        self.extents: list[Borrowed] = []
        self.refusal: PrismError | None = None
        self.answered = asyncio.Event()
        self.abandoned = False
        """Whether no caller waits for the answer any more: what arrives goes straight back."""

    def close(self) -> None:
        for extent in self.extents:
            os.close(extent.fd)
        self.extents.clear()


class HandoffClient:
    """One process's connection to balloond. `run` has to run for anything to be answered."""

    def __init__(self, path: str, answer_timeout_s: float) -> None:
        self._path = path
        self._answer_timeout_s = answer_timeout_s
        self._connection: seqpacket.SeqpacketConnection | None = None
        self._ids = itertools.count(1)
        self._loans: dict[int, _Loan] = {}
        """Loans by request id, from the Borrow to the Return."""
        self._locks: WeakValueDictionary[tuple[str, bool], asyncio.Lock] = WeakValueDictionary()
        self._returned: deque[tuple[str, bool, tuple[int, ...]]] = deque(maxlen=_REMEMBERED_RETURNS)
        """(lease id, whether of KV, extent ids; none: whatever the lease lent) of each of the last returns."""

    @contextlib.asynccontextmanager
    async def borrowed(self, lease_id: str, extent_ids: Sequence[int] = ()) -> AsyncIterator[Sequence[Borrowed]]:
        """The weights extents of a lease, in the order of the range, or those of its KV extents that are named,
        ascending; they go back at the end. Callers take turns for a lease, weights and KV apart: a Return names
        extents, and must not end another borrowing of the same ones. Raises NotFound when there is no such lease or
        extent, Unavailable when balloond does not answer in time."""
        lock = self._locks.setdefault((lease_id, bool(extent_ids)), asyncio.Lock())
        async with lock:
            try:
                async with asyncio.timeout(self._answer_timeout_s):
                    await self._abandoned(lease_id)
                    request_id, loan = self._ask(lease_id, extent_ids)
                    try:
                        await loan.answered.wait()
                    except BaseException:
                        self._end(request_id, loan)
                        raise
            except TimeoutError:
                raise Unavailable(f"balloond at {self._path} does not answer") from None
            try:
                if loan.refusal is not None:
                    raise loan.refusal
                # Ascending ids are the range's order, whatever the order of the answer's messages.
                yield sorted(loan.extents, key=lambda extent: extent.id)
            finally:
                self._end(request_id, loan)

    async def run(self) -> None:
        """Connects, and again whenever the connection breaks; for ever."""
        wait = _FIRST_WAIT_S
        while True:
            try:
                self._connection = await seqpacket.connect_async(self._path)
            except OSError:
                await asyncio.sleep(wait)
                wait = min(2 * wait, _LONGEST_WAIT_S)
                continue
            try:
                self._greet()
                if await self._receive(self._connection):
                    wait = _FIRST_WAIT_S
            finally:
                self._connection.close()
                self._lost()
            await asyncio.sleep(wait)
            wait = min(2 * wait, _LONGEST_WAIT_S)

    # --- borrowing and returning

    def _ask(self, lease_id: str, extent_ids: Sequence[int]) -> tuple[int, _Loan]:
        request_id, loan = next(self._ids), _Loan(lease_id, extent_ids)
        self._loans[request_id] = loan
        self._borrow(request_id, loan)
        return request_id, loan

    def _borrow(self, request_id: int, loan: _Loan) -> None:
        self._send(borrow=handoff_pb2.Borrow(request_id=request_id, lease_id=loan.lease_id, extent_ids=loan.extent_ids))

    async def _abandoned(self, lease_id: str) -> None:
        """Waits until no abandoned borrow of the lease is under way, whose Return would come after the next Borrow."""
        for loan in list(self._loans.values()):
            if loan.lease_id == lease_id and loan.abandoned:
                await loan.answered.wait()

    def _end(self, request_id: int, loan: _Loan) -> None:
        if not loan.answered.is_set():
            loan.abandoned = True
            return
        del self._loans[request_id]
        if loan.refusal is None:
            ids = tuple(extent.id for extent in loan.extents)
            loan.close()
            self._returned.append((loan.lease_id, bool(loan.extent_ids), ids))
            self._give_back(loan.lease_id, ids)

    def _give_back(self, lease_id: str, ids: Sequence[int]) -> None:
        self._send(**{"return": handoff_pb2.Return(extent_ids=ids, lease_id=lease_id)})

    def _send(self, **message: object) -> None:
        if self._connection is not None:
            self._connection.send(handoff_pb2.ToBalloond(**message).SerializeToString())  # type: ignore[arg-type]

    # --- the connection

    def _greet(self) -> None:
        self._send(attach=handoff_pb2.Attach(role=handoff_pb2.Attach.LOADER))
        on_loan = {(loan.lease_id, bool(loan.extent_ids)) for loan in self._loans.values()}
        for lease_id, of_kv, ids in self._returned:
            kinds = {of_kv} if ids else {True, False}
            if not any((lease_id, kind) in on_loan for kind in kinds):
                self._give_back(lease_id, ids)
        for request_id, loan in self._loans.items():
            if not loan.answered.is_set():
                self._borrow(request_id, loan)

    async def _receive(self, connection: seqpacket.SeqpacketConnection) -> bool:
        """Handles messages until the connection ends. Returns whether balloond had taken this process in."""
        attached = False
        while (received := await connection.recv()) is not None:
            message, fds = received
            answer = handoff_pb2.FromBalloond.FromString(message)
            kind = answer.WhichOneof("message")
            if kind == "attached":
                attached = True
                _log.info("balloond found", path=self._path)
            elif kind == "granted":
                self._granted(answer.granted, fds)
            elif kind == "refused" and answer.refused.request_id:
                self._refused(answer.refused)
            elif kind == "refused":
                _log.warning("balloond refused the loader", why=answer.refused.detail)
        if attached:
            _log.warning("balloond lost", path=self._path)
        return attached

    def _granted(self, granted: handoff_pb2.Granted, fds: list[int]) -> None:
        loan = self._loans.get(granted.request_id)
        if loan is None:
            for fd in fds:
                os.close(fd)
            return
        loan.extents += [
            Borrowed(extent.id, extent.bytes, fd, granted.device)
            for extent, fd in zip(granted.extents, fds, strict=True)
        ]
        if granted.last:
            self._answered(granted.request_id, loan)

    def _refused(self, refused: handoff_pb2.Refused) -> None:
        loan = self._loans.get(refused.request_id)
        if loan is not None:
            kind = NotFound if refused.why == handoff_pb2.Refused.UNKNOWN else Unmet
            loan.refusal = kind(refused.detail)
            self._answered(refused.request_id, loan)

    def _answered(self, request_id: int, loan: _Loan) -> None:
        loan.answered.set()
        if loan.abandoned:
            self._end(request_id, loan)

    def _lost(self) -> None:
        self._connection = None
        for request_id, loan in list(self._loans.items()):
            if loan.answered.is_set():
                continue
            loan.close()  # these came in the first messages of an answer; it is requested again as a whole
            if loan.abandoned:
                del self._loans[request_id]
                # The successor may know of the borrow from the keeper; nothing of it is here.
                self._returned.append((loan.lease_id, bool(loan.extent_ids), ()))
                loan.answered.set()
