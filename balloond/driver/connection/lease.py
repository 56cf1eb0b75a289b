"""A lease of (device, model): the process's end of balloond's handoff socket.

The lease outlives the socket: when balloond goes away the thread connects again and again, shows the token and names
what is held. Growths that wait are requested again then; what was given back meanwhile is simply not named.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from balloond.driver.connection import alive
from balloond.driver.connection.loop import DescriptorLoop
from balloond.driver.connection.outbox import Outbox
from protos import handoff_pb2
from services.ipc import seqpacket
from services.telemetry import log

_log = log.get(__name__)
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.01, 0.5
_CONNECT_S = 5.0
_HELD_PER_MESSAGE = 4000
"""Number of ids with their sizes that fit one datagram."""

Kind = int
WEIGHTS: Kind = handoff_pb2.WEIGHTS
KV: Kind = handoff_pb2.KV
GRAPHS: Kind = handoff_pb2.GRAPHS

_WHY = {number: name.lower() for name, number in handoff_pb2.Refused.Why.items()}


class LeaseRefused(Exception):
    """Raised when balloond does not give this process a lease, or did not answer in time. `why`: "not_booked",
    "unknown", "peer" or "timeout"."""

    def __init__(self, why: str, detail: str) -> None:
        super().__init__(f"{why}: {detail}")
        self.why = why
        self.detail = detail


class GrowRefused(Exception):
    """Raised when balloond grants no extents, or no more. `why`: "over_limit", "exhausted", "not_booked", "unknown" or
    "timeout"."""

    def __init__(self, why: str, short_bytes: int, detail: str) -> None:
        super().__init__(f"{why}: {detail}")
        self.why = why
        self.short_bytes = short_bytes
        self.detail = detail


@dataclass(frozen=True)
class LeaseLimit:
    """Bytes of KV that the lease may hold at most, and the floor, with the limit's revision and deadline."""

    revision: int = 0
    bytes: int = 0
    floor_bytes: int = 0
    deadline_ms: int = 0


@dataclass(frozen=True, slots=True)
class Granted:
    """A new extent of zeros. The receiver closes the descriptor, after mapping."""

    id: int
    bytes: int
    fd: int


@dataclass(frozen=True)
class Usage:
    """State of a lease's KV, as far as balloond's policy needs it. Sizes in bytes."""

    held: int = 0
    used: int = 0
    reserve: int = 0
    cached: tuple[tuple[float, int], ...] = ()
    """(seconds since last use, bytes) of cached prefixes."""
    reclaim_id: int = 0
    """Id of the reclaim that this answers; 0: none."""
    returned: int = 0


Done = Callable[[list[Granted], GrowRefused | None], None]
"""Callback, on the lease's thread, with the extents that were granted, and why no more were; None if all were."""


@dataclass
class _Growth:
    kind: Kind
    bytes: int
    count: int
    min_count: int
    only_free: bool
    done: Done
    behind_bytes: int = 0
    cached_bytes: int = 0
    got: list[Granted] = field(default_factory=list)


class Lease:
    """One lease, as the module describes it. Methods may be called from any thread; blocking ones not from the lease's
    own."""

    def __init__(self, socket_path: str, device: str, model: str) -> None:
        """Makes a lease that is not connected; use `attach`."""
        self.device = device
        self.model = model
        self.lease_id = ""
        self.token = ""
        self.page_bytes = 0
        self.limit = LeaseLimit()
        """The newest limit known."""
        self.on_limit: Callable[[], None] = lambda: None
        self.on_reclaim: Callable[[int, int, bool], None] = self._nothing_to_give
        """Callback (reclaim_id, bytes, deep), to be answered by `report` with the id."""
        self.on_attached: Callable[[], None] = lambda: None
        """Callback when balloond is there, again: it may have forgotten what was reported before."""
        self.loop = DescriptorLoop(f"lease of {model}")
        self._path = socket_path
        self._lock = threading.Lock()
        """Lock of the outbox, `_held` and `_growths`, so that an Attach names exactly what is held."""
        self._sock: socket.socket | None = None
        """Connection to balloond; only the lease's thread uses it here."""
        self._outbox = Outbox(self.loop, self._lock)
        self._held: dict[int, tuple[int, Kind]] = {}
        self._growths: dict[int, _Growth] = {}
        self._last_request = 0
        self._wait_s = _FIRST_WAIT_S
        self._attached = threading.Event()
        self._refused: LeaseRefused | None = None
        self._detaching = False
        self._over = threading.Event()
        self._alive: int | None = None
        """Descriptor whose lock says that this process holds memory."""

    def __repr__(self) -> str:
        return f"Lease({self.lease_id} of {self.model} on {self.device}, {len(self._held)} extents)"

    @classmethod
    def attach(cls, socket_path: str, device: str, model: str, *, timeout_s: float) -> Lease:
        """Connects and returns a lease that balloond has given. Raises LeaseRefused, also after `timeout_s` without an
        answer."""
        lease = cls(socket_path, device, model)
        lease.loop.start()
        lease.loop.call(lease._connect)
        if lease._attached.wait(timeout_s) and lease._refused is None:
            return lease
        lease._end()
        raise lease._refused or LeaseRefused(
            "timeout", f"balloond at {socket_path} gave no answer within {timeout_s:g} s"
        )

    # --- extents

    @property
    def held_ids(self) -> set[int]:
        with self._lock:
            return set(self._held)

    def grow(
        self,
        kind: Kind,
        extent_bytes: int,
        count: int,
        *,
        min_count: int | None = None,
        only_free: bool = False,
        timeout_s: float,
    ) -> list[Granted]:
        """Returns `count` new extents of `extent_bytes`, or at least `min_count`. Waits while others give back, and
        while balloond is away. Raises GrowRefused, also after `timeout_s`."""
        assert not self.loop.here(), "a blocking call on the lease's own thread would never return"
        finished = threading.Event()
        result: list[tuple[list[Granted], GrowRefused | None]] = []

        def done(extents: list[Granted], refused: GrowRefused | None) -> None:
            result.append((extents, refused))
            finished.set()

        request_id = self.request(kind, extent_bytes, count, done, min_count=min_count, only_free=only_free)
        if not finished.wait(timeout_s):
            with self._lock:
                growth = self._growths.get(request_id)
                if growth is not None:
                    # The answer may still come: then the extents go straight back.
                    growth.done = self._too_late
            if growth is not None:
                raise GrowRefused("timeout", count * extent_bytes, f"no answer within {timeout_s:g} s")
            finished.wait()
        extents, refused = result[0]
        if refused is not None:
            self._too_late(extents, None)
            raise refused
        return extents

    def request(
        self,
        kind: Kind,
        extent_bytes: int,
        count: int,
        done: Done,
        *,
        min_count: int | None = None,
        only_free: bool = False,
        behind_bytes: int = 0,
        cached_bytes: int = 0,
    ) -> int:
        """Requests extents as `grow` does, without waiting, and returns the request's id: `done` is called once, on the
        lease's thread. `behind_bytes` will be requested after it; the lease could evict `cached_bytes` of its own
        prefixes instead."""
        least = count if min_count is None else min_count
        growth = _Growth(kind, extent_bytes, count, least, only_free, done, behind_bytes, cached_bytes)
        with self._lock:
            self._last_request += 1
            self._growths[self._last_request] = growth
            self._send_growth(self._last_request, growth)
            return self._last_request

    def give_back(self, extent_ids: Iterable[int]) -> None:
        """Returns extents that are unmapped here and whose descriptors are closed."""
        ids = list(extent_ids)
        with self._lock:
            for id in ids:
                self._held.pop(id, None)
            for start in range(0, len(ids), _HELD_PER_MESSAGE):
                part = handoff_pb2.Return(extent_ids=ids[start : start + _HELD_PER_MESSAGE])
                self._send(handoff_pb2.ToBalloond(**{"return": part}))

    def _too_late(self, extents: list[Granted], refused: GrowRefused | None) -> None:
        for extent in extents:
            os.close(extent.fd)
        if extents:
            self.give_back([extent.id for extent in extents])

    # --- reports

    def report(self, usage: Usage) -> None:
        """Sends a report and does not wait. It is lost while balloond is away: `on_attached` says when to report
        again."""
        report = handoff_pb2.Report(
            limit_revision=self.limit.revision,
            held_bytes=usage.held,
            used_bytes=usage.used,
            reserve_bytes=usage.reserve,
            cached=[handoff_pb2.Cached(age_ms=int(1e3 * age_s), bytes=nbytes) for age_s, nbytes in usage.cached],
            reclaim_id=usage.reclaim_id,
            returned_bytes=usage.returned,
        )
        with self._lock:
            self._send(handoff_pb2.ToBalloond(report=report))

    def _nothing_to_give(self, reclaim_id: int, nbytes: int, deep: bool) -> None:
        with self._lock:
            held = sum(nbytes for nbytes, kind in self._held.values() if kind == KV)
        self.report(Usage(held=held, used=held, reclaim_id=reclaim_id))

    # --- the end

    def detach(self, timeout_s: float = 5.0) -> None:
        """Ends the lease; everything must be unmapped. Waits up to `timeout_s` until balloond knows; when it is away,
        the thread goes on trying."""
        with self._lock:
            self._held.clear()
            self._growths.clear()
            self._detaching = True
            self._send(handoff_pb2.ToBalloond(detach=handoff_pb2.Detach()))
        self._over.wait(timeout_s)

    def _end(self) -> None:
        """Closes the connection for good; callable on any thread."""

        def end() -> None:
            self._disconnect()
            self._hold_alive(None)
            self._over.set()
            self.loop.stop()

        self.loop.call(end)

    # --- the socket; on the lease's thread unless said otherwise

    def _send(self, message: handoff_pb2.ToBalloond) -> None:
        """Sends a message with the lock held, on any thread. Without a connection it is dropped: what matters is sent
        again after the next one."""
        self._outbox.send(message.SerializeToString())

    def _send_growth(self, request_id: int, growth: _Growth) -> None:
        grow = handoff_pb2.Grow(
            request_id=request_id,
            kind=growth.kind,  # type: ignore[arg-type]
            bytes=growth.bytes,
            count=growth.count - len(growth.got),
            min_count=max(1, growth.min_count - len(growth.got)),
            for_reserve=growth.only_free,
            behind_bytes=growth.behind_bytes,
            cached_bytes=growth.cached_bytes,
        )
        self._send(handoff_pb2.ToBalloond(grow=grow))

    def _connect(self) -> None:
        if self._over.is_set():
            return
        try:
            sock = seqpacket.connect(self._path, timeout_s=_CONNECT_S)
        except OSError:
            self._try_again()
            return
        self._sock = sock
        with self._lock:
            self._outbox.connected(sock)
            for message in self._attach_messages():
                self._send(message)
            for request_id, growth in self._growths.items():
                self._send_growth(request_id, growth)
            if self._detaching:
                self._send(handoff_pb2.ToBalloond(detach=handoff_pb2.Detach()))
        self.loop.add_reader(sock.fileno(), self._receive)

    def _attach_messages(self) -> Iterable[handoff_pb2.ToBalloond]:
        held = list(self._held.items())
        parts = [held[start : start + _HELD_PER_MESSAGE] for start in range(0, len(held), _HELD_PER_MESSAGE)] or [[]]
        for number, part in enumerate(parts, start=1):
            attach = handoff_pb2.Attach(
                role=handoff_pb2.Attach.ENGINE,
                device=self.device,
                model=self.model,
                token=self.token,
                held=[handoff_pb2.Extent(id=id, bytes=nbytes, kind=kind) for id, (nbytes, kind) in part],  # type: ignore[arg-type]
                more=number < len(parts),
            )
            yield handoff_pb2.ToBalloond(attach=attach)

    def _try_again(self) -> None:
        self.loop.later(self._wait_s, self._connect)
        self._wait_s = min(2 * self._wait_s, _LONGEST_WAIT_S)

    def _disconnect(self) -> None:
        with self._lock:
            self._outbox.disconnected()
        sock, self._sock = self._sock, None
        if sock is not None:
            self.loop.remove_reader(sock.fileno())
            self.loop.remove_writer(sock.fileno())
            sock.close()

    def _receive(self) -> None:
        assert self._sock is not None
        try:
            message, fds = seqpacket.recv(self._sock)
        except OSError as error:
            _log.warning("handoff failed", why=str(error))
            message, fds = b"", []
        if not message and not fds:
            self._disconnect()
            if not self._over.is_set():
                self._try_again()
            return
        self._take(handoff_pb2.FromBalloond.FromString(message), fds)

    def _take(self, message: handoff_pb2.FromBalloond, fds: Sequence[int]) -> None:
        kind = message.WhichOneof("message")
        if kind == "granted":
            self._granted(message.granted, fds)
        elif kind == "refused":
            self._was_refused(message.refused)
        elif kind == "limit":
            self._limited(message.limit, only_newer=True)
        elif kind == "reclaim":
            reclaim = message.reclaim
            self.on_reclaim(reclaim.reclaim_id, reclaim.bytes, reclaim.deep)
        elif kind == "attached":
            self._was_attached(message.attached)
        elif kind == "detached":
            self._end()

    def _was_attached(self, attached: handoff_pb2.Attached) -> None:
        again = self._attached.is_set()
        self.lease_id, self.token, self.page_bytes = attached.lease_id, attached.token, attached.page_bytes
        self._wait_s = _FIRST_WAIT_S
        self._hold_alive(alive.hold(self._path))
        # balloond may have lost its count of revisions: what it says now is in force.
        self._limited(attached.limit, only_newer=False)
        self._attached.set()
        if again:
            _log.info("attached again", lease=self.lease_id, held=len(self._held))
        self.on_attached()

    def _hold_alive(self, fd: int | None) -> None:
        if self._alive is not None:
            os.close(self._alive)
        self._alive = fd

    def _limited(self, limit: handoff_pb2.Limit, only_newer: bool) -> None:
        if only_newer and limit.revision < self.limit.revision:
            return
        self.limit = LeaseLimit(limit.revision, limit.bytes, limit.floor_bytes, limit.deadline_ms)
        self.on_limit()

    def _granted(self, message: handoff_pb2.Granted, fds: Sequence[int]) -> None:
        extents = [Granted(extent.id, extent.bytes, fd) for extent, fd in zip(message.extents, fds, strict=True)]
        with self._lock:
            for extent in message.extents:
                self._held[extent.id] = (extent.bytes, extent.kind)
            growth = self._growths.get(message.request_id)
            if growth is not None:
                growth.got += extents
                if not message.last:
                    return
                del self._growths[message.request_id]
                extents = growth.got
        if growth is None:
            self._too_late(extents, None)
        else:
            growth.done(extents, None)

    def _was_refused(self, message: handoff_pb2.Refused) -> None:
        why = _WHY[message.why]
        with self._lock:
            growth = self._growths.pop(message.request_id, None)
        if growth is not None:
            growth.done(growth.got, GrowRefused(why, message.short_bytes, message.detail))
        elif not self._attached.is_set():
            self._refused = LeaseRefused(why, message.detail)
            self._attached.set()
        else:
            _log.warning("refused", lease=self.lease_id, why=why, detail=message.detail)
