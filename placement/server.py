"""gRPC of placement: decode, await, encode."""

from __future__ import annotations

from typing import Any

from loader.client import LoaderClient
from placement.cluster import Cluster
from placement.history import History
from placement.reconcile import Reconciler
from placement.view import cluster_view
from protos import placement_pb2, placement_pb2_grpc
from services.watch import Watched

NAME = "prism.placement.v1.Placement"


class PlacementServicer(placement_pb2_grpc.PlacementServicer):
    """See protos/placement.proto."""

    def __init__(
        self,
        cluster: Cluster,
        reconciler: Reconciler,
        history: History,
        routes: Watched[placement_pb2.Routes],
        loader: LoaderClient,
    ) -> None:
        self._cluster = cluster
        self._reconciler = reconciler
        self._history = history
        self._routes = routes
        self._loader = loader

    async def WatchRoutes(self, request: placement_pb2.WatchRoutesRequest, context: Any) -> Any:
        async for routes in self._routes.follow():
            yield routes

    async def Activate(self, request: placement_pb2.ActivateRequest, context: Any) -> placement_pb2.ActivateResponse:
        group = await self._reconciler.activate(request.model)
        return placement_pb2.ActivateResponse(place=placement_pb2.Place(group=group.name, address=group.address))

    async def Explain(self, request: placement_pb2.ExplainRequest, context: Any) -> placement_pb2.ExplainResponse:
        return placement_pb2.ExplainResponse(decisions=self._history.last(request.model, request.limit))

    async def AddModel(self, request: placement_pb2.AddModelRequest, context: Any) -> placement_pb2.AddModelResponse:
        spec = await self._loader.inspect(request.name, request.path)
        self._reconciler.check_fits(spec)
        return placement_pb2.AddModelResponse(
            model=await self._loader.add(
                request.name, request.path, default_slo=request.default_slo, pinned=request.pinned
            )
        )

    async def RemoveModel(
        self, request: placement_pb2.RemoveModelRequest, context: Any
    ) -> placement_pb2.RemoveModelResponse:
        await self._reconciler.bring_down_everywhere(request.name, "removed")
        await self._loader.remove(request.name)
        return placement_pb2.RemoveModelResponse()

    async def Evict(self, request: placement_pb2.EvictRequest, context: Any) -> placement_pb2.EvictResponse:
        await self._reconciler.evict(request.model, request.target)
        return placement_pb2.EvictResponse()

    async def Migrate(self, request: placement_pb2.MigrateRequest, context: Any) -> placement_pb2.MigrateResponse:
        return placement_pb2.MigrateResponse(seconds=await self._reconciler.migrate(request.model, request.to_group))

    async def GetCluster(self, request: placement_pb2.GetClusterRequest, context: Any) -> placement_pb2.Cluster:
        return cluster_view(self._cluster, self._reconciler.demands(), self._reconciler.rates())
