"""Time sharing: a group that one model has for itself at a time, for the systems that swap whole models.

A model that has to leave hibernates here as under Prism: its engine keeps process, addresses and CUDA graphs, its
weights stay in host memory, and it comes back at the speed of the link. Where the sleepers keep more than a quarter of
a device, or what the owner needs, the least recently used of them go cold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from sim.engines.cost import Cost
from sim.group.node import SimulatedGroup
from sim.inputs.catalogue import Spec
from sim.inputs.request import SimulatedRequest
from sim.policies.lines import EngineQueues
from sim.system import World

_SLEEPERS = 0.25
"""Share of a device that sleeping engines may keep."""
_UNBOUNDED = 1 << 30
"""The most requests that an engine decodes at a time."""


class _Lines(EngineQueues):
    """Queues that report every prefill that has ended, or was given up."""

    def __init__(self, group: SimulatedGroup, over: Callable[[], None]) -> None:
        super().__init__(group, bounded=False)
        self._over = over

    def _prefill_over(self, request: SimulatedRequest) -> None:
        super()._prefill_over(request)
        self.group.clock.after(0.0, self._over)


class Owned:
    """One group and the model that owns it. Requests submitted to `lines` start at once: the owner's engine has all of
    the memory, and its batches have no other bound."""

    def __init__(
        self,
        world: World,
        number: int,
        back: Callable[[Sequence[SimulatedRequest]], None],
        ended: Callable[[Owned, SimulatedRequest], None],
        changed: Callable[[Owned], None],
    ) -> None:
        """`back` gets requests that were preempted. `changed` is called when its owner is up, or did not come up, and
        when it has prefilled something."""
        hardware = replace(world.hardware, most_running=_UNBOUNDED)
        self.group = SimulatedGroup(
            world.clock,
            f"g{number}",
            world.sizes[number],
            hardware,
            lambda group: _Lines(group, self._prefilled),
            back,
            lambda request: ended(self, request),
        )
        assert isinstance(self.group.queue, EngineQueues)
        self.lines = self.group.queue
        self.owner = ""
        """Name of the model that is active, or on its way; empty: none."""
        self.changing = False
        self.since = 0.0
        """Second at which the owner came up, or began to."""
        self.began = False
        """Whether the owner has prefilled something since then."""
        self.swaps = 0
        """Number of times that a model came and another left."""
        self._changed = changed
        self._used: list[str] = []
        """Names of models that have been here, the last owner at the end."""

    def __repr__(self) -> str:
        return f"Owned({self.group.name}, {self.owner or 'nobody'}{', changing' if self.changing else ''})"

    @property
    def empty(self) -> bool:
        """Whether the owner has nothing to do."""
        return not self.changing and not self.lines.outstanding(self.owner)

    def up_s(self, spec: Spec) -> float:
        """Seconds that bringing the model up here takes; 0 for the owner."""
        if spec.name == self.owner:
            return 0.0
        resident = self.group.residents.get(spec.name)
        cost = resident.cost if resident is not None else Cost(spec.shape, self.group.hardware)
        return cost.wake_s if resident is not None and resident.asleep else cost.cold_s

    def give(self, spec: Spec) -> None:
        """Gives the group to another model. Requests that the owner runs are preempted, and go to the group's
        `back`."""
        leaves = self.owner
        self.swaps += bool(leaves)
        self.owner, self.changing, self.since = spec.name, True, self.group.clock.now
        yields = [(leaves, False)] if leaves else []
        self._used = [name for name in self._used if name != spec.name] + [spec.name]
        self.group.activate(spec, self._up, yields + [(name, True) for name in self._too_many(spec, leaves)])

    def leave(self) -> None:
        """Hibernates the owner, with no model in its place."""
        leaves, self.owner, self.changing = self.owner, "", True
        self.group.bring_down(leaves, False, self._down)

    def _too_many(self, spec: Spec, leaves: str) -> list[str]:
        """Names of sleeping models that have to go cold, the least recently used first; `leaves` counts as sleeping."""
        sleep = [
            name
            for name in self._used
            if name != self.owner and (name == leaves or ((r := self.group.residents.get(name)) and r.asleep))
        ]
        hardware = self.group.hardware
        needed = hardware.quota_bytes + self.group.own_bytes(spec) + self.group.floor(spec)
        kept = min(_SLEEPERS * hardware.capacity_bytes, hardware.capacity_bytes - needed)
        return sleep[: max(0, len(sleep) - int(kept / hardware.kept_bytes))]

    def _up(self, up: bool) -> None:
        self.changing, self.began, self.since = False, False, self.group.clock.now
        if not up:
            self.owner = ""
        self._changed(self)

    def _prefilled(self) -> None:
        if not self.began and not self.changing:
            self.began = True
            self._changed(self)

    def _down(self) -> None:
        self.changing = False
        self._changed(self)
