"""What lifecycle decisions are about, and what they look like: residents, their limits, decisions with their
reasons."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from placement.policy.kvpr import Model, Place


@dataclass(frozen=True, slots=True)
class LifecycleRules:
    """Numbers of eviction and activation."""

    idle_s: float = 1.0
    """A model idle for less is not evicted, unless its group is promised to another."""
    stay: float = 4.0
    """A model that has been awake for less than so many times what bringing it back would take is not evicted."""
    tau: float = 0.2
    """The gain in pressure for which others make room for a model, though there is room elsewhere."""
    home: float = 0.75
    """The gain in pressure for which it leaves its hibernating engine, to start cold elsewhere while requests wait."""
    explain: int = 3
    """How many groups a reason names."""
    hibernate: bool = True
    """False: who leaves goes cold."""
    exclusive: bool = False
    """A model has a group for itself: it comes up only where all who are awake may leave, and they do."""
    quantum_s: float = 4.0
    """A model that was awake for so long has had its quantum: it may be sent to sleep for one that waits."""
    kv_idle_s: float = 1.0
    """A model idle for less does not leave for others' KV."""
    headroom: float = 0.4
    """Share of a device's KV memory that is to be free of running requests: with less, idle models leave."""


@dataclass(frozen=True, slots=True)
class PlacedModel:
    """A model on a group: active (or passing to or from it), or hibernating."""

    model: Model
    place: Place
    hibernating: bool = False
    idle_s: float = 0.0
    """Since its last request ended or arrived; 0 while one is here or it is passing from one residency to another."""
    wake_s: float = 1.0
    """What waking it from hibernation takes."""
    cold_s: float = 30.0
    """What starting it cold takes."""
    has_image: bool = True
    """False: it cannot hibernate. Where it is to, it goes cold, and its weights are read from the checkpoint again."""
    host_bytes: int = 0
    """Host memory that its engine holds."""
    stay_s: float = inf
    """How long it has been awake here; 0 while it passes from one residency to another."""
    claims: int = 0
    """Its requests that wait and can still be on time."""
    kv_used: int = 0
    """KV of its running requests on each device."""
    kv_lacking: int = 0
    """KV on each device without which its waiting requests cannot start."""
    has_engine: bool = True
    """False: memory that is booked for a model whose engine is gone."""

    @property
    def booked(self) -> Model:
        """The model as it is booked now."""
        return self.model.asleep() if self.hibernating else self.model


@dataclass(frozen=True, slots=True)
class Hibernate:
    """Weights and KV leave the devices of the model's group; its engine stays."""

    model: str
    group: str
    reason: str


@dataclass(frozen=True, slots=True)
class GoCold:
    """The engine goes too (from active or from hibernation)."""

    model: str
    group: str
    reason: str


@dataclass(frozen=True, slots=True)
class Activate:
    """Bring the model up at this place."""

    model: str
    place: Place
    pressure: float
    reason: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """No group could hold the model even if it were alone there."""

    model: str
    reason: str


@dataclass(frozen=True, slots=True)
class Wait:
    """No group can hold the model now; one could if others were idle."""

    model: str
    reason: str
