"""Bytes of a device that are booked for a model, in each state of it. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineSizes:
    """Bytes on one device that an engine measured of a model and of itself; 0: unknown."""

    weights_bytes: int = 0
    graph_bytes: int = 0
    quota_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Bytes of a model on one device, as the catalogue states and as engines measured them."""

    weights_bytes: int
    quota_bytes: int
    quota_is_default: bool
    """Whether the catalogue states no quota, so that what engines measure replaces it."""
    floor_bytes: int
    measured: EngineSizes = EngineSizes()
    """Sizes that the model's last engine on this group measured."""
    elsewhere: EngineSizes = EngineSizes()
    """Sizes that engines on other groups measured."""
    has_engine: bool = False
    """Whether the model has an engine here, awake or asleep."""
    kept_bytes: int = 0
    """Bytes to book for the engine while it sleeps; 0: unknown."""


@dataclass(frozen=True, slots=True)
class Entitlement:
    """Bytes of one device that are booked for a model."""

    quota_bytes: int
    """Bytes that its engine takes for itself."""
    weights_bytes: int = 0
    """Bytes of weights, in whole extents, and of CUDA graphs."""
    floor_bytes: int = 0
    """Bytes of KV that no other model can take."""

    @property
    def total_bytes(self) -> int:
        return self.quota_bytes + self.weights_bytes + self.floor_bytes


def entitlement(model: ModelSizes, extent_bytes: int, *, awake: bool) -> Entitlement:
    """Bytes to book for a model that has, or gets, an engine: weights and floor only while it is awake. Weights are of
    the measured or stated size, whichever is larger, in extents of `extent_bytes`."""
    quota_bytes = _quota(model, awake)
    if not awake:
        return Entitlement(quota_bytes)
    weights = max(model.weights_bytes, model.measured.weights_bytes or model.elsewhere.weights_bytes)
    whole = -(-weights // extent_bytes) * extent_bytes
    return Entitlement(quota_bytes, whole + _graphs(model), model.floor_bytes)


def _graphs(model: ModelSizes) -> int:
    """Bytes of CUDA graphs, as far as they were measured, here or elsewhere: the first time they take what is free."""
    return (model.measured if model.measured.weights_bytes else model.elsewhere).graph_bytes


def _quota(model: ModelSizes, awake: bool) -> int:
    """Bytes that an engine takes of a device for itself. Asleep: what it was found to keep. Awake: what it measured,
    unless the catalogue states a quota. An engine that has yet to build the model may take more for a moment, but is
    booked no less than the last one needed: a shortage would be found only once all of the model is there. The default
    quota includes room for unknown graphs, so that known graphs, which are booked themselves, are taken off it."""
    measured = model.measured.quota_bytes if model.quota_is_default else 0
    if not model.has_engine:
        if not model.quota_is_default:
            return model.quota_bytes
        return max(model.quota_bytes - _graphs(model), measured or model.elsewhere.quota_bytes)
    if not awake and model.kept_bytes:
        return model.kept_bytes
    return measured or model.quota_bytes
