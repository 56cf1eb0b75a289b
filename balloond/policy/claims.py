"""Claims that wait on a device, reclaims that were sent, free bytes that are held for a model; and the decisions that
leave the policy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from balloond.policy.ledger import Extent, Kind

RefusalReason = Literal["over_limit", "exhausted", "not_booked", "unknown", "peer"]
What = Literal["reserve", "prefixes", "decodes"]


@dataclass(frozen=True)
class ClaimPatience:
    """Seconds that others may take."""

    reclaim_s: float = 2.0
    """Seconds to answer a reclaim; one that is not answered by then gives nothing: an engine's loop may be in a long
    forward pass."""
    shrink_s: float = 5.0
    """Seconds in which a lowered limit may free memory. Longer than any reclaim; what the model's gpu_scheduler does
    about it goes by the limit's own deadline."""
    grow_s: float = 10.0
    """Seconds that a growth may wait; then it is refused. Engines themselves wait for tens of milliseconds: this only
    ends what nobody waits for."""


@dataclass(frozen=True)
class ClaimSources:
    """Memory that a claim took: the model, what was taken of it, and the bytes."""

    model: str
    what: What
    bytes: int


@dataclass(frozen=True)
class UsageReport:
    """KV usage of a lease by its last report. Sizes in bytes; times in seconds on balloond's clock."""

    at: float = 0.0
    limit_revision: int = 0
    held: int = 0
    used: int = 0
    reserve: int = 0
    cached: tuple[tuple[float, int], ...] = ()
    """(time of last use, bytes) of cached prefixes."""
    reclaim_id: int = 0
    """Id of the reclaim that this answers; 0: none."""
    returned: int = 0


@dataclass(frozen=True)
class WantedExtents:
    """Extents that a lease requests: `count` of `bytes` each."""

    kind: Kind
    bytes: int
    count: int
    min_count: int = 0
    """The fewest extents that will do; 0: no fewer than `count`."""
    only_free: bool = False
    """Whether they come from free memory only: no other lease gives memory back for them."""
    behind: int = 0
    """Bytes that the lease will request after these."""
    cached: int = 0
    """Bytes of its own prefixes that the lease could evict instead."""


@dataclass(kw_only=True)
class Claim:
    """A claim that waits until `need` bytes are free for `model`."""

    id: int
    model: str
    need: int
    want: int
    """Bytes that are taken from others once something has to be taken: at least `need`."""
    behind: int = 0
    """Bytes that the same lease will request after these."""
    may_retract: bool
    began: float
    deadline: float
    dry: set[str] = field(default_factory=set)
    """Leases that gave less than they were asked for, or did not answer."""
    taken: list[ClaimSources] = field(default_factory=list)


@dataclass(kw_only=True)
class Growth(Claim):
    """A lease's claim for `min_count` to `count` extents of `bytes` each."""

    lease_id: str
    request_id: int
    kind: Kind
    bytes: int
    count: int
    min_count: int
    cached: int = 0
    """Bytes of its own prefixes that the lease could evict instead."""


@dataclass(kw_only=True)
class RoomClaim(Claim):
    """A claim for `need` free bytes, to be held for a model for `hold_s` seconds."""

    hold_s: float
    passed: int = 0
    """Bytes that later growths were granted before it."""


@dataclass
class Ask:
    """A reclaim that was sent and is not answered yet."""

    id: int
    lease_id: str
    what: What
    claim_id: int
    asked: int
    remaining: int
    """Bytes that have not come back yet."""
    deadline: float


@dataclass
class HoldRoom:
    """Free bytes that only one model may take, until the time `until`."""

    bytes: int
    until: float
    claim_id: int


# --- decisions


@dataclass(frozen=True)
class Grant:
    """Extents that are booked already: to be created, recorded by the keeper, and sent."""

    lease_id: str
    request_id: int
    extents: tuple[Extent, ...]


@dataclass(frozen=True)
class RefuseClaim:
    lease_id: str
    request_id: int
    why: RefusalReason
    short: int
    detail: str


@dataclass(frozen=True)
class AskBack:
    """A Reclaim to be sent. `deep`: cached prefixes are to be evicted for it, too."""

    lease_id: str
    reclaim_id: int
    bytes: int
    deep: bool


@dataclass(frozen=True)
class LimitChanged:
    """A model whose leases and keeper's record are to get the limit that is in force now."""

    model: str


@dataclass(frozen=True)
class RoomAnswer:
    claim_id: int
    free: int
    short: int
    taken: tuple[ClaimSources, ...]


@dataclass(frozen=True)
class Freed:
    """Extents that no process has any more: to be destroyed."""

    extents: tuple[Extent, ...]


@dataclass(frozen=True)
class Note:
    """An entry for the history of events."""

    model: str
    what: str
    detail: str


Decision = Grant | RefuseClaim | AskBack | LimitChanged | RoomAnswer | Freed | Note
