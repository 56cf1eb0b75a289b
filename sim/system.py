"""What a replay asks of a system, and what it gives it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from sim.clock import Clock
from sim.engines.cost import GpuModel
from sim.group.node import SimulatedGroup
from sim.inputs.catalogue import Spec
from sim.inputs.request import SimulatedRequest


@dataclass(frozen=True, slots=True)
class World:
    """What there is."""

    clock: Clock
    hardware: GpuModel
    sizes: Sequence[int]
    """Devices of each group."""
    specs: Sequence[Spec]
    """The models of the trace."""
    rates: Mapping[str, float]
    """Tokens per second of each model over the whole replay: for systems that are planned ahead."""


class System(Protocol):
    @property
    def groups(self) -> Sequence[SimulatedGroup]: ...

    def submit(self, request: SimulatedRequest) -> None: ...

    @property
    def figures(self) -> Mapping[str, int]:
        """What it counted besides what groups count."""


Build = Callable[[World, Callable[[SimulatedRequest], None], dict[str, str]], System]
"""The second argument is called with every request that ended or failed; the third are settings by name. Raises
FleetError."""


class FleetError(ValueError):
    """A fleet that cannot serve the models, or a setting that makes no sense."""
