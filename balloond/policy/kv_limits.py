"""Limits of KV with revisions, for the models of one device.

A limit in force is the least of what was set (by the device's gpu_scheduler; the whole device by default) and what
balloond squeezes the model to while a better claim waits for the memory. Every change of the limit in force gets the
next revision.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from services.errors import Invalid

WHOLE_DEVICE = -1
_LAST_REVISION = 1 << 62
"""Highest revision that may be set, so that there is always a next one for 64 bits to carry."""
State = Literal["applied", "deferred", "stale", "conflict"]


@dataclass(frozen=True)
class Limit:
    """The limit in force."""

    revision: int
    bytes: int
    deadline_ms: int = 0
    """Milliseconds from when it was set; what follows a passed deadline is the gpu_scheduler's business."""


@dataclass(frozen=True)
class LimitOutcome:
    """Result of a request to set a limit. `overage`: bytes held above the limit in force."""

    state: State
    limit: Limit
    overage: int
    changed: bool


@dataclass
class _Entry:
    set_revision: int = 0
    set_bytes: int = WHOLE_DEVICE
    deadline_ms: int = 0
    revision: int = 0
    squeezes: dict[int, int] = field(default_factory=dict)


class Limits:
    """Limits of all models of a device with `capacity` bytes."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._entries: dict[str, _Entry] = {}

    def get(self, model: str) -> Limit:
        entry = self._entries.get(model, _Entry())
        return Limit(entry.revision, self._in_force(entry), entry.deadline_ms)

    def bytes_of(self, model: str) -> int:
        """Bytes of the limit in force."""
        entry = self._entries.get(model)
        return self._capacity if entry is None else self._in_force(entry)

    def _in_force(self, entry: _Entry) -> int:
        own = self._set_bytes(entry)
        return min(own, *entry.squeezes.values()) if entry.squeezes else own

    def _set_bytes(self, entry: _Entry) -> int:
        return self._capacity if entry.set_bytes == WHOLE_DEVICE else min(entry.set_bytes, self._capacity)

    def set(self, model: str, nbytes: int, revision: int, deadline_ms: int, *, floor: int, held: int) -> LimitOutcome:
        """Sets the model's limit; `revision` 0 is the next one. `floor` and `held` are the model's bytes of KV. Raises
        Invalid with both numbers for a limit below the floor, and for a limit or revision that cannot exist."""
        if not 0 <= revision <= _LAST_REVISION:
            raise Invalid(f"revision {revision} is not one from 0 to {_LAST_REVISION}")
        if nbytes < WHOLE_DEVICE:
            raise Invalid(f"a limit of {nbytes} bytes makes no sense; -1 is the whole device")
        if nbytes != WHOLE_DEVICE and nbytes < floor:
            raise Invalid(f"a limit of {nbytes:,} bytes is below the floor of {model}, {floor:,} bytes")
        entry = self._entries.setdefault(model, _Entry())
        before = self.get(model)
        if revision and revision == entry.set_revision:
            if nbytes != entry.set_bytes:
                return LimitOutcome("conflict", before, max(0, held - before.bytes), False)
        elif revision and revision <= entry.revision:
            return LimitOutcome("stale", before, max(0, held - before.bytes), False)
        else:
            entry.revision = entry.set_revision = revision or entry.revision + 1
            entry.set_bytes, entry.deadline_ms = nbytes, deadline_ms
        after = self.get(model)
        overage = max(0, held - after.bytes)
        return LimitOutcome("deferred" if overage else "applied", after, overage, after != before)

    def squeeze(self, model: str, nbytes: int, owner: int) -> None:
        """Bounds the model to `nbytes` until `lift(owner)`."""
        entry = self._entries.setdefault(model, _Entry())
        before = self._in_force(entry)
        entry.squeezes[owner] = min(nbytes, entry.squeezes.get(owner, nbytes))
        entry.revision += self._in_force(entry) != before

    def lift(self, owner: int) -> list[str]:
        """Ends the squeezes of `owner`. Returns the models whose limit in force rose."""
        rose = []
        for model, entry in self._entries.items():
            before = self._in_force(entry)
            if entry.squeezes.pop(owner, None) is not None and self._in_force(entry) != before:
                entry.revision += 1
                rose.append(model)
        return rose

    def raise_to(self, model: str, floor: int) -> bool:
        """Raises limits that are below a floor that rose. Returns whether the limit in force changed."""
        entry = self._entries.get(model)
        if entry is None:
            return False
        before = self._in_force(entry)
        if self._set_bytes(entry) < floor:
            entry.set_bytes = floor
        for owner, nbytes in entry.squeezes.items():
            entry.squeezes[owner] = max(nbytes, floor)
        changed = self._in_force(entry) != before
        entry.revision += changed
        return changed

    def forget(self, model: str) -> None:
        """Resets the model's limit. The revision stays: a model that comes back must not meet an older one."""
        entry = self._entries.get(model)
        if entry is not None:
            entry.set_bytes, entry.deadline_ms = WHOLE_DEVICE, 0
            entry.squeezes.clear()
            entry.revision += 1

    # --- what a successor needs

    def kept(self, model: str) -> tuple[int, int]:
        """(revision, bytes as set) for a successor; squeezes end with their balloond."""
        entry = self._entries.get(model, _Entry())
        return entry.revision, entry.set_bytes

    def restore(self, model: str, revision: int, nbytes: int) -> None:
        self._entries[model] = _Entry(set_revision=revision, set_bytes=nbytes, revision=revision + 1)
