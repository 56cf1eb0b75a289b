"""Placement's gRPC server: decode, await, encode."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any, TypeVar

from placement.actuation.drain import Drain
from placement.actuation.history import DecisionHistory
from placement.actuation.reconcile import EvictionOutcome, Reconciler
from placement.cluster.cluster import Cluster
from placement.cluster.loaders import Loaders
from placement.cluster.routes import Routes
from placement.view import cluster_view, drained_view, prospect_view
from protos import common_pb2, placement_pb2, placement_pb2_grpc
from services.errors import Unavailable, Unmet
from services.runtime import tasks

NAME = "prism.placement.v1.Placement"
T = TypeVar("T")
_GONE_S = 30.0
"""Seconds that a removed model may stay in catalogues and reports after all loaders were sent the removal. No other
part of placement settles what stands in its way: a node that was away is back with it, or lists it anew."""
_FORGOTTEN_S = 2.0


async def _to_its_end(work: Coroutine[Any, Any, T], name: str) -> T:
    """Runs an operator's call to its end even if the caller has gone: otherwise half of it would be left, a model on
    two groups say."""
    done: T = await asyncio.shield(tasks.spawn(work, name))
    return done


class PlacementServicer(placement_pb2_grpc.PlacementServicer):
    """The RPCs of protos/placement.proto."""

    def __init__(
        self,
        cluster: Cluster,
        reconciler: Reconciler,
        history: DecisionHistory,
        routes: Routes,
        loaders: Loaders,
        drain: Drain,
        gone_s: float = _GONE_S,
        forgotten_s: float = _FORGOTTEN_S,
    ) -> None:
        self._gone_s = gone_s
        self._forgotten_s = forgotten_s
        self._cluster = cluster
        self._reconciler = reconciler
        self._history = history
        self._routes = routes
        self._loaders = loaders
        self._drain = drain

    async def WatchRoutes(self, request: placement_pb2.WatchRoutesRequest, context: Any) -> Any:
        async for routes in self._routes.follow():
            yield routes

    async def Activate(self, request: placement_pb2.ActivateRequest, context: Any) -> placement_pb2.ActivateResponse:
        adapter = self._cluster.adapters.get(request.model)
        if adapter is not None and adapter.error:
            raise Unmet(f"{request.model}: {adapter.error}")
        group = await self._reconciler.activate(request.model if adapter is None else adapter.model.adapter.base)
        return placement_pb2.ActivateResponse(place=placement_pb2.Place(group=group.name, address=group.address))

    async def Explain(self, request: placement_pb2.ExplainRequest, context: Any) -> placement_pb2.ExplainResponse:
        adapter = self._cluster.adapters.get(request.model)
        model = request.model if adapter is None else adapter.model.adapter.base
        answer = placement_pb2.ExplainResponse(decisions=self._history.last(model, request.limit))
        prospect = self._reconciler.prospect(model) if model else None
        if prospect is not None:
            answer.prospect.CopyFrom(prospect_view(*prospect))
        answer.kept = self._reconciler.keeps(model)
        return answer

    async def AddModel(self, request: placement_pb2.AddModelRequest, context: Any) -> placement_pb2.AddModelResponse:
        seen = await self._loaders.inspect(request.model)
        self._check_fits(seen)
        if request.check_only:
            return placement_pb2.AddModelResponse(model=seen)
        spec = await self._loaders.add(request.model)
        await self._cluster.until(
            lambda: (entry := self._cluster.listed(spec.name)) is not None and entry.model == spec
        )
        await self._without_error(spec.name)
        return placement_pb2.AddModelResponse(model=spec)

    def _check_fits(self, spec: common_pb2.ModelSpec) -> None:
        """Raises Unmet with the arithmetic if no group could hold the model even alone; of an adapter, its base with
        the room for it."""
        base = self._cluster.entry(spec.adapter.base)
        if base is None:
            self._reconciler.check_fits(spec)
            return
        wanted = common_pb2.ModelSpec()
        wanted.CopyFrom(base.model)
        wanted.weights_bytes += spec.adapters.bytes - base.model.adapters.bytes
        self._reconciler.check_fits(wanted)

    async def _without_error(self, model: str) -> None:
        """Returns when no group has the model in error any more: their loaders tell them that its files were read
        afresh. Groups that do not hear of it delay the call by `_FORGOTTEN_S` at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._forgotten_s):
                await self._cluster.until(
                    lambda: all(there.residency != common_pb2.ERROR for _, there in self._cluster.residents(model))
                )

    async def RemoveModel(
        self, request: placement_pb2.RemoveModelRequest, context: Any
    ) -> placement_pb2.RemoveModelResponse:
        if request.name in self._cluster.adapters:
            await _to_its_end(self._remove_adapter(request.name), f"remove {request.name}")
            return placement_pb2.RemoveModelResponse()
        adapters = self._cluster.adapters_of(request.name)
        if adapters and not request.force:
            raise Unmet(f"{request.name} is the base of {', '.join(adapters)}: it is removed after them, or by force")

        async def remove() -> None:
            async with self._reconciler.removing(request.name, request.force):
                await self._loaders.remove(request.name)
                try:
                    async with asyncio.timeout(self._gone_s):
                        await self._cluster.until(
                            lambda: (
                                self._cluster.entry(request.name) is None
                                and not any(self._cluster.residents(request.name))
                            )
                        )
                except TimeoutError:
                    groups = ", ".join(group.name for group, _ in self._cluster.residents(request.name))
                    why = f"{groups} still has it" if groups else "a node's catalogue lists it"
                    raise Unavailable(
                        f"{request.name} is not gone after {self._gone_s:g} s: {why}; ask again"
                    ) from None

        await _to_its_end(remove(), f"remove {request.name}")
        return placement_pb2.RemoveModelResponse()

    async def _remove_adapter(self, name: str) -> None:
        """Takes an adapter out of all catalogues; groups, which hear of it too, have their engines let go of it."""
        await self._loaders.remove(name)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._gone_s):
                await self._cluster.until(lambda: name not in self._cluster.adapters)
                return
        raise Unavailable(f"{name} is not gone after {self._gone_s:g} s: a node's catalogue lists it; ask again")

    async def PinImage(self, request: placement_pb2.PinImageRequest, context: Any) -> placement_pb2.PinImageResponse:
        await self._loaders.pin_image(request.model, request.pinned)
        return placement_pb2.PinImageResponse()

    async def Evict(self, request: placement_pb2.EvictRequest, context: Any) -> placement_pb2.EvictResponse:
        async def evict() -> EvictionOutcome:
            evicted = await self._reconciler.evict(request.model, request.target)
            if request.target == common_pb2.ON_DISK:
                await self._loaders.drop_image(request.model)
            return evicted

        evicted = await _to_its_end(evict(), f"evict {request.model}")
        return placement_pb2.EvictResponse(residency=evicted.residency, reason=evicted.reason)

    async def Migrate(self, request: placement_pb2.MigrateRequest, context: Any) -> placement_pb2.MigrateResponse:
        work = self._reconciler.migrate(request.model, request.to_group)
        return placement_pb2.MigrateResponse(seconds=await _to_its_end(work, f"migrate {request.model}"))

    async def LeaveGroup(self, request: placement_pb2.LeaveGroupRequest, context: Any) -> placement_pb2.EvictResponse:
        group = self._cluster.known_group(request.group).name  # an empty name is that of no group
        work = self._reconciler.evict(request.model, request.target, group)
        evicted = await _to_its_end(work, f"{request.model} leaves {group}")
        return placement_pb2.EvictResponse(residency=evicted.residency, reason=evicted.reason)

    async def Replicate(self, request: placement_pb2.ReplicateRequest, context: Any) -> placement_pb2.ReplicateResponse:
        work = self._reconciler.replicate(request.model, request.to_group)
        group, seconds = await _to_its_end(work, f"replicate {request.model}")
        return placement_pb2.ReplicateResponse(group=group, seconds=seconds)

    async def DrainGroup(
        self, request: placement_pb2.DrainGroupRequest, context: Any
    ) -> placement_pb2.DrainGroupResponse:
        if request.undo:
            await self._drain.undo(request.group)
            return placement_pb2.DrainGroupResponse()
        left = await _to_its_end(self._drain.begin(request.group), f"drain {request.group}")
        return placement_pb2.DrainGroupResponse(models=map(drained_view, left))

    async def GetCluster(self, request: placement_pb2.GetClusterRequest, context: Any) -> placement_pb2.Cluster:
        reconciler = self._reconciler
        return cluster_view(self._cluster, reconciler.demands(), reconciler.rates(), reconciler.load_weight)
