"""What waits on a device, what others were asked for, what is held for whom; and the decisions that leave the
policy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from balloond.policy.ledger import Extent, Kind

Why = Literal["over_limit", "exhausted", "not_booked", "unknown", "peer"]
What = Literal["reserve", "prefixes", "decodes"]


@dataclass(frozen=True)
class ClaimPatience:
    """How long others may take. Seconds."""

    reclaim_s: float = 2.0
    """A reclaim that is not answered by then gives nothing: an engine's loop may be in a long forward pass."""
    shrink_s: float = 5.0
    """A lowered limit frees nothing more after that; its gpu_scheduler acts at the limit's own deadline."""
    grow_s: float = 10.0
    """A growth that waits longer is refused."""


@dataclass(frozen=True)
class ClaimSources:
    """From whom a claim's memory came."""

    model: str
    what: What
    bytes: int


@dataclass(frozen=True)
class UsageReport:
    """What a lease last said of its KV. Bytes; times are on balloond's clock."""

    at: float = 0.0
    limit_revision: int = 0
    held: int = 0
    used: int = 0
    reserve: int = 0
    cached: tuple[tuple[float, int], ...] = ()
    """(time of last use, bytes)."""
    reclaim_id: int = 0
    """Which reclaim this answers; 0: none."""
    returned: int = 0


@dataclass(frozen=True)
class WantedExtents:
    """What a lease asks for: `count` extents of `bytes` each."""

    kind: Kind
    bytes: int
    count: int
    min_count: int = 0
    """So few will do; 0: no fewer than `count`."""
    for_reserve: bool = False
    """Ahead of need: nobody is asked to give back for it."""
    behind: int = 0
    """Bytes that it will want after these."""
    cached: int = 0
    """Bytes of its own prefixes that it could do without instead."""


@dataclass(kw_only=True)
class Claim:
    """Waits until `need` bytes are free for `model`."""

    id: int
    model: str
    need: int
    want: int
    """What is taken from others once something has to be: at least `need`."""
    behind: int = 0
    """And what the same lease will want after it."""
    may_retract: bool
    began: float
    deadline: float
    dry: set[str] = field(default_factory=set)
    """Leases that gave less than they were asked for, or did not answer."""
    taken: list[ClaimSources] = field(default_factory=list)


@dataclass(kw_only=True)
class Growth(Claim):
    """A lease wants `min_count` to `count` extents."""

    lease_id: str
    request_id: int
    kind: Kind
    bytes: int
    count: int
    min_count: int
    cached: int = 0
    """Bytes of its own prefixes that the lease could do without instead."""


@dataclass(kw_only=True)
class RoomClaim(Claim):
    """Somebody wants `need` bytes free for a model, held for `hold_s`."""

    hold_s: float
    passed: int = 0
    """Bytes that later growths were given before it."""


@dataclass
class Ask:
    """A reclaim that was sent and not answered."""

    id: int
    lease_id: str
    what: What
    claim_id: int
    asked: int
    remaining: int
    """What has not come back yet."""
    deadline: float


@dataclass
class HoldRoom:
    """Free bytes that only `model` may take."""

    bytes: int
    until: float
    claim_id: int


# --- decisions


@dataclass(frozen=True)
class Grant:
    """Booked already: create these, have the keeper record them, send them."""

    lease_id: str
    request_id: int
    extents: tuple[Extent, ...]


@dataclass(frozen=True)
class RefuseClaim:
    lease_id: str
    request_id: int
    why: Why
    short: int
    detail: str


@dataclass(frozen=True)
class AskBack:
    """Send a Reclaim."""

    lease_id: str
    reclaim_id: int
    bytes: int
    deep: bool


@dataclass(frozen=True)
class LimitChanged:
    """Tell the model's leases and the keeper the limit that is in force now."""

    model: str


@dataclass(frozen=True)
class RoomAnswer:
    claim_id: int
    free: int
    short: int
    taken: tuple[ClaimSources, ...]


@dataclass(frozen=True)
class Freed:
    """Destroy these: nobody has them any more."""

    extents: tuple[Extent, ...]


@dataclass(frozen=True)
class Note:
    """For the history of events."""

    model: str
    what: str
    detail: str


Decision = Grant | RefuseClaim | AskBack | LimitChanged | RoomAnswer | Freed | Note
