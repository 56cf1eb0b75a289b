"""Static partition: every model has its place and its memory from the beginning to the end.

Places are fixed (`fixed.py`). What a device has left after weights is divided among its models in proportion to their
demand, not below a model's floor, and stays so. Requests go to their model's engine in order of arrival, started when
their prompt and the forecast of their output fit (`lines.py`). Engines share their devices' compute as they come: no
turn, no pauses.

`blind=SEED` places models by size alone, with equal memory: what an operator does who knows no rates.

Better than the paper's: CUDA graphs, page-aware KV, and a division by demand that is known in advance. A model for
which there is no room is not served at all, and its requests miss.
"""

from __future__ import annotations

from collections.abc import Callable

from sim.inputs.request import SimulatedRequest
from sim.policies.fixed import Fixed, seed
from sim.policies.lines import EngineQueues
from sim.system import World


class Static(Fixed):
    """Fixed places with fixed shares of memory."""

    def __init__(self, world: World, finished: Callable[[SimulatedRequest], None], blind: int | None = None) -> None:
        super().__init__(world, finished, EngineQueues, blind)
        for group in self.groups:
            extent = group.hardware.kv_extent_bytes
            for name in group.residents:
                group.memory.limit(name, self.shares[name] // extent * extent)


def build(world: World, finished: Callable[[SimulatedRequest], None], settings: dict[str, str]) -> Static:
    return Static(world, finished, seed("static", settings))
