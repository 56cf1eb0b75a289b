"""The engine's end of the socket to its gpu_scheduler, with the only wait of the process. Of several ranks the first
has the socket; the others receive from it the same messages, at the same step."""

from __future__ import annotations

import select
import time
from collections.abc import Sequence

from gpu_scheduler.engines.sglang.base import stalls
from gpu_scheduler.engines.sglang.ranks.ranks import Follower, Leader
from protos import engine_pb2
from services.ipc.framing import BlockingChannel


class Channel:
    """Messages to and from the gpu_scheduler; only `wait` waits."""

    def __init__(self, fd: int) -> None:
        """`fd`: the engine's end of the socket."""
        self._socket = BlockingChannel(fd, engine_pb2.ToEngine)
        self._unread: list[engine_pb2.ToEngine] = []

    @property
    def closed(self) -> bool:
        """True once the gpu_scheduler is gone."""
        return self._socket.closed

    def send(self, **message: object) -> None:
        """Sends one FromEngine, whose one field is given by name."""
        self.send_message(engine_pb2.FromEngine(**message))  # type: ignore[arg-type]

    def send_message(self, message: engine_pb2.FromEngine) -> None:
        """Sends one FromEngine, without waiting for it to leave."""
        self._socket.send(message)

    def receive(self) -> list[engine_pb2.ToEngine]:
        """The messages that have come, without waiting."""
        messages, self._unread = self._unread + self._read(), []
        return messages

    def _read(self) -> list[engine_pb2.ToEngine]:
        if self._socket.pending:
            self._socket.flush_ready()
        return self._socket.recv_ready()

    def unread(self, messages: Sequence[engine_pb2.ToEngine]) -> None:
        """Puts messages back in front of those that the next `receive` returns."""
        self._unread = [*messages, *self._unread]

    def wait(self, timeout_s: float | None, also: Sequence[int] = ()) -> bool:
        """Waits until a message comes, one of the descriptors in `also` is readable, or `timeout_s` seconds have passed
        (None: no bound). False if the time has passed."""
        return bool(self._unread) or bool(self._poll(timeout_s, also))

    def _poll(self, timeout_s: float | None, also: Sequence[int]) -> list[tuple[int, int]]:
        poll = select.poll()
        poll.register(self._socket.fileno(), select.POLLIN | (select.POLLOUT if self._socket.pending else 0))
        for fd in also:
            poll.register(fd, select.POLLIN)
        stalls.at_rest()
        ready = poll.poll(None if timeout_s is None else max(0.0, timeout_s * 1e3))
        stalls.at_work()
        return ready


class LeaderChannel(Channel):
    """The channel of the first of several ranks: all ranks receive what it receives."""

    def __init__(self, fd: int, ranks: Leader) -> None:
        super().__init__(fd)
        self._ranks = ranks

    def _read(self) -> list[engine_pb2.ToEngine]:
        """Reads the messages that are here and agrees with the other ranks on the step in which all act on them."""
        messages = super()._read()
        self._ranks.step([message.SerializeToString() for message in messages], self.closed)
        return messages

    def wait(self, timeout_s: float | None, also: Sequence[int] = ()) -> bool:
        """Waits as `Channel.wait` does, and also until another rank has news; True then."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        others = self._ranks.fds
        while not (self._unread or self._ranks.news()):
            ready = self._poll(None if until is None else until - time.monotonic(), [*also, *others])
            if not ready or any(fd not in others for fd, _ in ready):
                return bool(ready)
        return True


class FollowerChannel:
    """The channel of any other rank: it receives what the first one received, and sends nothing to the
    gpu_scheduler."""

    def __init__(self, ranks: Follower) -> None:
        self._ranks = ranks
        self._unread: list[engine_pb2.ToEngine] = []
        self.closed = False

    def send(self, **message: object) -> None:
        """Does nothing: only the first rank sends."""
        pass

    def send_message(self, message: engine_pb2.FromEngine) -> None:
        """Does nothing: only the first rank sends."""
        pass

    def receive(self) -> list[engine_pb2.ToEngine]:
        """The messages of the next step; waits until the first rank begins it."""
        step = self._ranks.step()
        self.closed = step.closed
        messages = self._unread + [engine_pb2.ToEngine.FromString(data) for data in step.messages]
        self._unread = []
        return messages

    def unread(self, messages: Sequence[engine_pb2.ToEngine]) -> None:
        """Puts messages back in front of those that the next `receive` returns."""
        self._unread = [*messages, *self._unread]

    def wait(self, timeout_s: float | None, also: Sequence[int] = ()) -> bool:
        """Returns True at once: the first rank waits for all, and `receive` does not return before it has."""
        return True
