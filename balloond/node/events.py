"""A bounded history of what happened, for operators and tests."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True)
class Event:
    sequence: int
    at: float
    """Seconds on the process's clock."""
    device: str
    model: str
    what: str
    detail: str


class EventHistory:
    """The last `length` events."""

    def __init__(self, length: int = 2000) -> None:
        self._events: deque[Event] = deque(maxlen=length)
        self._sequence = 0

    def add(self, at: float, device: str, model: str, what: str, detail: str) -> None:
        self._sequence += 1
        self._events.append(Event(self._sequence, at, device, model, what, detail))

    def last(self, limit: int = 0) -> list[Event]:
        """The last `limit` events, oldest first; 0: all that are kept."""
        events = list(self._events)
        return events[-limit:] if limit > 0 else events
