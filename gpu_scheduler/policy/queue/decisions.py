"""What arbitration decides, as values: the dispatcher carries them out and never decides itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from math import inf

from gpu_scheduler.policy.queue.wait_queues import Order


class Why(Enum):
    """By which right a request starts; `explain` and the metrics show it."""

    ON_TIME = "on_time"
    """It is the next of S."""
    AGED = "aged"
    """The oldest of the second queue, on the credit that this queue earned."""
    ROOM = "room"
    """From the second queue, within the slack that S leaves (all of it while S is empty)."""
    BESIDE = "beside"
    """From the second queue, where waiting for the turn is all that would make it late: beside what has the turn."""


@dataclass(frozen=True, slots=True)
class Start:
    """Send this request to its engine now."""

    request_id: str
    why: Why


@dataclass(frozen=True, slots=True)
class NeedMemory:
    """A request could go, but its model lacks memory on some of its devices: move a limit before it waits, so that it
    has `bytes` on each, in all, beyond what it holds.

    Said again at each admission until the memory is there; the limits' policy compares `slack` (seconds, +inf for best
    effort) with that of the holders.
    """

    model: str
    bytes: int
    for_request: str
    slack: float
    lacking: int = 0
    """Bytes that a device has not for it, whatever its limit: what that alone keeps from it nobody else can give."""


@dataclass(frozen=True, slots=True)
class Drop:
    """Thrown away because it is late and its client asked for that."""

    request_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Expire:
    """Thrown away because its own time-out passed while it waited."""

    request_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Agenda:
    """What one run of the plan says about all that waits. It is of the queue's state then, but its orders have only
    those that wait when they are read."""

    now: float
    start: float
    """When the prefill turn is free: now + what is dispatched and unfinished."""
    on_time: Order
    """S, by deadline."""
    second: Order
    """The second queue: late and best effort, oldest first."""
    room: float
    """Seconds by which the whole of S can be put off with none of it late; +inf if S is empty."""
    credit: float
    """Seconds of work that the second queue has earned."""
    decisions: tuple[Drop | Expire, ...]
    """Already carried out in the queue; the caller tells the clients."""
    least: float = inf
    """Seconds of prefill of the cheapest request of the second queue; +inf: it is empty."""
    of_s: Mapping[str, int] = field(default_factory=dict)
    """Requests of S by model; who has none is left out."""
    dropped: Order | None = None
    """Those of the second queue whose deadlines are still to come, by deadline; None: there is nothing that waits."""
    of_dropped: Mapping[str, int] = field(default_factory=dict)
    """How many they are, by model."""
