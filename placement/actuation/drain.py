"""Emptying a group for its operator: nothing comes up there any more, and what is there leaves.

That it is drained is the group's own knowledge, so that a placement that comes after this one hears it.
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
from services.errors import NotFound, PrismError, Unavailable
from services.runtime import tasks
from services.telemetry import log

_log = log.get(__name__)


@dataclass(frozen=True)
class DrainedModel:
    """What became of a model that was on the group."""

    model: str
    to_group: str = ""
    """Empty: it went cold, or stays."""
    error: str = ""
    """Not empty: why it stays."""


class Drain:
    """Carries DrainGroup out."""

    def __init__(
        self,
        cluster: Cluster,
        reconciler: Reconciler,
        actuator: Actuator,
        planner: Planner,
        history: DecisionHistory,
        drain_ms: int,
    ) -> None:
        """`drain_ms`: how long what runs may finish where it cannot go along."""
        self._cluster = cluster
        self._reconciler = reconciler
        self._actuator = actuator
        self._planner = planner
        self._history = history
        self._drain_ms = drain_ms

    async def begin(self, name: str) -> list[DrainedModel]:
        """Returns when the group is empty but for what stays. Raises NotFound, Unavailable."""
        group = await self._set(name, True)
        # Who was told to come up there before; until its group has said so it would be overlooked.
        await self._cluster.until(lambda: not group.reachable or not self._comes_up(group))
        there = sorted(group.residents.values(), key=lambda r: r.residency != common_pb2.ACTIVE)
        # As it is when it is its turn: others took their time, and it may have left by then.
        turns = (group.residents.get(resident.model) for resident in there)
        return [await self._leave(group, each, f"{group.name} is drained") for each in turns if each is not None]

    def _comes_up(self, group: HeardGroup) -> bool:
        """Whether a model does there, as far as it was told to or the group has said."""
        there = (resident.residency for resident in group.residents.values())
        return common_pb2.WAKING in there or group in self._actuator.on_their_way().values()

    async def move_away(self, group: HeardGroup) -> None:
        """Of a group that is stopping: moves models with requests to where there is room. The others end with it, and
        come up again where somebody asks for them."""
        moves = []
        for model in [each.model for each in group.residents.values() if each.waiting + each.running]:
            if (resident := group.residents.get(model)) is None:
                continue
            move = tasks.spawn(self._move(group, resident, f"{group.name} is stopping"), f"move {model} away")
            moves.append((model, move))
            # The next one's place is looked for when this one has its own; what runs may take long to end.
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
        """Models may come up there again. Raises NotFound, Unavailable."""
        await self._set(name, False)

    async def _set(self, name: str, drained: bool) -> HeardGroup:
        group = self._cluster.group(name)
        if group is None:
            raise NotFound(f"no group {name!r}; there are {', '.join(g.name for g in self._cluster.groups.values())}")
        if not group.reachable:
            raise Unavailable(f"{name} is away")
        await group.client.set_drained(drained)
        await self._cluster.until(lambda: group.drained == drained or not group.reachable)
        return group

    async def renew(self, group: HeardGroup, resident: gpu_scheduler_pb2.Resident, why: str) -> None:
        """Has a model leave whose engine is not what the catalogue says: to another group that has room, where it is
        read afresh, or altogether, also if it is pinned; it comes up again where somebody asks for it. What runs may
        finish. Raises what refused it."""
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
        """Moves an active model to where there is room, as the verdict says, with no group if that is none or its own.
        None: it is not one that could move. Raises what refused it."""
        model, entry = resident.model, self._cluster.entry(resident.model)
        if resident.residency != common_pb2.ACTIVE or entry is None or entry.error:
            return None
        verdict = self._planner.prospect(entry.model)
        if verdict.group is group:
            return replace(verdict, group=None)
        if verdict.group is not None:
            reason = f"{why}: from there {verdict.reason}"
            record = self._history.add(model, "migrate", verdict.group.name, reason, verdict.candidates)
            yields = self._reconciler.yields(verdict, f"part of moving {model}")
            await self._actuator.migrate(model, group, verdict.group, record, yields)
            self._planner.moved(model)
        return verdict
