"""The values of lifecycle decisions: rules, residents, and decisions with their reasons."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from placement.policy.kvpr import Model, Place

_WAKE_S, _COLD_S = 1.0, 30.0
"""Seconds that a wake-up and a cold start are taken to last until a group has measured them."""


def durations(wake_s: float, cold_s: float) -> tuple[float, float]:
    """Seconds that waking a model and starting it cold take, as its group has measured them (0: not yet)."""
    cold_s = cold_s or _COLD_S
    return wake_s or min(_WAKE_S, cold_s), cold_s


@dataclass(frozen=True, slots=True)
class LifecycleRules:
    """Rules of eviction and activation."""

    idle_s: float = 1.0
    """Seconds; a model idle for less is not evicted, unless its group is reserved for another."""
    stay: float = 4.0
    """Multiple of the time that bringing a model back would take; a model awake for less than that is not evicted."""
    tau: float = 0.2
    """Fall in pressure for which others make room for a model although there is room elsewhere."""
    home: float = 0.75
    """Fall in pressure for which a model leaves its hibernating engine, to start cold elsewhere while requests wait."""
    explain: int = 3
    """How many groups a reason names."""
    hibernate: bool = True
    """False: models that leave go cold."""
    exclusive: bool = False
    """Whether a model has a group for itself: it comes up only where all models that are awake may leave, and they
    do."""
    quantum_s: float = 4.0
    """Seconds; a model awake for so long has had its quantum, and may be hibernated for one that waits."""
    kv_idle_s: float = 1.0
    """Seconds; a model idle for less does not leave for others' KV."""
    headroom: float = 0.4
    """Share of a device's KV memory that is to be free of running requests; if less is free, idle models leave."""


@dataclass(frozen=True, slots=True)
class PlacedModel:
    """A model on a group: active (or passing to or from it), or hibernating."""

    model: Model
    place: Place
    hibernating: bool = False
    idle_s: float = 0.0
    """Seconds since the model's last request ended or arrived; 0 while one is here, or while the model passes from one
    residency to another."""
    returns_s: float = 0.0
    """Seconds from one return of the model to the next, by what it was asked for before; 0: not known."""
    wake_s: float = _WAKE_S
    """Seconds that waking the model from hibernation takes."""
    cold_s: float = _COLD_S
    """Seconds that starting the model cold takes."""
    has_image: bool = True
    """Whether its weights are in an image. Without one it goes cold where others hibernate, and its weights are read
    from the checkpoint again."""
    host_bytes: int = 0
    """Bytes of host memory that the model's engine holds."""
    stay_s: float = inf
    """Seconds that the model has been awake here; 0 while it passes from one residency to another."""
    claims: int = 0
    """Number of the model's waiting requests that can still be on time."""
    kv_used: int = 0
    """Bytes of KV of the model's running requests, on each device."""
    kv_lacking: int = 0
    """Bytes of KV that the model's waiting requests lack to start, on each device."""
    ttft_s: float = 0.0
    """TTFT target of its requests, in seconds; 0: they have none."""
    elsewhere: bool = False
    """Whether another group serves the model too."""
    has_engine: bool = True
    """False: the memory is booked for a model whose engine is gone."""

    @property
    def booked(self) -> Model:
        """The model as it is booked now."""
        return self.model.asleep() if self.hibernating else self.model


@dataclass(frozen=True, slots=True)
class Hibernate:
    """A decision: weights and KV leave the devices of the model's group; its engine stays."""

    model: str
    group: str
    reason: str


@dataclass(frozen=True, slots=True)
class GoCold:
    """A decision: the model's engine goes too (from active or from hibernation)."""

    model: str
    group: str
    reason: str


@dataclass(frozen=True, slots=True)
class Activate:
    """A decision: the model comes up at this place, with this resulting pressure."""

    model: str
    place: Place
    pressure: float
    reason: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """The answer that no group could hold the model even if it were alone there."""

    model: str
    reason: str


@dataclass(frozen=True, slots=True)
class Wait:
    """The answer that no group can hold the model now, and one could if others were idle."""

    model: str
    reason: str
