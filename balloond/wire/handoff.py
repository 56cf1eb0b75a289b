"""balloond's end of the handoff socket: one session for each connected process."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence

from google.protobuf.message import DecodeError

from balloond.metrics import GROWTH
from balloond.node import processes
from balloond.node.daemon import Daemon
from balloond.node.processes import ProcessIdentity
from balloond.node.records import LeaseFacts
from balloond.policy.claims import RefusalReason
from balloond.policy.kv_limits import Limit
from balloond.policy.ledger import Extent
from balloond.wire import messages
from protos import handoff_pb2
from services.errors import NotFound, PrismError, Unavailable, Unmet
from services.ipc import seqpacket
from services.telemetry import log

_log = log.get(__name__)
_TOGETHER = 64
"""Most descriptors in a message: more are no faster, and would be on their way while no process can use them."""

_MOST_HELD = 1 << 20
"""Most extents that one process may say it holds: 2 TiB of the smallest on a GPU."""


class HandoffServer:
    """Accepts connections at once, so that a second balloond is noticed at once; serves them from `serve` on, when
    there is a ledger."""

    def __init__(self, path: str) -> None:
        self._daemon: Daemon | None = None
        self._may_serve = asyncio.Event()
        self._server = seqpacket.SeqpacketServer(path, self._on_connect)

    def start(self) -> None:
        """Starts to accept. Raises Unavailable when another process serves the path."""
        self._server.start()

    def serve(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._may_serve.set()

    async def stop(self) -> None:
        await self._server.stop()

    async def _on_connect(self, connection: seqpacket.SeqpacketConnection) -> None:
        await self._may_serve.wait()
        assert self._daemon is not None
        try:
            process = _peer(connection)
        except Unavailable as error:
            _log.warning("peer refused", why=str(error))
            # Closing with something unread would reset the connection, and the refusal with it.
            for fd in (await connection.recv() or (b"", []))[1]:
                os.close(fd)
            connection.send(_refusal(0, "peer", 0, str(error)))
            return
        await _LeaseSession(self._daemon, connection, process).run()


def _peer(connection: seqpacket.SeqpacketConnection) -> ProcessIdentity:
    """The connected process. Raises Unavailable with one line for a peer that is refused."""
    peer = seqpacket.peer(connection.sock)
    os.close(peer.pidfd)
    if peer.uid != os.getuid():
        raise Unavailable(f"process {peer.pid} belongs to user {peer.uid}, balloond to {os.getuid()}")
    try:
        return ProcessIdentity(peer.pid, processes.started(peer.pid))
    except OSError as error:
        raise Unavailable(str(error)) from None


class _LeaseSession:
    """One connection, from its Attach to its end."""

    def __init__(self, daemon: Daemon, connection: seqpacket.SeqpacketConnection, process: ProcessIdentity) -> None:
        self._daemon = daemon
        self._connection = connection
        self._process = process
        self._lease_id = ""
        self._unheard = False
        """Whether the lease is new and no message has shown that its process knows of it."""
        self._asked: dict[int, tuple[float, str]] = {}
        """(time, kind) of growths that were requested and not answered, by request id."""

    async def run(self) -> None:
        try:
            if not await self._attach():
                return
            while (message := await self._receive()) is not None:
                self._unheard = False
                await self._take(message)
        except PrismError as error:
            # The request makes no sense, or its lease ended meanwhile: this peer is dropped, and may connect again.
            self.refused(0, _why(error), 0, str(error))
        finally:
            if self._lease_id:
                self._daemon.disconnected(self._lease_id, self, unheard=self._unheard)

    async def _receive(self) -> handoff_pb2.ToBalloond | None:
        """The next message; None when the connection is closed, or speaks something else."""
        await self._connection.drained()
        received = await self._connection.recv()
        if received is None:
            return None
        message, fds = received
        for fd in fds:
            os.close(fd)
        request = handoff_pb2.ToBalloond()
        try:
            request.ParseFromString(message)
        except DecodeError:
            _log.warning("not understood", pid=self._process.pid)
            return None
        return request

    # --- attaching

    async def _attach(self) -> bool:
        first = await self._receive()
        if first is None or not first.HasField("attach"):
            return False
        attach = first.attach
        if max(len(attach.token), len(attach.model)) > messages.LONGEST_NAME:
            return False
        while attach.more:
            following = await self._receive()
            if following is None or not following.HasField("attach"):
                return False
            attach.held.extend(following.attach.held)
            if len(attach.held) > _MOST_HELD:
                return False
            attach.more = following.attach.more
        try:
            if attach.role == handoff_pb2.Attach.LOADER:
                self._watch_borrower()
                self._send(attached=handoff_pb2.Attached())
            else:
                await self._attach_engine(attach)
        except PrismError as error:
            self.refused(0, _why(error), 0, str(error))
            return False
        return True

    def _watch_borrower(self) -> None:
        try:
            self._daemon.watch_borrower(self._process)
        except OSError as error:
            raise Unavailable(str(error)) from None

    async def _attach_engine(self, attach: handoff_pb2.Attach) -> None:
        held = [(extent.id, extent.bytes, messages.kind(extent.kind)) for extent in attach.held]
        facts = self._daemon.known(attach.token) if attach.token else None
        if facts is None and attach.token:
            facts = await self._daemon.adopt(self._process, attach.device, attach.model, attach.token, held)
        elif facts is None:
            facts = await self._daemon.attach(self._process, attach.device, attach.model)
            self._unheard = True
        # Attached has to go out before anything else that the connected lease may be sent.
        self._tell_attached(facts)
        self._daemon.connect(facts, self._process, self, held)
        self._lease_id = facts.id

    def _tell_attached(self, facts: LeaseFacts) -> None:
        limit, floor, page_bytes = self._daemon.limit_of(facts)
        self._send(
            attached=handoff_pb2.Attached(
                lease_id=facts.id, token=facts.token, page_bytes=page_bytes, limit=messages.handoff_limit(limit, floor)
            )
        )

    # --- requests

    async def _take(self, message: handoff_pb2.ToBalloond) -> None:
        kind = message.WhichOneof("message")
        if kind == "borrow":
            await self._borrow(message.borrow)
        elif kind == "return" and not self._lease_id:
            given = getattr(message, "return")
            self._daemon.end_borrow(self._process, given.lease_id, given.extent_ids)
        elif not self._lease_id:
            self.refused(0, "unknown", 0, f"{kind} without a lease")
        elif kind == "grow":
            grow = message.grow
            wanted = messages.wanted(grow)
            self._asked[grow.request_id] = self._daemon.now(), wanted.kind
            self._daemon.grow(self._lease_id, grow.request_id, wanted)
        elif kind == "return":
            self._daemon.give_back(self._lease_id, getattr(message, "return").extent_ids)
        elif kind == "report":
            self._daemon.report(self._lease_id, messages.report(message.report, self._daemon.now()))
        elif kind == "detach":
            lease_id, self._lease_id = self._lease_id, ""
            self._send(detached=handoff_pb2.Detached())
            self._daemon.detach(lease_id)
        else:
            self.refused(0, "unknown", 0, f"{kind} is not expected here")

    async def _borrow(self, borrow: handoff_pb2.Borrow) -> None:
        try:
            # the process may have been found dead before this message is read, and its death is not noticed twice
            self._watch_borrower()
            device, extents, fds = await self._daemon.borrow(self._process, borrow.lease_id, borrow.extent_ids)
        except (NotFound, Unavailable) as error:
            self.refused(borrow.request_id, _why(error), 0, str(error))
            return
        self.granted(borrow.request_id, extents, fds, last=True, device=device)

    # --- what the daemon sends

    def _send(self, fds: Sequence[int] = (), **message: object) -> None:
        self._connection.send(handoff_pb2.FromBalloond(**message).SerializeToString(), fds)  # type: ignore[arg-type]

    def granted(
        self, request_id: int, extents: Sequence[Extent], fds: Sequence[int], last: bool, device: str = ""
    ) -> None:
        for start in range(0, max(1, len(extents)), _TOGETHER):
            part = slice(start, start + _TOGETHER)
            granted = handoff_pb2.Granted(
                request_id=request_id,
                extents=[
                    handoff_pb2.Extent(id=e.id, bytes=e.bytes, kind=messages.KINDS[e.kind]) for e in extents[part]
                ],
                last=last and start + _TOGETHER >= len(extents),
                device=device,
            )
            self._send(fds[part], granted=granted)
        if last:
            self._answered(request_id, "granted")

    def _answered(self, request_id: int, outcome: str) -> None:
        if (asked := self._asked.pop(request_id, None)) is not None:
            asked_at, kind = asked
            GROWTH.labels(kind, outcome).observe(self._daemon.now() - asked_at)

    def refused(self, request_id: int, why: RefusalReason, short: int, detail: str) -> None:
        self._connection.send(_refusal(request_id, why, short, detail))
        self._answered(request_id, "refused")

    def limit(self, limit: Limit, floor: int) -> None:
        self._send(limit=messages.handoff_limit(limit, floor))

    def reclaim(self, reclaim_id: int, nbytes: int, deep: bool) -> None:
        self._send(reclaim=handoff_pb2.Reclaim(reclaim_id=reclaim_id, bytes=nbytes, deep=deep))

    def close(self) -> None:
        self._connection.close()


def _refusal(request_id: int, why: RefusalReason, short: int, detail: str) -> bytes:
    refused = handoff_pb2.Refused(
        request_id=request_id, why=messages.WHYS[why], short_bytes=messages.bytes_of(short), detail=detail
    )
    return bytes(handoff_pb2.FromBalloond(refused=refused).SerializeToString())


def _why(error: PrismError) -> RefusalReason:
    if isinstance(error, Unmet):
        return "not_booked"
    return "peer" if isinstance(error, Unavailable) else "unknown"
