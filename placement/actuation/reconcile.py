"""Placement's loop: activations at once, evictions when memory is wanted, moves when the gain is worth it.

It asks the judge (which puts the cluster before the policy), records every decision with its reason, and has the
actuator carry it out.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Hashable, Sequence
from dataclasses import dataclass

from placement.actuation.actuator import Actuator
from placement.actuation.deduplicate import Deduplicator
from placement.actuation.history import DecisionHistory
from placement.cluster.cluster import TAKES_REQUESTS, Cluster, HeardGroup
from placement.config import PlacementConfig
from placement.planning.planner import DepartingModel, PlacementPlan, Planner
from protos import common_pb2, gpu_scheduler_pb2, loader_pb2
from services.errors import Conflict, NotFound, PrismError, Refused, Unavailable, Unmet
from services.rpc.watch import Watched
from services.runtime import tasks
from services.telemetry import log
from services.wording import enums

_log = log.get(__name__)
_LOOK_S, _CALM_S = 0.01, 0.1
"""From one look at the cluster to the next: at least, and where that many would take much of the time."""
_OFTEN, _REST, _REST_AFTER_MOVES = 20.0, 4.0, 20.0
"""How much of it, the same where one takes long, and from one search for moves to the next, in times of what the last
one took: with a thousand groups that is longer, and calls and reports wait meanwhile."""
_LONGEST_REST_S, _LONGEST_REST_AFTER_MOVES_S = 1.0, 30.0
"""However long it took: perhaps the host stood still."""
_BELOW = {
    common_pb2.HIBERNATING: (common_pb2.ACTIVE,),
    common_pb2.COLD: (common_pb2.ACTIVE, common_pb2.HIBERNATING, common_pb2.ERROR),
    common_pb2.ON_DISK: (common_pb2.ACTIVE, common_pb2.HIBERNATING, common_pb2.ERROR),
}
"""Where a model must be for an eviction to the key to mean anything."""


@dataclass(frozen=True)
class EvictionOutcome:
    """What became of an eviction."""

    residency: common_pb2.Residency
    reason: str = ""
    """Why that is lower than was asked for."""


class Reconciler:
    """One for the cluster."""

    def __init__(
        self, config: PlacementConfig, cluster: Cluster, actuator: Actuator, planner: Planner, history: DecisionHistory
    ) -> None:
        self._config = config
        self._cluster = cluster
        self._actuator = actuator
        self._planner = planner
        self._history = history
        self._choosing: dict[str, asyncio.Task[HeardGroup]] = {}
        self._asked_at: dict[str, float] = {}
        """When these were asked for first, seconds on the loop's clock."""
        self._changed = asyncio.Event()
        self._informed = asyncio.Event()
        """All was heard, or waited for."""
        self._heard_all = False
        self._looked = Watched(0)
        """The judge's count of changes when it was last told something: whoever waits asks again where it rises."""
        self._relieving: set[HeardGroup] = set()
        self._moves_after = 0.0
        """Seconds on the loop's clock, before which moves are not looked for again."""
        self._settler = Deduplicator(cluster, actuator, history, config.drain_ms, self._changed.set)

    def changed(self) -> None:
        """The cluster said something."""
        self._changed.set()
        known = self._cluster.catalogue_known and not self._cluster.searching
        if not self._heard_all and known and all(group.reachable for group in self._cluster.groups.values()):
            self._heard_all = True
            self._informed.set()

    async def informed(self, timeout_s: float) -> None:
        """Returns when the catalogue and all groups were heard; after `timeout_s` with what there is."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._informed.wait()
        except TimeoutError:
            missing = [group.name for group in self._cluster.groups.values() if not group.reachable]
            _log.warning("starting without hearing all", catalogue=self._cluster.catalogue_known, missing=missing)
            self._informed.set()

    # --- activation

    async def activate(self, model: str) -> HeardGroup:
        """The group that takes requests for the model from now on. Whoever asks while it is being chosen waits for the
        same choice. Raises NotFound, Unmet, Refused, Unavailable."""
        if model in self._actuator.removing:
            raise NotFound(f"no model {model!r} in the catalogue")
        for group, resident in self._cluster.residents(model):
            if resident.residency in TAKES_REQUESTS:
                return group
        under_way = self._actuator.activating.get(model)
        if under_way is not None and model not in self._choosing:
            return under_way[0]
        if model not in self._choosing:
            task = tasks.spawn(self._choose_and_activate(model), f"choose a group for {model}")
            self._choosing[model] = task
            self._asked_at[model] = asyncio.get_running_loop().time()
            task.add_done_callback(lambda _: (self._choosing.pop(model), self._asked_at.pop(model)))
        return await asyncio.shield(self._choosing[model])

    async def _choose_and_activate(self, model: str) -> HeardGroup:
        spec = self._actuator.spec(model)
        if not self._cluster.reachable():
            raise Unavailable("no group is reachable")
        refused = self._planner.refused(spec)
        if refused:
            self._history.add(model, "refuse", "", refused, outcome="refused")
            raise Unmet(f"{model}: {refused}")
        verdict = await self._place(spec)
        if verdict.group is None:
            self._history.add(model, "refuse", "", verdict.reason, verdict.candidates, outcome="refused for now")
            raise Refused(f"{model}: {verdict.reason}")
        record = self._history.add(model, "activate", verdict.group.name, verdict.reason, verdict.candidates)
        yields = self.yields(verdict, f"part of activating {model}")
        await self._actuator.activate(model, verdict.group, record, yields)
        self._planner.served(spec)
        self._changed.set()
        return verdict.group

    def yields(self, verdict: PlacementPlan, outcome: str) -> list[gpu_scheduler_pb2.Yield]:
        """Who makes way for what the verdict says, each recorded."""
        assert verdict.group is not None
        for each in verdict.yields:
            self._history.add(each.model, _action(each.target), verdict.group.name, each.reason, outcome=outcome)
        drain_ms = self._config.yield_drain_ms
        return [gpu_scheduler_pb2.Yield(model=y.model, target=y.target, drain_ms=drain_ms) for y in verdict.yields]

    async def _place(self, spec: common_pb2.ModelSpec) -> PlacementPlan:
        """Where the model can be told to come up. A group that is bringing it down would refuse: that is waited for,
        20 ms mostly, and whoever was refused would be back later than that. Then the answer may be another."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self._config.hold_s
        verdict = await self._find_place(spec, until)
        while (group := verdict.group) is not None and _leaves(group, spec.name) and loop.time() < until:
            await self._has_left(group, spec.name, until)
            verdict = await self._find_place(spec, until)
        return verdict

    async def _has_left(self, group: HeardGroup, model: str, until: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                await self._cluster.until(lambda: not _leaves(group, model))

    async def _find_place(self, spec: common_pb2.ModelSpec, until: float) -> PlacementPlan:
        """The judge's verdict; where that is to wait, the one that it comes to while the asker does, up to `until` on
        the loop's clock. It is asked again only when it may say something else."""
        loop = asyncio.get_running_loop()
        verdict, asked_at = self._planner.activation(spec, max(0.0, until - loop.time())), self._planner.changes
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                while verdict.group is None:
                    self._changed.set()  # who waits now may hold others up, or be held up for so long and no longer
                    while self._looked.value <= asked_at:
                        await self._looked.changed(self._looked.revision)
                    verdict = self._planner.activation(spec, max(0.0, until - loop.time()))
                    asked_at = self._planner.changes
        return verdict

    def check_fits(self, spec: common_pb2.ModelSpec) -> None:
        """Raises Unmet with the arithmetic for a model that no group could hold even alone."""
        refused = self._planner.refused(spec)
        if refused:
            raise Unmet(f"{spec.name}: {refused}")

    def refusal(self, entry: loader_pb2.Entry) -> str:
        """Why a model of the catalogue fits nowhere, with the arithmetic; empty where it does. Empty while a group is
        still unheard: it may be larger."""
        return "" if entry.error or not self._heard_all else self._planner.refused(entry.model)

    @property
    def premises(self) -> Hashable:
        """What all refusals rest on: where this is another, they may be, of models of which nothing was heard too."""
        return self._cluster.sizes if self._heard_all else None  # then there are none

    # --- operators

    def prospect(self, model: str) -> tuple[PlacementPlan, float] | None:
        """What a request for the model would meet if it came now, and for how many seconds room has been looked for,
        because somebody asked. None where it takes requests, cannot be served or is unknown."""
        entry = self._cluster.entry(model)
        here = {resident.residency for _, resident in self._cluster.residents(model)}
        if entry is None or entry.error or here.intersection(TAKES_REQUESTS) or model in self._actuator.removing:
            return None
        if common_pb2.ERROR in here:  # its requests are refused, whatever room there is
            return None
        if self.refusal(entry):
            return None
        now = asyncio.get_running_loop().time()
        return self._planner.prospect(entry.model), now - self._asked_at.get(model, now)

    async def evict(self, model: str, target: common_pb2.Residency) -> EvictionOutcome:
        """Brings the model down wherever it is; what it has then, once its image is gone too where that is asked for.
        Raises NotFound, Unmet."""
        spec = self._actuator.spec(model)
        if target not in _BELOW:
            known = target in common_pb2.Residency.values()
            raise Unmet(f"{common_pb2.Residency.Name(target) if known else target} is not a residency to evict to")
        places = [group for group, resident in self._cluster.residents(model) if resident.residency in _BELOW[target]]
        if not places and not (target == common_pb2.ON_DISK and self._has_image(model)):
            raise Unmet(f"{model} is {self._state(model)}: there is nothing to bring down")
        reached, reason = target, ""
        for group in places:
            why = group.residents[model].no_image if model in group.residents else ""
            record = self._history.add(model, _action(target), group.name, "an operator asked for it")
            last = await self._actuator.bring_down(spec, group, target, record)
            if target == common_pb2.HIBERNATING != last.residency:
                reached = common_pb2.COLD
            reason = reason or last.reason or why
        if reached != common_pb2.COLD or self._has_image(model):
            return EvictionOutcome(reached)
        return EvictionOutcome(common_pb2.ON_DISK, self._without_image(model, target, reason))

    def _without_image(self, model: str, target: common_pb2.Residency, why: str) -> str:
        """Why a model came lower than it was to: `why` it has no image, as its group knew it."""
        entry = self._cluster.entry(model)
        if entry is not None and entry.on_disk and target == common_pb2.COLD:
            return "its image is on disk, and not in host memory"
        purpose = "to sleep on" if target == common_pb2.HIBERNATING else "to keep in host memory"
        why = (entry.no_image if entry is not None else "") or why or "none was made of its weights yet"
        return f"it has no image {purpose}: {why}; its engine is given back, and the next start reads the checkpoint"

    def _has_image(self, model: str) -> bool:
        entry = self._cluster.entry(model)
        return entry is not None and entry.has_image

    def _state(self, model: str) -> str:
        """As people say it."""
        residents = self._cluster.residents(model)
        away = common_pb2.COLD if self._has_image(model) else common_pb2.ON_DISK
        return enums.name(common_pb2.Residency, residents[0][1].residency if residents else away).replace("_", " ")

    @contextlib.asynccontextmanager
    async def removing(self, model: str, force: bool = False) -> AsyncIterator[None]:
        """The model is nowhere, has no route and comes up nowhere until the end of this; it stays in the catalogue.
        Raises NotFound, without `force` Unmet for a model that is pinned or has requests, Conflict, and what a group
        refused."""
        entry = self._cluster.entry(model)
        if entry is None:
            raise NotFound(f"no model {model!r} in the catalogue")
        if (entry.model.pinned or entry.image_pinned) and not force:
            raise Unmet(f"{model} is pinned: it is removed by force only")
        has_requests = any(r.waiting or r.running for _, r in self._cluster.residents(model))
        if not force and (has_requests or model in self._choosing):
            raise Unmet(f"{model} has requests that run or wait: it is removed by force only")
        if model in self._actuator.moving | self._actuator.removing:
            raise Conflict(f"{model} is moving, or being removed")
        self._actuator.removing.add(model)
        try:
            self._cluster.changed(model)
            await self._actuator.remove(
                entry.model, lambda group: self._history.add(model, "remove", group.name, "an operator asked for it")
            )
            yield
        finally:
            self._actuator.removing.discard(model)
            self._cluster.changed(model)

    async def migrate(self, model: str, to_group: str) -> float:
        """Moves an active model. Raises NotFound, Unmet, Refused."""
        self._actuator.spec(model)
        target = self._cluster.group(to_group)
        if target is None:
            raise NotFound(
                f"no group {to_group!r}; there are {', '.join(g.name for g in self._cluster.groups.values())}"
            )
        source = next((g for g, r in self._cluster.residents(model) if r.residency == common_pb2.ACTIVE), None)
        if source is None:
            raise Unmet(f"{model} is not active")
        if source is target:
            raise Unmet(f"{model} is on {target.name} already")
        record = self._history.add(model, "migrate", target.name, f"from {source.name}: an operator asked for it")
        return await self._actuator.migrate(model, source, target, record)

    # --- by itself

    async def run(self) -> None:
        """Observes all the time, lets idle models make way for KV and moves models when the policy says so. Runs for
        ever."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(self._config.period_s, self._planner.rest_s())):
                    await self._changed.wait()
            self._changed.clear()
            began = asyncio.get_running_loop().time()
            self._planner.observe()
            if self._looked.value != self._planner.changes:
                self._looked.set(self._planner.changes)
            if self._config.relieve:
                self.relieve()
            if self._informed.is_set():
                self._settler.settle()
            took = asyncio.get_running_loop().time() - began
            if self._informed.is_set() and self._config.rebalance:
                self._rebalance()
            # States come from several groups: they are looked at together.
            await asyncio.sleep(rest_s(took))

    def relieve(self) -> None:
        """Sends idle models to sleep where requests lack memory for KV; one group's at a time."""
        for group, yields in self._planner.reliefs():
            if group not in self._relieving:
                self._relieving.add(group)
                tasks.spawn(self._relieve(group, yields), f"memory for KV on {group.name}")

    async def _relieve(self, group: HeardGroup, yields: Sequence[DepartingModel]) -> None:
        try:
            for each in yields:
                await self._quietly(self._sleep(group, each))
        finally:
            self._relieving.discard(group)

    async def _sleep(self, group: HeardGroup, yielding: DepartingModel) -> None:
        """Raises what refused it. Nothing happens to a model that is on its way somewhere, or is not awake any more:
        those before it took their time, and who makes way for an activation is not asleep at once."""
        model, actuator = yielding.model, self._actuator
        resident = group.residents.get(model)
        on_its_way = model in actuator.moving | actuator.removing | actuator.activating.keys()
        on_its_way |= model in actuator.making_way or actuator.has_gone_down(model, group)
        if on_its_way or resident is None or resident.residency != common_pb2.ACTIVE or not resident.idle_s:
            return
        spec = self._actuator.spec(model)
        record = self._history.add(model, _action(yielding.target), group.name, yielding.reason)
        _log.info("makes way for KV", model=model, group=group.name, why=yielding.reason)
        await self._actuator.bring_down(spec, group, yielding.target, record)

    def _rebalance(self) -> None:
        if self._planner.waits():  # what moves would be in its way
            return
        if self._actuator.activating or len(self._actuator.moving) >= self._config.migrations_at_once:
            return
        loop = asyncio.get_running_loop()
        began = loop.time()
        if began < self._moves_after:
            return
        moves = self._planner.moves()[: self._config.migrations_at_once]
        took = loop.time() - began
        self._moves_after = began + took + min(_LONGEST_REST_AFTER_MOVES_S, _REST_AFTER_MOVES * took)
        for verdict in moves:
            assert verdict.group is not None and verdict.source is not None
            record = self._history.add(verdict.model, "migrate", verdict.group.name, verdict.reason, verdict.candidates)
            tasks.spawn(self._quietly(self._move(verdict, record)), f"move {verdict.model}")

    async def _move(self, verdict: PlacementPlan, record) -> None:  # type: ignore[no-untyped-def]
        assert verdict.group is not None and verdict.source is not None
        yields = self.yields(verdict, f"part of moving {verdict.model}")
        try:
            await self._actuator.migrate(verdict.model, verdict.source, verdict.group, record, yields)
        except PrismError:
            self._planner.not_moved(verdict.model)
            raise
        self._planner.moved(verdict.model)

    @staticmethod
    async def _quietly(work: Awaitable[object]) -> None:
        try:
            await work
        except PrismError as error:
            _log.warning("not done; all is as before", why=str(error))

    @property
    def load_weight(self) -> float:
        """Of the configuration."""
        return self._config.load_weight

    def demands(self) -> dict[str, float]:
        return self._planner.demands()

    def rates(self) -> dict[str, float]:
        return self._planner.rates()


def rest_s(took_s: float) -> float:
    """Until the next look at the cluster, behind one that took so long."""
    return max(_LOOK_S, min(_CALM_S, _OFTEN * took_s), min(_LONGEST_REST_S, _REST * took_s))


def _leaves(group: HeardGroup, model: str) -> bool:
    """Whether the group is bringing it down, as far as it was heard."""
    resident = group.residents.get(model)
    return group.reachable and resident is not None and resident.residency == common_pb2.DRAINING


def _action(target: common_pb2.Residency) -> str:
    return "hibernate" if target == common_pb2.HIBERNATING else "go cold"
