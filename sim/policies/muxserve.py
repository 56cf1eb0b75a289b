"""MuxServe++: models that share a device share its KV memory on demand, and stay where they are.

As in the Prism paper, whose port of MuxServe to SGLang with elastic KV this stands for: places are fixed ahead, all
models are resident, none is evicted or moved; a model takes the memory that others do not use. As in MuxServe's
adaptive batch scheduling: prefills go before decodes, one at a time on a group, the models in turn (round robin), each
with a batch of its oldest requests; decodes of all models run side by side.

`rounds=false` leaves that scheduler out: each engine has a queue of its own, as in the system that GPUs ran under this
name (`benchmarks/systems.py`). `blind=SEED` places models by size alone, as for `static`.

Given here, and not in its authors' system: placement by Algorithm 1 on mean rates known in advance, instead of their
search over meshes by estimated throughput; a start waits until the forecast of its output fits into what is free or
idle. Left out: shares of the compute by MPS, and that no new decode begins while a prefill lacks compute: engines get
equal slices here, under every system. Each engine sees the memory that is free now, not what other models' running
requests will still need; where that collides requests are put back, as the paper says.

A fleet that cannot hold all models at once is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil

from services.wording.plurals import counted
from sim.group.node import SimulatedGroup
from sim.inputs.request import SimulatedRequest
from sim.policies.fixed import Fixed, seed
from sim.policies.lines import EngineQueues
from sim.system import FleetError, SettingError, World


class Rounds(EngineQueues):
    """Queues with which one model of the group prefills at a time."""

    def __init__(self, group: SimulatedGroup) -> None:
        super().__init__(group)
        self._batch: set[str] = set()
        """Ids of the requests that prefill."""
        self._rotation: list[str] = []
        """Names of models, the one that prefilled last at the end."""

    def start(self, name: str) -> None:
        self.start_all()

    def start_all(self) -> None:
        if self._batch:
            return
        self._rotation += [name for name in self.group.active if name not in self._rotation]
        for name in self._rotation:
            taken = self.take(name, self.group.active[name].cost.chunk_tokens)
            if taken:
                self._rotation.remove(name)
                self._rotation.append(name)
                self._batch = {request.id for request in taken}
                self.generate(taken)
                return

    def _prefill_over(self, request: SimulatedRequest) -> None:
        super()._prefill_over(request)
        if request.id in self._batch:
            self._batch.discard(request.id)
            if not self._batch:
                self.group.clock.after(0.0, self.start_all)


def build(world: World, finished: Callable[[SimulatedRequest], None], settings: dict[str, str]) -> Fixed:
    own = dict(settings)
    rounds = own.pop("rounds", "true")
    if rounds not in ("true", "false"):
        raise SettingError(f"muxserve: rounds has to be true or false, not {rounds!r}")
    fleet = Fixed(world, finished, Rounds if rounds == "true" else EngineQueues, seed("muxserve", own))
    if fleet.homeless:
        names = ", ".join(spec.name for spec in fleet.homeless)
        weights = sum(spec.shape.weights_bytes for spec in world.specs)
        capacity = sum(world.sizes) * world.hardware.capacity_bytes
        raise FleetError(
            f"muxserve keeps all models on their devices, and finds no place for {names}: {len(world.specs)} models "
            f"have {weights:,} bytes of weights, besides engines and floors; {counted(sum(world.sizes), 'device')} of "
            f"{world.hardware.capacity_bytes:,} make {capacity:,}, {ceil(100 * weights / capacity)} % of which that is"
        )
    return fleet
