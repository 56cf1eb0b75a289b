"""Empties a group for its operator: nothing comes up there any more, and the models there leave.

The group itself keeps whether it is drained, so that a restarted placement learns it from the group's report.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from functools import partial

from placement.actuation.actuator import Actuator
from placement.actuation.history import DecisionHistory
from placement.actuation.reconcile import Reconciler
from placement.cluster.cluster import Cluster, HeardGroup
from placement.planning.planner import PlacementPlan, Planner
from protos import common_pb2, gpu_scheduler_pb2
from services.errors import PrismError, Unavailable
from services.runtime import tasks
from services.telemetry import log

_log = log.get(__name__)


@dataclass(frozen=True)
class DrainedModel:
    """Outcome of a drain for one model that was on the group."""

    model: str
    to_group: str = ""
    """Name of the group that the model moved to; empty if it went cold, or stays."""
    error: str = ""
    """Why the model stays; empty if it left."""


class Drain:
    """Carries out DrainGroup, and moves models away from groups that stop."""

    def __init__(
        self,
        cluster: Cluster,
        reconciler: Reconciler,
        actuator: Actuator,
        planner: Planner,
        history: DecisionHistory,
        drain_ms: int,
    ) -> None:
        """`drain_ms`: milliseconds that running requests may take to finish if they cannot move with their model."""
        self._cluster = cluster
        self._reconciler = reconciler
        self._actuator = actuator
        self._planner = planner
        self._history = history
        self._drain_ms = drain_ms

    async def begin(self, name: str) -> list[DrainedModel]:
        """Drains the group `name`. Returns when it is empty but for models that stay, with the outcome for each model.
        Raises NotFound, Unavailable."""
        group = await self._set(name, True)
        # Activations ordered earlier would be overlooked until the group has reported them.
        await self._cluster.until(lambda: not group.reachable or not self._comes_up(group))
        there = sorted(group.residents.values(), key=lambda r: r.residency != common_pb2.ACTIVE)
        # Each resident is read when its turn comes: earlier ones took their time, and it may have left by then.
        turns = (group.residents.get(resident.model) for resident in there)
        return [await self._leave(group, each, f"{group.name} is drained") for each in turns if each is not None]

    def _comes_up(self, group: HeardGroup) -> bool:
        """Whether a model comes up on the group, by what was ordered or by the group's report."""
        there = (resident.residency for resident in group.residents.values())
        return common_pb2.WAKING in there or group in self._actuator.on_their_way().values()

    async def move_away(self, group: HeardGroup) -> None:
        """Moves models with requests off a group that is stopping, to groups that have room. Other models end with the
        group, and come up again where a request asks for them."""
        moves = []
        for model in [each.model for each in group.residents.values() if each.waiting + each.running]:
            if (resident := group.residents.get(model)) is None:
                continue
            move = tasks.spawn(self._move(group, resident, f"{group.name} is stopping"), f"move {model} away")
            moves.append((model, move))
            # The next model's place is looked for when this model is up in its own; its running requests may take long
            # to end.
            up = tasks.spawn(self._cluster.until(partial(self._is_up_beside, group, model)), f"{model} is up elsewhere")
            await asyncio.wait([move, up], return_when=asyncio.FIRST_COMPLETED)
            await tasks.cancel(up)
        for model, move in moves:
            try:
                await move
            except PrismError as error:
                _log.warning("not moved", model=model, group=group.name, why=str(error))

    def _is_up_beside(self, group: HeardGroup, model: str) -> bool:
        places = self._cluster.residents(model)
        return any(each is not group and there.residency == common_pb2.ACTIVE for each, there in places)

    async def undo(self, name: str) -> None:
        """Lets models come up on the group again. Raises NotFound, Unavailable."""
        await self._set(name, False)

    async def _set(self, name: str, drained: bool) -> HeardGroup:
        group = self._cluster.known_group(name)
        if not group.reachable:
            raise Unavailable(f"{name} is away")
        await group.client.set_drained(drained)
        await self._cluster.until(lambda: group.drained == drained or not group.reachable)
        return group

    async def renew(self, group: HeardGroup, resident: gpu_scheduler_pb2.Resident, why: str) -> None:
        """Takes a model off the group if its engine is not what the catalogue says. It moves to another group that has
        room, where it is read afresh, or goes cold, even if it is pinned, and comes up again where a request asks for
        it. Running requests may finish. Raises the group's error if it refuses."""
        verdict = await self._move(group, resident, why)
        if verdict is None or verdict.group is None:
            await self._bring_down(group, resident.model, why)

    async def _leave(self, group: HeardGroup, resident: gpu_scheduler_pb2.Resident, why: str) -> DrainedModel:
        model, entry = resident.model, self._cluster.entry(resident.model)
        try:
            verdict = await self._move(group, resident, why)
            if verdict is not None and verdict.group is not None:
                return DrainedModel(model, verdict.group.name)
            if verdict is not None and entry is not None and entry.model.pinned:
                return DrainedModel(model, error=f"it is pinned, and has no other place: {verdict.reason}")
            await self._bring_down(group, model, why)
            return DrainedModel(model)
        except PrismError as error:
            return DrainedModel(model, error=str(error))

    async def _bring_down(self, group: HeardGroup, model: str, why: str) -> None:
        record = self._history.add(model, "go cold", group.name, why)
        spec = common_pb2.ModelSpec(name=model) if (entry := self._cluster.entry(model)) is None else entry.model
        await self._actuator.bring_down(spec, group, common_pb2.COLD, record, self._drain_ms)

    async def _move(self, group: HeardGroup, resident: gpu_scheduler_pb2.Resident, why: str) -> PlacementPlan | None:
        """Moves an active model to a group that has room, or to another that serves it already, and returns the plan;
        the plan's group is None if there is no room, or room only where the model is. Returns None for a model that
        cannot move: it is not active, or its entry is missing or in error. Raises the error of the group that
        refused."""
        model, entry = resident.model, self._cluster.entry(resident.model)
        if resident.residency != common_pb2.ACTIVE or entry is None or entry.error:
            return None
        verdict = self._beside(group, model)
        if verdict is None and any(
            self._serves_it(other, model) for other in self._cluster.reachable() if other is not group
        ):
            return None  # the others are to be left as well
        verdict = verdict or self._planner.prospect(entry.model)
        if verdict.group is group:
            return replace(verdict, group=None)
        if verdict.group is not None:
            reason = f"{why}: from there {verdict.reason}"
            record = self._history.add(model, "migrate", verdict.group.name, reason, verdict.candidates)
            yields = self._reconciler.yields(verdict, record, f"part of moving {model}")
            await self._actuator.migrate(model, group, verdict.group, record, yields)
            self._planner.moved(model)
        return verdict

    def _beside(self, group: HeardGroup, model: str) -> PlacementPlan | None:
        """The plan to leave the model to another group that serves it; None if there is none."""
        other = self._actuator.beside(group, model)
        return None if other is None else PlacementPlan(model, other, f"{other.name} serves it already")

    @staticmethod
    def _serves_it(group: HeardGroup, model: str) -> bool:
        resident = group.residents.get(model)
        return resident is not None and resident.residency == common_pb2.ACTIVE
