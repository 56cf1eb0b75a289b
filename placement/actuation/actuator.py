"""Carries out placement's decisions at the groups, and records each with its outcome."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence

from placement.actuation.history import DecisionRecord
from placement.cluster.cluster import TAKES_REQUESTS, Cluster, HeardGroup
from protos import common_pb2, gpu_scheduler_pb2
from services.errors import NotFound, PrismError, Unmet
from services.runtime import tasks
from services.telemetry import log

_log = log.get(__name__)
_SILENT_S = 0.5
"""Seconds that a group's report may lag behind what the group did; reports come 0.1 s apart at least."""


class Actuator:
    """Orders residencies at gpu_schedulers. Each model has one activation, eviction or move at a time."""

    def __init__(self, cluster: Cluster, drain_ms: int, *, move_kv: bool = True, silent_s: float = _SILENT_S) -> None:
        self._silent_s = silent_s
        self._cluster = cluster
        self._move_kv = move_kv
        self._drain_ms = drain_ms
        self.activating: dict[str, tuple[HeardGroup, asyncio.Task[None]]] = {}
        self.leaving: dict[str, str] = {}
        """Model -> name of the group that it is leaving; its route prefers its other groups."""
        self.moving: set[str] = set()
        self.overdue: set[tuple[str, str]] = set()
        """(address of a group's client, model) of models that their group did not release as it was told: those that
        moved."""
        self.making_way: list[str] = []
        """Names of models that are leaving their group for one that comes up there. A model that makes way for several
        is listed once for each."""
        self._targets: dict[str, HeardGroup] = {}
        """Model -> target group of a move, until the model is active there."""
        self._came: dict[str, tuple[HeardGroup, float]] = {}
        """Model -> (group that it came up on, monotonic second until which the group's reports may not show it yet)."""
        self._went: dict[str, tuple[HeardGroup, float]] = {}
        """Model -> (group that it went down on, monotonic second until which the group's reports may still show it)."""
        self.removing: set[str] = set()
        """Names of models that are being removed: they have no route and come up nowhere."""

    def on_their_way(self) -> dict[str, HeardGroup]:
        """Models whose activation was ordered and that their groups' reports do not show yet, with these groups."""
        if self._came:
            now = time.monotonic()
            self._came = {
                model: (group, until)
                for model, (group, until) in self._came.items()
                if now < until and not _takes_requests(group, model)
            }
        came = {model: group for model, (group, _) in self._came.items()}
        return came | self._targets | {model: group for model, (group, _) in self.activating.items()}

    def comes_up(self, model: str) -> HeardGroup | None:
        """The group on which the model is coming up and is not active yet, by the group's report; None if there is
        none."""
        group, _ = self.activating.get(model, (None, None))
        return None if group is None or _is_active(group, model) else group

    def has_gone_down(self, model: str, group: HeardGroup) -> bool:
        """Whether the model went down on the group less than `silent_s` ago, so that the group's report may still show
        it awake."""
        where, until = self._went.get(model, (None, 0.0))
        return where is group and time.monotonic() < until

    def spec(self, model: str) -> common_pb2.ModelSpec:
        entry = self._cluster.entry(model)
        if (adapter := self._cluster.adapters.get(model)) is not None:
            raise Unmet(f"{model} is an adapter of {adapter.model.adapter.base}, and is where that is")
        if entry is None or model in self.removing:
            raise NotFound(f"no model {model!r} in the catalogue")
        if entry.error:
            raise Unmet(f"{model}: {entry.error}")
        return entry.model

    async def activate(
        self, model: str, group: HeardGroup, record: DecisionRecord, yields: Iterable[gpu_scheduler_pb2.Yield] = ()
    ) -> None:
        """Brings a model up. Returns as soon as the group takes requests for it; the activation goes on. Raises the
        group's error if it refuses."""
        spec = self.spec(model)
        self._went.pop(model, None)
        yields = list(yields)
        accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        accepted.add_done_callback(lambda f: f.cancelled() or f.exception())

        def progressed(message: gpu_scheduler_pb2.ResidencyProgress) -> None:
            if not accepted.done() and message.residency in (common_pb2.WAKING, common_pb2.ACTIVE):
                accepted.set_result(None)

        async def carry_out() -> None:
            try:
                with self._making_way(yields):
                    reached = await self._recorded(
                        record,
                        group.client.set_residency(
                            spec,
                            common_pb2.ACTIVE,
                            record.reason,
                            on_progress=progressed,
                            yields=yields,
                            elsewhere=self._measured(model),
                        ),
                    )
                if reached.residency == common_pb2.ACTIVE:
                    self._came[model] = group, time.monotonic() + self._silent_s
                if not accepted.done():
                    accepted.set_result(None)
            except PrismError as error:
                if not accepted.done():
                    accepted.set_exception(error)
            finally:
                self.activating.pop(model, None)
                self._cluster.changed(model)

        task = tasks.spawn(carry_out(), f"activate {model}")
        self.activating[model] = (group, task)
        await asyncio.shield(accepted)

    async def bring_down(
        self,
        spec: common_pb2.ModelSpec,
        group: HeardGroup,
        target: common_pb2.Residency,
        record: DecisionRecord,
        drain_ms: int = 0,
        successor: str = "",
    ) -> gpu_scheduler_pb2.ResidencyProgress:
        """Brings a model down on a group to HIBERNATING, COLD or ON_DISK, and returns the group's last progress
        message. `successor`: address of the group that takes the KV of running requests; empty: they end there, or are
        computed again. Raises the group's error if it refuses."""
        try:
            work = group.client.set_residency(spec, target, record.reason, drain_ms=drain_ms, successor=successor)
            reached = await self._recorded(record, work)
            now = time.monotonic()
            self._went = {name: went for name, went in self._went.items() if now < went[1]}
            self._went[spec.name] = group, now + self._silent_s
            return reached
        finally:
            self._cluster.changed(spec.name)

    async def remove(self, spec: common_pb2.ModelSpec, record: Callable[[HeardGroup], DecisionRecord]) -> None:
        """Brings a model down on every group that has it, once its running requests have finished or the drain time is
        over. `record` makes the history's entry for each group. Raises the group's error if one refuses."""
        groups = [group for group, _ in self._cluster.residents(spec.name)]
        under_way = self.activating.get(spec.name)
        if under_way is not None:
            await asyncio.wait([under_way[1]])
            groups += [group for group in (under_way[0],) if group not in groups]
        down = (self.bring_down(spec, group, common_pb2.ON_DISK, record(group), self._drain_ms) for group in groups)
        for outcome in await asyncio.gather(*down, return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome

    async def migrate(
        self,
        model: str,
        source: HeardGroup,
        target: HeardGroup,
        record: DecisionRecord,
        yields: Sequence[gpu_scheduler_pb2.Yield] = (),
    ) -> float:
        """Moves a model, and returns the seconds that it took. The target is prepared, with `yields` making way for it,
        while the source serves; then the route turns; then the source hands over its running requests, with their KV if
        both groups are on one node, or finishes them, and releases the model. Raises the error of the group that
        refused: the source then serves on, unless it was the source that did not release the model; in that case it is
        asked again (`placement/actuation/deduplicate.py`)."""
        if model in self.moving:
            raise Unmet(f"{model} is moving already")
        if (group := self.comes_up(model)) is not None:
            raise Unmet(f"{model} is coming up on {group.name}")
        began = time.monotonic()
        before = {group for group, _ in self._cluster.residents(model)}
        self.moving.add(model)
        try:
            spec = self.spec(model)
            if not _is_active(target, model):
                await self._prepare(spec, target, record, yields)
            self.leaving[model] = source.name
            self._cluster.changed(model)
            await source.client.set_residency(
                spec,
                common_pb2.COLD,
                record.reason,
                drain_ms=self._drain_ms,
                successor=self.successor(source, target),
            )
            seconds = time.monotonic() - began
            record.done(seconds)
            await self._reported(source, model)
            return seconds
        except PrismError as error:
            record.failed(error)
            if model in self.leaving:
                self._cluster.doubt(source, model)
                self.overdue.add((source.client.address, model))
            raise
        finally:
            for group, _ in self._cluster.residents(model):
                if group is not target and group not in before:  # it was brought up there after the source had gone
                    self._cluster.doubt(group, model)
            self.leaving.pop(model, None)
            self.moving.discard(model)
            self._cluster.changed(model)

    async def _prepare(
        self,
        spec: common_pb2.ModelSpec,
        target: HeardGroup,
        record: DecisionRecord,
        yields: Sequence[gpu_scheduler_pb2.Yield],
    ) -> None:
        """Brings a model up on the target of its move. Raises Unmet, and the group's error if it refuses."""
        self._targets[spec.name] = target
        try:
            with self._making_way(yields):
                last = await target.client.set_residency(
                    spec, common_pb2.ACTIVE, record.reason, yields=yields, elsewhere=self._measured(spec.name)
                )
        finally:
            del self._targets[spec.name]
        if last.residency != common_pb2.ACTIVE:
            raise Unmet(f"{spec.name} did not come up on {target.name}: {last.reason}")
        self._came[spec.name] = target, time.monotonic() + self._silent_s

    async def let_go(
        self,
        model: str,
        group: HeardGroup,
        record: DecisionRecord,
        target: common_pb2.Residency = common_pb2.HIBERNATING,
    ) -> gpu_scheduler_pb2.ResidencyProgress:
        """Brings a model down to `target` on one of the groups that serve it, and returns the group's last progress
        message. Requests go to the others from now on; running ones go on at one of them with their KV if it is on the
        same node, else they may finish within the time of a drain. Raises the group's error if it refuses."""
        if model in self.moving:
            raise Unmet(f"{model} is moving already")
        if (coming := self.comes_up(model)) is group:
            raise Unmet(f"{model} is coming up on {coming.name}")
        self.moving.add(model)
        self.leaving[model] = group.name
        try:
            self._cluster.changed(model)
            successor = self.successor(group, self.beside(group, model))
            reached = await self.bring_down(self.spec(model), group, target, record, self._drain_ms, successor)
            await self._reported(group, model)
            return reached
        finally:
            self.leaving.pop(model, None)
            self.moving.discard(model)
            self._cluster.changed(model)

    async def _reported(self, group: HeardGroup, model: str) -> None:
        """Returns once the group reports that the model takes no requests there any more, and after `silent_s` at the
        latest: until then, routes would lead there again."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._silent_s):
                await self._cluster.until(lambda: not group.reachable or not _takes_requests(group, model))

    def beside(self, group: HeardGroup, model: str) -> HeardGroup | None:
        """The other group that serves the model and is to go on doing so: one of the same node if there is one, since
        running requests take their KV along there, and of such the one with the fewest of its requests. None if there
        is none."""
        found = [
            (other.node != group.node, there.waiting + there.running, other.name, other)
            for other, there in self._cluster.residents(model)
            if other is not group and there.residency == common_pb2.ACTIVE and not there.outdated
            if not other.drained and not other.state.stopping
        ]
        return min(found)[-1] if found else None

    def successor(self, source: HeardGroup, target: HeardGroup | None) -> str:
        """Address of the group `target` if it can take the KV of running requests of the group `source`; else empty:
        KV stays on its node."""
        if target is None or not self._move_kv or not source.node or source.node != target.node:
            return ""
        return target.address

    @contextlib.contextmanager
    def _making_way(self, yields: Sequence[gpu_scheduler_pb2.Yield]) -> Iterator[None]:
        self.making_way += [each.model for each in yields]
        try:
            yield
        finally:
            for each in yields:
                self.making_way.remove(each.model)

    def _measured(self, model: str) -> gpu_scheduler_pb2.Elsewhere:
        measured = self._cluster.measured(model)
        return gpu_scheduler_pb2.Elsewhere(
            weights_bytes=measured.weights, graph_bytes=measured.graphs, quota_bytes=measured.quota
        )

    @staticmethod
    async def _recorded(
        record: DecisionRecord, work: Awaitable[gpu_scheduler_pb2.ResidencyProgress]
    ) -> gpu_scheduler_pb2.ResidencyProgress:
        began = time.monotonic()
        try:
            last = await work
        except PrismError as error:
            record.failed(error)
            _log.warning("not carried out", model=record.model, action=record.action, why=str(error))
            raise
        if last.residency == common_pb2.ERROR:
            record.failed(last.reason)
        else:
            record.done(time.monotonic() - began)
        return last


def _is_active(group: HeardGroup, model: str) -> bool:
    resident = group.residents.get(model)
    return resident is not None and resident.residency == common_pb2.ACTIVE


def _takes_requests(group: HeardGroup, model: str) -> bool:
    resident = group.residents.get(model)
    return resident is not None and resident.residency in TAKES_REQUESTS
