"""What lifecycle decisions are about, and what they look like: residents, their limits, decisions with their
reasons."""

from __future__ import annotations

from dataclasses import dataclass

from placement.policy.kvpr import Model, Place


@dataclass(frozen=True, slots=True)
class LifecycleRules:
    """Numbers of eviction and activation."""

    idle_s: float = 45.0
    """A model idle for less is not evicted."""
    tau: float = 0.2
    """The gain in pressure that makes a model leave its hibernating engine, or others make room for it."""
    explain: int = 3
    """How many groups a reason names."""
    hibernate: bool = True
    """False: who leaves goes cold."""
    exclusive: bool = False
    """A model has a group for itself: it comes up only where all who are awake may leave, and they do."""


@dataclass(frozen=True, slots=True)
class Resident:
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
    host_bytes: int = 0
    """Host memory that its engine holds."""

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
