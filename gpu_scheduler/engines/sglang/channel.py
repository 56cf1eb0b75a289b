"""The engine's end of the socket to its gpu_scheduler, with the one wait of the process."""

from __future__ import annotations

import select
from collections.abc import Sequence

from protos import engine_pb2
from services.framing import BlockingChannel


class Channel:
    """Messages in and out; nothing waits but `wait`."""

    def __init__(self, fd: int) -> None:
        self._socket = BlockingChannel(fd, engine_pb2.ToEngine)
        self._unread: list[engine_pb2.ToEngine] = []

    @property
    def closed(self) -> bool:
        """The gpu_scheduler is gone."""
        return self._socket.closed

    def send(self, **message: object) -> None:
        """Sends one FromEngine, named by its field."""
        self.send_message(engine_pb2.FromEngine(**message))  # type: ignore[arg-type]

    def send_message(self, message: engine_pb2.FromEngine) -> None:
        self._socket.send(message)

    def receive(self) -> list[engine_pb2.ToEngine]:
        """What is here now."""
        if self._socket.pending:
            self._socket.flush_ready()
        messages, self._unread = self._unread + self._socket.recv_ready(), []
        return messages

    def unread(self, messages: Sequence[engine_pb2.ToEngine]) -> None:
        """These are for whoever receives next."""
        self._unread = [*messages, *self._unread]

    def wait(self, timeout_s: float | None, also: Sequence[int] = ()) -> bool:
        """Until a message comes, one of the descriptors in `also` is readable, or `timeout_s` passed (None: for ever).
        False when it was the time."""
        if self._unread:
            return True
        poll = select.poll()
        poll.register(self._socket.fileno(), select.POLLIN | (select.POLLOUT if self._socket.pending else 0))
        for fd in also:
            poll.register(fd, select.POLLIN)
        return bool(poll.poll(None if timeout_s is None else max(0.0, timeout_s * 1e3)))
