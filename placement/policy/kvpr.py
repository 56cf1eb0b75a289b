"""Facts about models and devices, demand, and KV pressure (KVPR): SLO-weighted KV demand over the KV memory left.

    demand    w = token rate * KV bytes per token / TPOT target              (tokens/s * bytes / s = bytes/s^2)
    KVPR      sum of w / (S - weights and engine quotas)                     (1/s^2; only comparisons matter)
    pressure  KVPR + load * sum of w                                         (`Device.load`, 1/bytes)

KVPR is from the Prism paper, section "Load-Aware Model Placement"; that demand counts by itself too is ours: the memory
left says little where there is plenty (docs/lab/tuning.md). `S` is the bytes that balloond's ledger has for models on
the device.

Bytes that are not elastic are taken off S: weights, and the private quota of each engine, or what a hibernating one
keeps. A floor is KV, so it stays in the denominator, but it must find its place: a model fits where its weights, quota
and floor are free of the others' weights, quotas and floors. Where a model does not fit the pressure is infinite.

Bytes of a model are of the whole model. A tensor-parallel model is n equal parts on n distinct devices of one group,
each with 1/n of the bytes and of the demand (paper, appendix on tensor parallelism).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import inf

LEAST_DEMAND = 1.0
"""Demand w of a model without recent requests. One token a second counts for a million of it; being above zero it makes
the model prefer, of devices without load, the one with the most memory left."""

_LEAST_SHOWN = 0.0001
"""The least pressure that is told in digits: a group without demand has far less."""


@dataclass(frozen=True, slots=True)
class Device:
    """One device; `capacity` is S, the bytes that it has for models."""

    name: str
    capacity: int
    load: float = 0.0
    """Pressure that each unit of demand adds whatever memory is left, in 1/bytes; 0: the paper's KVPR."""


@dataclass(frozen=True, slots=True)
class Group:
    """The devices of one gpu_scheduler."""

    name: str
    devices: tuple[Device, ...]
    engines: float = inf
    """The most models that can have an engine there, awake or hibernating."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a model is: a group and as many of its devices as the model has parts."""

    group: str
    devices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Model:
    """A model as placement sees it; bytes of all parts together."""

    name: str
    demand: float = 0.0
    weights: int = 0
    floor: int = 0
    quota: int = 0
    parts: int = 1
    pinned: bool = False
    """Whether the model never leaves the place that it has."""
    kept: int = 0
    """Bytes of the quota that the model keeps while it hibernates; 0: all of them, as far as is known."""
    fixed: int = field(init=False, repr=False, compare=False)
    """Bytes of one part that are not elastic."""
    needed: int = field(init=False, repr=False, compare=False)
    """Bytes that one part needs to be active at all."""
    part_demand: float = field(init=False, repr=False, compare=False)
    """Demand on each device of the model."""

    def __post_init__(self) -> None:  # kept, because decisions read them far more often than models are made
        fixed = share(self.weights, self.parts) + share(self.quota, self.parts)
        object.__setattr__(self, "fixed", fixed)
        object.__setattr__(self, "needed", fixed + share(self.floor, self.parts))
        object.__setattr__(self, "part_demand", self.demand / self.parts)

    def asleep(self) -> Model:
        """The model as it is while hibernating: what its engine keeps stays booked, everything else is gone."""
        return _asleep(self.name, self.kept or self.quota, self.parts, self.pinned, self.kept)

    def wanted(self, demand: float) -> Model:
        """The model with another demand."""
        if demand == self.demand:
            return self
        return Model(
            self.name, demand, self.weights, self.floor, self.quota, self.parts, pinned=self.pinned, kept=self.kept
        )


@lru_cache(maxsize=1 << 16)
def _asleep(name: str, quota: int, parts: int, pinned: bool, kept: int) -> Model:
    """Cached, because every decision needs it again, and it does not depend on the demand."""
    return Model(name, quota=quota, parts=parts, pinned=pinned, kept=kept)


def share(amount: int, parts: int) -> int:
    """Bytes of one part of `amount` bytes, rounded up."""
    return -(-amount // parts)


def demand(tokens_per_s: float, kv_bytes_per_token: int, tpot_target_s: float | None, default_target_s: float) -> float:
    """Demand w of a model in bytes/s^2, never below LEAST_DEMAND. `kv_bytes_per_token`: those of a long request's
    token on all devices together (`KvLayout.demand_bytes` in `kv_kinds/layout.py`); `default_target_s` counts for a
    model without a TPOT target (best effort)."""
    return max(LEAST_DEMAND, tokens_per_s * kv_bytes_per_token / (tpot_target_s or default_target_s))


def load(weight: float, capacity: int) -> float:
    """Load of a device in 1/bytes with which demand counts, beside the memory that is left, `weight` times as much as
    it would on a device without weights."""
    return weight / capacity if capacity else 0.0


def pressure(total_demand: float, capacity: int, fixed: int, load: float = 0.0) -> float:
    """Pressure of a device with so many bytes; +inf if nothing is left for KV."""
    left = capacity - fixed
    return total_demand / left + total_demand * load if left > 0 else inf


def pressure_text(pressure: float) -> str:
    """A pressure in a sentence: four digits, and no powers of ten."""
    if pressure == inf:
        return "infinite"
    if 0.0 < pressure < _LEAST_SHOWN:
        return f"below {_LEAST_SHOWN:.4f}"
    return f"{pressure:.0f}" if pressure >= 1000.0 else f"{pressure:.4g}"


class Books:
    """What is booked on every device: demand, weights with quotas, floors. Mutable; `copy` before trying something."""

    def __init__(self, groups: Iterable[Group]) -> None:
        self._capacity: dict[str, int] = {}
        self._load: dict[str, float] = {}
        self._demand: dict[str, float] = {}
        self._fixed: dict[str, int] = {}
        self._needed: dict[str, int] = {}
        for group in groups:
            for device in group.devices:
                if device.name in self._capacity:
                    raise ValueError(f"device {device.name} is in two groups")
                self._capacity[device.name] = device.capacity
                self._load[device.name] = device.load
                self._demand[device.name] = 0.0
                self._fixed[device.name] = self._needed[device.name] = 0

    def copy(self) -> Books:
        """Independent books in the same state."""
        other = Books(())
        other._capacity, other._load = self._capacity, self._load
        other._demand, other._fixed, other._needed = dict(self._demand), dict(self._fixed), dict(self._needed)
        return other

    def book(self, model: Model, devices: Sequence[str]) -> None:
        """Books the parts of a model on devices, whether they fit or not."""
        self._add(model, devices, 1)

    def release(self, model: Model, devices: Sequence[str]) -> None:
        """Undoes `book` of the same model and devices."""
        self._add(model, devices, -1)

    def _add(self, model: Model, devices: Sequence[str], sign: int) -> None:
        for device in devices:
            self._demand[device] += sign * model.part_demand
            self._fixed[device] += sign * model.fixed
            self._needed[device] += sign * model.needed

    def capacity(self, device: str) -> int:
        """Bytes S of the device."""
        return self._capacity[device]

    def free(self, device: str) -> int:
        """Bytes that no weights, quota or floor needs; negative if they are overcommitted."""
        return self._capacity[device] - self._needed[device]

    def fits(self, model: Model, device: str) -> bool:
        """Whether one part of the model finds its place on the device."""
        return self.free(device) >= model.needed

    def pressure(self, device: str) -> float:
        """Pressure of the device as booked."""
        return pressure(self._demand[device], self._capacity[device], self._fixed[device], self._load[device])

    def resulting(self, model: Model, device: str) -> float:
        """Pressure of the device with one more part of the model; +inf where it does not fit."""
        if not self.fits(model, device):
            return inf
        fixed = self._fixed[device] + model.fixed
        return pressure(self._demand[device] + model.part_demand, self._capacity[device], fixed, self._load[device])

    def best(self, model: Model, group: Group) -> tuple[float, tuple[str, ...]]:
        """The group's devices that the model would take (the n least pressured ones, the earlier of equals) and the
        highest resulting pressure among them; (+inf, ()) where it does not fit."""
        if len(group.devices) < model.parts:
            return inf, ()
        ranked = sorted((self.resulting(model, device.name), i) for i, device in enumerate(group.devices))
        worst = ranked[model.parts - 1][0]
        if worst == inf:
            return inf, ()
        return worst, tuple(group.devices[i].name for i in sorted(i for _, i in ranked[: model.parts]))
