"""The client of a gpu_scheduler, for other services."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence

import grpc

from protos import balloond_pb2, common_pb2, engine_pb2, gpu_scheduler_pb2, gpu_scheduler_pb2_grpc
from services.rpc import rpc
from services.rpc.status import from_rpc
from services.rpc.watch import follow_stream

Progressed = Callable[[gpu_scheduler_pb2.ResidencyProgress], None]


class GpuSchedulerClient:
    """The gpu_scheduler of one group. Errors are those of services.errors."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._channel = rpc.channel(address)
        self._stub = gpu_scheduler_pb2_grpc.GpuSchedulerStub(self._channel)

    async def close(self) -> None:
        await self._channel.close()

    async def set_residency(
        self,
        model: common_pb2.ModelSpec,
        target: common_pb2.Residency,
        reason: str,
        drain_ms: int = 0,
        on_progress: Progressed | None = None,
        yields: Sequence[gpu_scheduler_pb2.Yield] = (),
        successor: str = "",
        elsewhere: gpu_scheduler_pb2.Elsewhere | None = None,
    ) -> gpu_scheduler_pb2.ResidencyProgress:
        """Changes a model's residency. Returns the last message of the change: the target reached, or ERROR. Raises the
        error that refused it."""
        last = gpu_scheduler_pb2.ResidencyProgress()
        request = gpu_scheduler_pb2.SetResidencyRequest(
            model=model,
            target=target,
            reason=reason,
            drain_ms=drain_ms,
            yields=yields,
            successor=successor,
            elsewhere=elsewhere,
        )
        try:
            async for last in self._stub.SetResidency(request):
                if on_progress is not None:
                    on_progress(last)
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error) from None
        return last

    async def hold(self) -> AsyncGenerator[None, None]:
        """Holds a group that is stopping, until the iterator is closed. Raises the error that refused or ended it."""
        call = self._stub.Hold(gpu_scheduler_pb2.HoldRequest())
        try:
            async for _ in call:
                yield
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error) from None
        finally:
            call.cancel()

    def watch(
        self, figures_ms: Callable[[], int] = lambda: 0, heard: bool = False
    ) -> AsyncGenerator[gpu_scheduler_pb2.GroupState | None, None]:
        """Yields the group's state for ever; None each time the group was lost. `figures_ms`: least milliseconds
        between reports that differ in figures alone; called when a stream is opened. `heard`: as in `follow_stream`."""
        request = gpu_scheduler_pb2.WatchRequest
        return follow_stream(
            lambda: self._stub.Watch(request(figures_ms=figures_ms())), f"group at {self.address}", heard=heard
        )

    async def take_kv(
        self, model: str, generation: int, places: engine_pb2.KvPlaces
    ) -> gpu_scheduler_pb2.TakeKvResponse:
        request = gpu_scheduler_pb2.TakeKvRequest(model=model, generation=generation, places=places)
        try:
            return await self._stub.TakeKv(request)
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error) from None

    async def set_limit(self, model: str, bytes: int) -> balloond_pb2.SetLimitResponse:
        try:
            return await self._stub.SetLimit(gpu_scheduler_pb2.SetLimitRequest(model=model, bytes=bytes))
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error) from None

    async def set_drained(self, drained: bool) -> None:
        """Sets whether the group is drained: no model comes up there."""
        try:
            await self._stub.SetDrained(gpu_scheduler_pb2.SetDrainedRequest(drained=drained))
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error) from None

    async def state(self) -> gpu_scheduler_pb2.GroupState:
        """Returns the group's state now."""
        call = self._stub.Watch(gpu_scheduler_pb2.WatchRequest())
        try:
            state: gpu_scheduler_pb2.GroupState = await call.read()
            return state
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error) from None
        finally:
            call.cancel()

    async def inspect(self) -> gpu_scheduler_pb2.QueueState:
        try:
            return await self._stub.Inspect(gpu_scheduler_pb2.InspectRequest())
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error) from None
