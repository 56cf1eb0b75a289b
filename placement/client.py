"""Placement's client, for other services and operators' tools."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from typing import TypeVar

import grpc

from protos import common_pb2, placement_pb2, placement_pb2_grpc
from services.errors import NotFound, Unmet
from services.rpc import rpc
from services.rpc.status import from_rpc
from services.rpc.watch import follow_stream

T = TypeVar("T")
_AGAIN_S = 0.05


class PlacementClient:
    """A client of placement. Its methods raise the errors of `services.errors`."""

    def __init__(self, address: str, whom: str = "") -> None:
        """`whom`: as `from_rpc` takes it; for a client whose errors go to those who should see no address."""
        self._whom = whom
        self._channel = rpc.channel(address)
        self._stub = placement_pb2_grpc.PlacementStub(self._channel)

    async def close(self) -> None:
        await self._channel.close()

    def watch_routes(self) -> AsyncIterator[placement_pb2.Routes | None]:
        """All routes on every change, for ever; yields None each time the connection to placement is lost."""
        return follow_stream(lambda: self._stub.WatchRoutes(placement_pb2.WatchRoutesRequest()), "routes")

    async def routes(self) -> placement_pb2.Routes:
        """All routes as they are now."""
        call = self._stub.WatchRoutes(placement_pb2.WatchRoutesRequest())
        try:
            routes: placement_pb2.Routes = await self._ask(call.read())
            return routes
        finally:
            call.cancel()

    async def activate(self, model: str, ttft_left_ms: int = 0) -> placement_pb2.Place:
        request = placement_pb2.ActivateRequest(model=model, ttft_left_ms=ttft_left_ms)
        return (await self._ask(self._stub.Activate(request))).place

    async def until_active(self, model: str) -> str:
        """Name of the group on which a model that was activated is active, once it is. Raises Unmet if its activation
        has failed, NotFound if the model was removed meanwhile."""
        was_waking = False
        async for routes in self.watch_routes():
            if routes is None:
                continue
            route = next((route for route in routes.routes if route.model.name == model), None)
            if route is None:
                raise NotFound(f"{model} was removed while it woke")
            if route.residency == common_pb2.ACTIVE:
                return route.places[0].group  # type: ignore[no-any-return]
            if route.residency == common_pb2.ERROR:
                raise Unmet(f"{model}: {route.error}")
            if was_waking and route.residency != common_pb2.WAKING:
                outcome = await self._outcome(model)
                if not outcome.startswith("done"):
                    raise Unmet(f"{model} did not come up: {outcome}")
            was_waking = was_waking or route.residency == common_pb2.WAKING
        raise AssertionError("routes are followed for ever")

    async def _outcome(self, model: str) -> str:
        """Outcome of the last decision about the model, once it has one: routes change a moment before."""
        while True:
            (last,) = await self.explain(model, 1)
            if last.outcome != "under way":
                return last.outcome  # type: ignore[no-any-return]
            await asyncio.sleep(_AGAIN_S)

    async def explain(self, model: str = "", limit: int = 0) -> list[placement_pb2.Decision]:
        return list((await self.explanation(model, limit)).decisions)

    async def explanation(self, model: str, limit: int = 0) -> placement_pb2.ExplainResponse:
        """The last `limit` decisions about the model, and what a request for it would meet."""
        request = placement_pb2.ExplainRequest(model=model, limit=limit)
        answer: placement_pb2.ExplainResponse = await self._ask(self._stub.Explain(request))
        return answer

    async def add_model(self, listing: common_pb2.ModelListing, *, check_only: bool = False) -> common_pb2.ModelSpec:
        """Adds a model, and returns its spec; `check_only`: adds nothing. Raises Unmet with the checkpoint's fault or
        the arithmetic, Exists, Invalid."""
        request = placement_pb2.AddModelRequest(model=listing, check_only=check_only)
        return (await self._ask(self._stub.AddModel(request))).model

    async def remove_model(self, name: str, force: bool = False) -> None:
        """Removes a model. Returns when its engines have released it. Raises NotFound, Conflict, and without `force`
        Unmet for a model that is pinned or has requests."""
        await self._ask(self._stub.RemoveModel(placement_pb2.RemoveModelRequest(name=name, force=force)))

    async def pin(self, model: str, pinned: bool) -> None:
        """Pins a model's image in host memory, or takes that back. Idempotent. Raises NotFound, Refused with the
        arithmetic, and Unmet for a model that is listed as pinned."""
        await self._ask(self._stub.PinImage(placement_pb2.PinImageRequest(model=model, pinned=pinned)))

    async def evict(self, model: str, target: common_pb2.Residency) -> common_pb2.Residency:
        """Brings a model down, and returns the residency that it has then: a model without an image can neither
        hibernate nor be cold."""
        return (await self.eviction(model, target)).residency  # type: ignore[no-any-return]

    async def eviction(self, model: str, target: common_pb2.Residency, group: str = "") -> placement_pb2.EvictResponse:
        """Brings a model down, on `group` alone if that is given, and returns its residency there, with the reason if
        that is lower than `target`."""
        answer: placement_pb2.EvictResponse
        if group:  # a call of its own: a placement that does not know it may not bring the model down everywhere
            leave = placement_pb2.LeaveGroupRequest(model=model, group=group, target=target)
            answer = await self._ask(self._stub.LeaveGroup(leave))
        else:
            answer = await self._ask(self._stub.Evict(placement_pb2.EvictRequest(model=model, target=target)))
        return answer

    async def migrate(self, model: str, to_group: str) -> float:
        """Moves a model, and returns the seconds that it took."""
        answer = await self._ask(self._stub.Migrate(placement_pb2.MigrateRequest(model=model, to_group=to_group)))
        return float(answer.seconds)

    async def replicate(self, model: str, to_group: str = "") -> tuple[str, float]:
        """Brings an active model up on one group more, placement's choice if none is given. Returns its name and the
        seconds that it took. Raises NotFound, Unmet, Conflict, Refused."""
        request = placement_pb2.ReplicateRequest(model=model, to_group=to_group)
        answer = await self._ask(self._stub.Replicate(request))
        return answer.group, float(answer.seconds)

    async def drain(self, group: str) -> list[placement_pb2.Drained]:
        """Empties a group, and returns the outcome for each model there. Nothing comes up there until `undo_drain`.
        Raises NotFound, Unavailable."""
        answer = await self._ask(self._stub.DrainGroup(placement_pb2.DrainGroupRequest(group=group)))
        return list(answer.models)

    async def undo_drain(self, group: str) -> None:
        await self._ask(self._stub.DrainGroup(placement_pb2.DrainGroupRequest(group=group, undo=True)))

    async def cluster(self) -> placement_pb2.Cluster:
        cluster: placement_pb2.Cluster = await self._ask(self._stub.GetCluster(placement_pb2.GetClusterRequest()))
        return cluster

    async def _ask(self, call: Awaitable[T]) -> T:
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error, self._whom) from None
