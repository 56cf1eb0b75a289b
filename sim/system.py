"""The interface between a replay and a system."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from placement.policy.traffic import ExpectedTraffic
from sim.clock import Clock
from sim.engines.cost import GpuModel
from sim.group.node import SimulatedGroup
from sim.inputs.catalogue import Spec
from sim.inputs.request import SimulatedRequest


@dataclass(frozen=True, slots=True)
class World:
    """The fleet, the models and the rates that a system is built for."""

    clock: Clock
    hardware: GpuModel
    sizes: Sequence[int]
    """Number of devices of each group."""
    specs: Sequence[Spec]
    """The models of the trace."""
    rates: Mapping[str, float]
    """Model -> tokens per second, for systems that are planned ahead: over the whole replay, or what they are told."""
    expected: Mapping[str, ExpectedTraffic] = field(default_factory=dict)
    """Model -> what it was asked for before the replay, for systems that remember it."""


class System(Protocol):
    @property
    def groups(self) -> Sequence[SimulatedGroup]: ...

    def submit(self, request: SimulatedRequest) -> None: ...

    @property
    def figures(self) -> Mapping[str, int]:
        """Counts of the system's own, beside what groups count."""


Build = Callable[[World, Callable[[SimulatedRequest], None], dict[str, str]], System]
"""(world, callback with every request that ended or failed, settings by name) -> the system. Raises FleetError."""


class FleetError(ValueError):
    """Raised where a fleet cannot serve the models."""


class SettingError(FleetError):
    """Raised for a setting that makes no sense, whatever the fleet."""
