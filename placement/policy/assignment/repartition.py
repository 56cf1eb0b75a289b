"""The best way to divide a few models between two places, all ways tried. Where memory is tight a large model has to
change places with two small ones, and neither a move nor an exchange of two finds that.

Twelve models can be divided in 4,096 ways; their pressures are a few products of small matrices.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import inf

import numpy as np
from numpy.typing import NDArray

from placement.policy.kvpr import Model

Floats = NDArray[np.float64]
MOST = 12
"""The most models that are divided at a time."""
_EACH = 0.01
"""Share of the pressure by which a division has to lower it for each active model that it moves."""


@dataclass(frozen=True, slots=True)
class Side:
    """A place without the models that are to be divided; each array has a number for each device: demand w, bytes left
    for KV, bytes free of weights, quotas and floors, and load in 1/bytes."""

    demand: Floats
    left: Floats
    free: Floats
    load: Floats


@dataclass(frozen=True, slots=True)
class Division:
    """For each model whether it is on the first side, and the highest pressure on the devices of both sides."""

    there: tuple[bool, ...]
    pressure: float


def divide(
    models: list[Model], there: list[bool], home: list[bool], one: Side, other: Side, limit: float, home_limit: float
) -> Division | None:
    """The division with the least pressure, which has to be below `limit`, and below `home_limit` if a model leaves the
    place where it is active. `there`: whether each model is on the side `one`; `home`: whether it is active where it
    is. None if there is no such division."""
    assert len(models) <= MOST
    ways = _ways(len(models))
    demand, fixed, needed = (
        np.array([float(getattr(model, name)) for model in models]) for name in ("part_demand", "fixed", "needed")
    )
    worst = np.zeros(len(ways))
    for side, on in ((one, ways), (other, 1.0 - ways)):
        more, less, taken = on @ demand, on @ fixed, on @ needed
        for w, left, free, load in zip(side.demand, side.left, side.free, side.load, strict=True):
            total, then = w + more, left - less
            with np.errstate(divide="ignore", invalid="ignore"):
                pressure = total / then + total * load
            pressure[(free < taken) | (then <= 0)] = inf
            np.maximum(worst, pressure, out=worst)
    leave = np.abs(ways - np.array(there, dtype=float)) @ np.array(home, dtype=float)
    worst_of_those = np.where(worst < np.where(leave > 0, home_limit, limit), worst * (1 + _EACH * leave), inf)
    best = int(worst_of_those.argmin())
    if worst_of_those[best] == inf:
        return None
    return Division(tuple(bool(on) for on in ways[best]), float(worst[best]))


def gather(models: list[Model], one: Side, other: Side) -> tuple[bool, ...] | None:
    """Which models are to be on the side `one` so that its device has the most room; each side has one device. None if
    no division lets all models fit."""
    assert len(models) <= MOST
    ways = _ways(len(models))
    fixed, needed = (np.array([float(getattr(model, name)) for model in models]) for name in ("fixed", "needed"))
    free = one.free[0] - ways @ needed
    fits = (free >= 0) & (one.left[0] > ways @ fixed)
    fits &= (other.free[0] >= (1.0 - ways) @ needed) & (other.left[0] > (1.0 - ways) @ fixed)
    best = int(np.where(fits, free, -inf).argmax())
    return tuple(bool(on) for on in ways[best]) if fits[best] else None


@lru_cache
def _ways(number: int) -> Floats:
    """A matrix with a row for each way to choose among so many models: 1 for those that are chosen."""
    found: Floats = (np.arange(2**number)[:, None] >> np.arange(number) & 1).astype(float)
    return found
