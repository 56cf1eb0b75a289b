"""Comments in a stream that waits for its model to come up.

Clients, and proxies between, give up on an answer when nothing arrives for some time. A comment of server-sent events
counts as data, and every client ignores it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gateway.openai.endpoint import Reply
from services.runtime import tasks


class Comments:
    """A context in which a streamed reply gets a comment after every `every_s` seconds without events, while `waking`
    returns True; 0: no comments."""

    def __init__(self, reply: Reply, every_s: float, waking: Callable[[], bool]) -> None:
        self._reply = reply
        self._every_s = every_s
        self._waking = waking
        self._timer: asyncio.TimerHandle | None = None
        self._sending: asyncio.Task[None] | None = None

    def __enter__(self) -> None:
        if self._every_s:
            self._reply.said = False
            self._wait()

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _wait(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._every_s, self._look)

    def _look(self) -> None:
        quiet, self._reply.said = not self._reply.said, False
        # One comment that the client has not read yet is enough.
        if quiet and self._waking() and (self._sending is None or self._sending.done()):
            self._sending = tasks.spawn(self._reply.comment(), "comment that a model wakes")
        self._wait()
