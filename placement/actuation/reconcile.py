"""Placement's loop: activations at once, evictions when memory is wanted, moves when the gain is worth it.

The loop asks the planner (which describes the cluster to the policy), records every decision with its reason, and has
the actuator carry it out.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass

from placement.actuation.actuator import Actuator
from placement.actuation.deduplicate import Deduplicator
from placement.actuation.history import DecisionHistory, DecisionRecord
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
"""Seconds from one look at the cluster to the next: the least, and the least where looks that often would take much of
the time."""
_OFTEN, _REST, _REST_AFTER_MOVES = 20.0, 4.0, 20.0
"""Pauses as multiples of the seconds that the last pass took: after a look at the cluster up to `_CALM_S`, after a slow
look, and after a search for moves. With a thousand groups a pass takes longer, and calls and reports wait meanwhile."""
_LONGEST_REST_S, _LONGEST_REST_AFTER_MOVES_S = 1.0, 30.0
"""Longest pause in seconds, after a look and after a search for moves, however long the pass took: perhaps the host
stood still."""
_HEARD_S = 2.0
"""Longest time in seconds that a call waits for the group's report of what was done."""
_BELOW = {
    common_pb2.HIBERNATING: (common_pb2.ACTIVE,),
    common_pb2.COLD: (common_pb2.ACTIVE, common_pb2.HIBERNATING, common_pb2.ERROR),
    common_pb2.ON_DISK: (common_pb2.ACTIVE, common_pb2.HIBERNATING, common_pb2.ERROR),
}
"""Target of an eviction -> residencies from which it brings a model down."""


@dataclass(frozen=True)
class EvictionOutcome:
    """Outcome of an eviction: the residency that the model has then."""

    residency: common_pb2.Residency
    reason: str = ""
    """Why the residency is lower than the requested one; empty if it is not."""


def rest_s(took_s: float, *, look_s: float = _LOOK_S) -> float:
    """Seconds to pause before the next look at the cluster, after a look that took `took_s` seconds: `look_s` at the
    least."""
    return max(look_s, min(_CALM_S, _OFTEN * took_s), min(_LONGEST_REST_S, _REST * took_s))


def rest_after_moves_s(took_s: float) -> float:
    """Seconds to pause before the next search for moves, after one that took `took_s` seconds."""
    return min(_LONGEST_REST_AFTER_MOVES_S, _REST_AFTER_MOVES * took_s)


class Reconciler:
    """Runs placement's loop and the operators' calls. A cluster has one."""

    def __init__(
        self,
        config: PlacementConfig,
        cluster: Cluster,
        actuator: Actuator,
        planner: Planner,
        history: DecisionHistory,
        *,
        look_s: float = _LOOK_S,
        rest_after_moves_s: Callable[[float], float] = rest_after_moves_s,
    ) -> None:
        """`look_s`: the least seconds from one look at the cluster to the next. `rest_after_moves_s`: how long the
        pause after a search for moves is, by the seconds that it took."""
        self._config = config
        self._cluster = cluster
        self._actuator = actuator
        self._planner = planner
        self._history = history
        self._look_s = look_s
        self._rest_after_moves_s = rest_after_moves_s
        self._choosing: dict[str, asyncio.Task[HeardGroup]] = {}
        self._asked_at: dict[str, float] = {}
        """Model -> second on the loop's clock at which its activation was first requested."""
        self._changed = asyncio.Event()
        self._informed = asyncio.Event()
        """Set once every group and the catalogue were heard, or the wait for them has ended."""
        self._heard_all = False
        self._looked = Watched(0)
        """The planner's count of changes at its last observation; an activation that waits for room is planned again
        when it rises."""
        self._relieving: set[HeardGroup] = set()
        self._moves_after = 0.0
        """Second on the loop's clock before which moves are not searched for again."""
        self._replicas_after = 0.0
        """Second on the loop's clock before which replicas are not looked at again."""
        self._replicating: asyncio.Task[None] | None = None
        """The task by which a model comes up on a further group; there is one at a time."""
        self._evicting: set[str] = set()
        """Names of models that an operator brings down."""
        most = config.replication.most
        self._settler = Deduplicator(cluster, actuator, history, config.drain_ms, self._changed.set, most)

    def changed(self) -> None:
        """Notes that the cluster has changed, and wakes the loop."""
        self._changed.set()
        known = self._cluster.catalogue_known and not self._cluster.searching
        if not self._heard_all and known and all(group.reachable for group in self._cluster.groups.values()):
            self._heard_all = True
            self._informed.set()

    async def informed(self, timeout_s: float) -> None:
        """Returns when the catalogue and all groups were heard, and after `timeout_s` seconds at the latest, whatever
        was heard by then."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._informed.wait()
        except TimeoutError:
            missing = [group.name for group in self._cluster.groups.values() if not group.reachable]
            _log.warning("starting without hearing all", catalogue=self._cluster.catalogue_known, missing=missing)
            self._informed.set()

    # --- activation

    async def activate(self, model: str) -> HeardGroup:
        """The group that takes requests for the model from now on. Callers that come while the group is being chosen
        share one choice. Raises NotFound, Unmet, Refused, Unavailable."""
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
        yields = self.yields(verdict, record, f"part of activating {model}")
        await self._actuator.activate(model, verdict.group, record, yields)
        self._planner.served(spec)
        self._changed.set()
        return verdict.group

    def yields(self, verdict: PlacementPlan, whole: DecisionRecord, outcome: str) -> list[gpu_scheduler_pb2.Yield]:
        """The models that make way for a plan, for the group's activation call; each is recorded with `outcome`, as a
        part of `whole`.
        Running requests of such a model go on at another group that serves it, with their KV if that group is on the
        same node."""
        group, found = verdict.group, []
        assert group is not None
        for each in verdict.yields:
            part = self._history.add(each.model, _action(each.target), group.name, each.reason, outcome=outcome)
            whole.parts.append(part)
            resident = group.residents.get(each.model)
            busy = resident is not None and resident.running
            successor = self._actuator.successor(group, self._actuator.beside(group, each.model)) if busy else ""
            found.append(gpu_scheduler_pb2.Yield(model=each.model, target=each.target, successor=successor))
        return found

    async def _place(self, spec: common_pb2.ModelSpec) -> PlacementPlan:
        """A plan whose group can be ordered to bring the model up. A group that is still bringing it down would refuse,
        so that is waited for: it takes 20 ms mostly, and a refused caller would come back later than that. The plan
        made afterwards may be another."""
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
        """The planner's plan. If that is to wait, the plan that it reaches before `until`, in seconds on the loop's
        clock. The planner is asked again only when its answer may have changed."""
        loop = asyncio.get_running_loop()
        verdict, asked_at = self._planner.activation(spec, max(0.0, until - loop.time())), self._planner.changes
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                while verdict.group is None:
                    self._changed.set()  # a model that waits may hold others up, or be held up itself
                    while self._looked.value <= asked_at:
                        await self._looked.changed(self._looked.revision)
                    verdict = self._planner.activation(spec, max(0.0, until - loop.time()))
                    asked_at = self._planner.changes
        return verdict

    def check_fits(self, spec: common_pb2.ModelSpec) -> None:
        """Raises Unmet with the arithmetic if no group could hold the model even alone."""
        refused = self._planner.refused(spec)
        if refused:
            raise Unmet(f"{spec.name}: {refused}")

    def refusal(self, entry: loader_pb2.Entry) -> str:
        """Why a model of the catalogue fits nowhere, with the arithmetic; empty if it fits, and while a group is still
        unheard, which may be larger."""
        return "" if entry.error or not self._heard_all else self._planner.refused(entry.model)

    @property
    def premises(self) -> Hashable:
        """What all refusals rest on. When this value changes, refusals may change too, also of models of which nothing
        new was heard."""
        return self._cluster.sizes if self._heard_all else None  # there are no refusals until then

    # --- operators

    def prospect(self, model: str) -> tuple[PlacementPlan, float] | None:
        """The plan that a request for the model would meet now, and the seconds for which room has been looked for on
        behalf of an earlier caller (0 without one). None if the model takes requests, cannot be served or is
        unknown."""
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

    async def evict(self, model: str, target: common_pb2.Residency, group: str = "") -> EvictionOutcome:
        """Brings the model down to `target` on every group that has it, or on the one of the name `group`. Returns the
        residency that it has then; for ON_DISK that holds once the caller has dropped its image. Raises NotFound,
        Unmet, and Conflict for a model that is on its way."""
        spec = self._actuator.spec(model)
        if group:
            only = self._cluster.known_group(group)
            if model not in only.residents:
                raise Unmet(f"{model} is not on {only.name}")
            if target == common_pb2.ON_DISK:
                raise Unmet(f"{model} leaves host memory on all groups, or on none: name no group")
            if self._actuator.beside(only, model) is not None:
                return await self._leave(model, only, target)
        if target not in _BELOW:
            known = target in common_pb2.Residency.values()
            raise Unmet(f"{common_pb2.Residency.Name(target) if known else target} is not a residency to evict to")
        places = [
            each
            for each, resident in self._cluster.residents(model)
            if resident.residency in _BELOW[target] and group in ("", each.name)
        ]
        entry = self._cluster.entry(model)
        if target == common_pb2.ON_DISK and entry is not None and (entry.model.pinned or entry.image_pinned):
            raise Unmet(f"{model} is pinned: its image stays in host memory until it is unpinned")
        if self._actuator.comes_up(model) is not None or (not places and self._is_on_its_way(model)):
            raise Conflict(f"{model} is on its way: it goes down once that has ended")
        if not places and not (target == common_pb2.ON_DISK and self._has_image(model)):
            raise Unmet(f"{model} is {self._state(model)}: there is nothing to bring down")
        reached, reason = target, ""
        for place in places:
            why = place.residents[model].no_image if model in place.residents else ""
            record = self._history.add(model, _action(target), place.name, "an operator asked for it")
            self._evicting.add(model)
            try:
                last = await self._actuator.bring_down(spec, place, target, record)
            finally:
                self._evicting.discard(model)
            self._planner.hold(model, False)
            if target == common_pb2.HIBERNATING != last.residency:
                reached = common_pb2.COLD
            reason = reason or last.reason or why
        return self._reached(model, target, reached, reason)

    async def _leave(self, model: str, group: HeardGroup, target: common_pb2.Residency) -> EvictionOutcome:
        """Brings the model down to `target` on one of the groups that serve it. Raises Unmet, Conflict, and the group's
        error if it refuses."""
        if target not in _BELOW or group.residents[model].residency not in _BELOW[target]:
            raise Unmet(f"{model} is not up on {group.name}: there is nothing to bring down")
        if self._is_on_its_way(model):
            raise Conflict(f"{model} is on its way: it leaves {group.name} once that has ended")
        record = self._history.add(model, _action(target), group.name, "an operator asked for it; others serve it")
        why = group.residents[model].no_image
        last = await self._actuator.let_go(model, group, record, target)
        self._planner.hold(model, False)
        slept = target == last.residency == common_pb2.HIBERNATING
        return self._reached(model, target, common_pb2.HIBERNATING if slept else common_pb2.COLD, last.reason or why)

    def _reached(
        self, model: str, target: common_pb2.Residency, reached: common_pb2.Residency, why: str
    ) -> EvictionOutcome:
        """The outcome of an eviction to `target` that came to `reached`. `why`: why the model has no image, by its
        group."""
        if reached != common_pb2.COLD or self._has_image(model):
            return EvictionOutcome(reached)
        return EvictionOutcome(common_pb2.ON_DISK, self._without_image(model, target, why))

    async def replicate(self, model: str, to_group: str = "") -> tuple[str, float]:
        """Brings an active model up on one group more, `to_group` or the one with the least pressure, and returns its
        name and the seconds that it took. The model keeps its groups until an operator takes it off one, also if
        `to_group` is one of several that serve it already. Raises NotFound, Unmet, Conflict, Refused."""
        spec = self._actuator.spec(model)
        only = self._cluster.known_group(to_group) if to_group else None
        here = [group for group, there in self._cluster.residents(model) if there.residency == common_pb2.ACTIVE]
        if not here:
            raise Unmet(f"{model} is not active")
        if only is not None and only in here:
            if len(here) == 1:
                raise Unmet(f"{model} is on {only.name} already")
            self._planner.hold(model, True)
            return only.name, 0.0
        most = spec.most_replicas or self._config.most_replicas
        if len(here) >= min(most, self._config.most_replicas):
            whose = "its" if most <= self._config.most_replicas and spec.most_replicas else "placement's"
            names = " and ".join(group.name for group in here)
            raise Unmet(f"{model} is on {names}: {whose} most_replicas is {min(most, self._config.most_replicas)}")
        if self._is_on_its_way(model):
            raise Conflict(f"{model} is on its way: it comes up on another group once that has ended")
        plan = self._planner.beside(spec, None if only is None else only.name)
        if plan.group is None:
            raise Refused(f"{model}: {plan.reason}")
        reason = f"an operator asked for it: {plan.reason}"
        record = self._history.add(model, "replicate", plan.group.name, reason, plan.candidates)
        yields = self.yields(plan, record, f"part of bringing {model} up on {plan.group.name}")
        await self._carry_replica(plan, record, yields)
        if not record.took_s:
            raise Unmet(f"{model} did not come up on {plan.group.name}: {record.outcome}")
        # Who asked looks at the routes next.
        group = plan.group
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_HEARD_S):
                await self._cluster.until(lambda: _serves(group, model))
        self._planner.hold(model, True)
        return group.name, record.took_s

    def keeps(self, model: str) -> bool:
        """Whether the model leaves none of its groups as not needed, by an operator's order."""
        return self._planner.holds(model)

    def _is_on_its_way(self, model: str) -> bool:
        """Whether a group is bringing the model up or down, or is about to."""
        under_way = (common_pb2.WAKING, common_pb2.DRAINING)
        actuator = self._actuator
        if model in self._choosing or model in actuator.activating or model in actuator.moving | actuator.removing:
            return True
        return any(resident.residency in under_way for _, resident in self._cluster.residents(model))

    def _without_image(self, model: str, target: common_pb2.Residency, why: str) -> str:
        """Why a model came lower than `target`. `why`: why it has no image, by its group's report."""
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
        """The model's residency in words, for messages to people."""
        residents = self._cluster.residents(model)
        away = common_pb2.COLD if self._has_image(model) else common_pb2.ON_DISK
        return enums.name(common_pb2.Residency, residents[0][1].residency if residents else away).replace("_", " ")

    @contextlib.asynccontextmanager
    async def removing(self, model: str, force: bool = False) -> AsyncIterator[None]:
        """A context in which the model is on no group, has no route and comes up nowhere; it stays in the catalogue.
        Raises NotFound, Conflict, the error of a group that refused, and without `force` Unmet for a model that is
        pinned or has requests."""
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
        """Moves an active model to the group `to_group`, and returns the seconds that it took. Raises NotFound, Unmet,
        Refused."""
        self._actuator.spec(model)
        target = self._cluster.known_group(to_group)
        active = [group for group, there in self._cluster.residents(model) if there.residency == common_pb2.ACTIVE]
        if not active:
            raise Unmet(f"{model} is not active")
        if target in active:
            raise Unmet(f"{model} is on {target.name} already")
        source = min(active, key=lambda group: group.residents[model].waiting + group.residents[model].running)
        record = self._history.add(model, "migrate", target.name, f"from {source.name}: an operator asked for it")
        seconds = await self._actuator.migrate(model, source, target, record)
        self._planner.moved(model)  # or placement might take it back at once
        return seconds

    # --- the loop

    async def run(self) -> None:
        """Runs placement's loop for ever: observes the cluster, lets idle models make way for KV, and moves models as
        the policy decides."""
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
                if not self._replicate():
                    self._rebalance()
            # The pause gathers the states of several groups into one look.
            await asyncio.sleep(rest_s(took, look_s=self._look_s))

    def relieve(self) -> None:
        """Hibernates idle models where requests lack memory for KV. Each group has one such round at a time."""
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
        """Hibernates a model for the sake of KV. A model that is on its way somewhere, or is not idle and awake any
        more, is left alone: hibernating those before it took time, and a model that makes way for an activation is not
        asleep at once. Raises the group's error if it refuses."""
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

    def _replicate(self) -> bool:
        """Takes models off groups that they can do without, and brings one that is short of groups up on one more.
        Returns whether anything was begun."""
        loop, actuator = asyncio.get_running_loop(), self._actuator
        if self._config.most_replicas < 2 or loop.time() < self._replicas_after:
            return False
        self._replicas_after = loop.time() + self._config.period_s
        on_their_way = actuator.moving | actuator.removing | actuator.activating.keys() | self._evicting
        surplus = [each for each in self._planner.surplus() if each[0] not in on_their_way]
        for model, group, why in surplus:
            record = self._history.add(model, "hibernate", group.name, why)
            _log.info("leaves a group", model=model, group=group.name, why=record.reason)
            tasks.spawn(self._quietly(actuator.let_go(model, group, record)), f"{model} leaves {group.name}")
        # One at a time, and not while a model waits for the room that it would take.
        plan = None
        if not surplus and not self._planner.waits() and self._replicating is None:
            plan = self._planner.replica(on_their_way)
        if plan is not None:
            self._replicating = tasks.spawn(self._quietly(self._bring_replica(plan)), f"replicate {plan.model}")
            self._replicating.add_done_callback(self._replicated)
        return bool(surplus) or plan is not None

    async def _bring_replica(self, plan: PlacementPlan) -> None:
        assert plan.group is not None
        record = self._history.add(plan.model, "replicate", plan.group.name, plan.reason, plan.candidates)
        _log.info("comes up on one group more", model=plan.model, group=plan.group.name, why=plan.reason)
        await self._carry_replica(plan, record)

    async def _carry_replica(
        self, plan: PlacementPlan, record: DecisionRecord, yields: Sequence[gpu_scheduler_pb2.Yield] = ()
    ) -> None:
        """Brings a model up on one group more. Returns when it is up, or could not come up."""
        assert plan.group is not None
        await self._actuator.activate(plan.model, plan.group, record, yields)
        if (under_way := self._actuator.activating.get(plan.model)) is not None:
            await asyncio.wait([under_way[1]])

    def _replicated(self, _: object) -> None:
        self._replicating = None

    def _rebalance(self) -> None:
        if self._planner.waits():  # moves would take room from a model that waits
            return
        # One migration at a time: each takes link bandwidth from models that serve.
        if self._actuator.activating or self._actuator.moving:
            return
        loop = asyncio.get_running_loop()
        began = loop.time()
        if began < self._moves_after:
            return
        moves = self._planner.moves()[:1]
        took = loop.time() - began
        self._moves_after = began + took + self._rest_after_moves_s(took)
        for verdict in moves:
            assert verdict.group is not None and verdict.source is not None
            record = self._history.add(verdict.model, "migrate", verdict.group.name, verdict.reason, verdict.candidates)
            tasks.spawn(self._quietly(self._move(verdict, record)), f"move {verdict.model}")

    async def _move(self, verdict: PlacementPlan, record) -> None:  # type: ignore[no-untyped-def]
        assert verdict.group is not None and verdict.source is not None
        yields = self.yields(verdict, record, f"part of moving {verdict.model}")
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
        """Weight of demand by itself in a group's pressure (`PlacementConfig.load_weight`)."""
        return self._config.load_weight

    def demands(self) -> dict[str, float]:
        return self._planner.demands()

    def rates(self) -> dict[str, float]:
        return self._planner.rates()


def _serves(group: HeardGroup, model: str) -> bool:
    """Whether the model is active on the group, by its last report."""
    resident = group.residents.get(model)
    return resident is not None and resident.residency == common_pb2.ACTIVE


def _leaves(group: HeardGroup, model: str) -> bool:
    """Whether the group is bringing the model down, by its last report."""
    resident = group.residents.get(model)
    return group.reachable and resident is not None and resident.residency == common_pb2.DRAINING


def _action(target: common_pb2.Residency) -> str:
    return "hibernate" if target == common_pb2.HIBERNATING else "go cold"
