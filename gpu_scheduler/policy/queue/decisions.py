"""Decisions of the shared queue's policy, as values: the dispatcher carries them out and decides nothing itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from math import inf

from gpu_scheduler.engines.sharing.throttle import PrefillThrottle
from gpu_scheduler.policy.queue.wait_queues import Order


class StartRule(Enum):
    """By which rule a request starts; the metrics show it."""

    ON_TIME = "on_time"
    """The next request of S, the on-time set."""
    AGED = "aged"
    """The oldest request of the second queue (late and best effort), on the credit that this queue has earned."""
    SLACK = "room"
    """A request of the second queue within the slack that S leaves (all of it while S is empty)."""
    BESIDE = "beside"
    """A late request that only waiting for the prefill turn would make late; it starts beside the prefills that have
    the turn."""


@dataclass(frozen=True, slots=True)
class Start:
    """Send this request to its engine now."""

    request_id: str
    why: StartRule


@dataclass(frozen=True, slots=True)
class NeedMemory:
    """A request could start, but its model lacks memory on some of its devices: the model has to have `bytes` in all on
    each device, beyond what it holds. Move a limit before the request has to wait.

    Repeated at each admission until the memory is there. The policy of limits compares `slack` (seconds; +inf for best
    effort) with that of the models that hold the memory.
    """

    model: str
    bytes: int
    for_request: str
    slack: float
    lacking: int = 0
    """Bytes that a device lacks for the request whatever the model's limit is. Bytes that only the limit keeps from it
    cannot be freed by any other model."""


@dataclass(frozen=True, slots=True)
class RoomTerms:
    """Terms on which balloond makes room, in seconds."""

    timeout_s: float
    """After so long balloond gives up."""
    held_s: float
    """For so long the room is held."""


ROOM_FOR_REQUEST = RoomTerms(timeout_s=5.0, held_s=1.0)
"""It is held long enough for the engine to grow into it once its request is there."""
ROOM_FOR_ACTIVATION = RoomTerms(timeout_s=20.0, held_s=60.0)
"""A load from the checkpoint maps its last weights long after the room was made."""


@dataclass(frozen=True, slots=True)
class RequestMemory:
    """Have balloond make room for a model, and tell the core of the answer (`GroupCore.memory_answered`). Other models'
    decodes stop for it only up to the model's floor: a stopped request has its prompt and its output so far computed
    again, which costs more than is gained (docs/design/decisions/026-whose-requests-stop.md)."""

    model: str
    bytes: int
    """Bytes on each device."""
    for_request: str


@dataclass(frozen=True, slots=True)
class Drop:
    """The request is thrown away because it is late and its client asked for that."""

    request_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Expire:
    """The request is thrown away because its own time-out passed while it waited."""

    request_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class SetThrottle:
    """The prefills of a model are throttled so from now on."""

    model: str
    throttle: PrefillThrottle


@dataclass(frozen=True, slots=True)
class QueuePlan:
    """The result of one plan over all waiting requests. Its numbers are of the queue's state then, but its orders yield
    only requests that still wait when they are read."""

    now: float
    start: float
    """When the prefill turn is free: now + the prefill that is dispatched and unfinished. Seconds on the caller's
    clock."""
    on_time: Order
    """S, the largest set of requests that can all be on time, by deadline."""
    second: Order
    """The second queue: late and best-effort requests, oldest first."""
    slack: float
    """Seconds by which the whole of S can be put off with none of it late; +inf if S is empty."""
    credit: float
    """Seconds of prefill that the second queue has earned."""
    decisions: tuple[Drop | Expire, ...]
    """Requests thrown away, already removed from the queue; the caller tells the clients."""
    least: float = inf
    """Seconds of prefill of the cheapest request of the second queue; +inf if it is empty."""
    of_s: Mapping[str, int] = field(default_factory=dict)
    """Requests of S by model; models without any are left out."""
    left_out: Order | None = None
    """Requests of the second queue whose deadlines are still to come, by deadline; None if no request waits."""
    left_out_by_model: Mapping[str, int] = field(default_factory=dict)
    """Number of the requests of `left_out` by model."""
