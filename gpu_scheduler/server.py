"""The gRPC methods of a gpu_scheduler: decode, await, encode."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import Any

from gpu_scheduler.memory.devices import Devices, share
from gpu_scheduler.queue.dispatcher import Dispatcher
from gpu_scheduler.queue.intake import Intake
from gpu_scheduler.queue.streams import GatewayStream, PulledStream
from gpu_scheduler.report.report import GroupReport
from gpu_scheduler.report.report_rate import LONGEST_S, least_s, telling
from gpu_scheduler.residency.graceful_exit import GracefulExit
from gpu_scheduler.residency.handover import Handover
from gpu_scheduler.residency.residency import ResidencyController
from gpu_scheduler.residents import Residents
from protos import balloond_pb2, gpu_scheduler_pb2, gpu_scheduler_pb2_grpc
from services.errors import Invalid, NotFound, Unmet
from services.rpc.watch import Watched, follow_sparingly
from services.runtime import tasks

NAME = "prism.gpu_scheduler.v1.GpuScheduler"


class GpuSchedulerServicer(gpu_scheduler_pb2_grpc.GpuSchedulerServicer):
    """The service of protos/gpu_scheduler.proto, which describes the methods."""

    def __init__(
        self,
        devices: Devices | None,
        intake: Intake,
        dispatcher: Dispatcher,
        residents: Residents,
        residency: ResidencyController,
        handover: Handover,
        report: GroupReport,
        leaving: GracefulExit,
        changes: Watched[None],
    ) -> None:
        self._devices = devices
        self._intake = intake
        self._dispatcher = dispatcher
        self._residents = residents
        self._residency = residency
        self._handover = handover
        self._report = report
        self._leaving = leaving
        self._changes = changes
        self._numbers = itertools.count(1)

    async def Serve(self, requests: AsyncIterator[gpu_scheduler_pb2.FromGateway], context: Any) -> Any:
        stream = PulledStream(next(self._numbers))
        # A message that cannot be read ends the stream: its requests could not be cancelled any more.
        reading = tasks.spawn(
            self._read(requests, stream), f"gateway stream {stream.number}", lambda failure: stream.close()
        )
        try:
            async for message in stream.messages():
                yield message
            if reading.done():
                reading.result()
        finally:
            self._intake.cancel_stream(stream)
            await tasks.cancel(reading)

    async def _read(self, requests: AsyncIterator[gpu_scheduler_pb2.FromGateway], stream: GatewayStream) -> None:
        async for message in requests:
            self._intake.take(message, stream)
        stream.close()

    async def SetResidency(self, request: gpu_scheduler_pb2.SetResidencyRequest, context: Any) -> Any:
        change = self._residency.begin(
            request.model,
            request.target,
            request.reason,
            request.drain_ms,
            request.yields,
            request.successor,
            request.elsewhere,
        )
        async for message in self._residency.follow(change):
            yield message

    async def TakeKv(self, request: gpu_scheduler_pb2.TakeKvRequest, context: Any) -> gpu_scheduler_pb2.TakeKvResponse:
        return await self._handover.take(request)

    async def SetLimit(self, request: gpu_scheduler_pb2.SetLimitRequest, context: Any) -> balloond_pb2.SetLimitResponse:
        resident = self._residents.get(request.model)
        if resident is None:
            raise NotFound(f"{request.model} is not on this group")
        if self._devices is None:
            raise Unmet("this group has no balloond")
        floor = resident.spec.floor_bytes
        if 0 <= request.bytes < floor:
            # balloond knows the floor only while the model is up. Of one that sleeps it would take the limit, which
            # would be raised without a word when the model wakes.
            raise Invalid(f"a limit of {request.bytes:,} bytes is below the floor of {request.model}, {floor:,} bytes")
        on_each = request.bytes if request.bytes < 0 else share(request.bytes, resident.spec)
        answer = await self._devices.set_limit(request.model, on_each)
        if request.bytes < 0:
            self._residents.operator_limits.pop(request.model, None)
        else:
            self._residents.operator_limits[request.model] = request.bytes
        return answer

    async def SetDrained(
        self, request: gpu_scheduler_pb2.SetDrainedRequest, context: Any
    ) -> gpu_scheduler_pb2.SetDrainedResponse:
        self._residents.drained = request.drained
        self._changes.set(None)
        return gpu_scheduler_pb2.SetDrainedResponse()

    async def Hold(self, request: gpu_scheduler_pb2.HoldRequest, context: Any) -> Any:
        with self._leaving.held():
            yield gpu_scheduler_pb2.HoldResponse()
            await asyncio.Event().wait()  # until the caller ends it

    async def Watch(self, request: gpu_scheduler_pb2.WatchRequest, context: Any) -> Any:
        figures_s = request.figures_ms / 1e3
        states = follow_sparingly(self._changes, self._report.build, telling(figures_s), least_s(figures_s), LONGEST_S)
        with self._leaving.watched():
            async for state in states:
                yield state

    async def Inspect(self, request: gpu_scheduler_pb2.InspectRequest, context: Any) -> gpu_scheduler_pb2.QueueState:
        return self._dispatcher.queue_state()
