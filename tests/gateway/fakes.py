"""Placement and gpu_schedulers that do what a test tells them, behind their real contracts on Unix sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Any

import grpc

from protos import (
    common_pb2,
    gpu_scheduler_pb2,
    gpu_scheduler_pb2_grpc,
    placement_pb2,
    placement_pb2_grpc,
)
from services.errors import Conflict
from services.ipc import sockets
from services.ipc.framing import FramedChannel
from services.rpc.watch import Watched
from testing.patience import PATIENCE_S

Script = Callable[["Running"], Awaitable[None]]


class Running:
    """One request at a fake group, and what a script can do with it."""

    def __init__(self, submit: gpu_scheduler_pb2.Submit, send: Callable[[common_pb2.TokenChunk], None]) -> None:
        self.submit = submit
        self.cancelled = asyncio.Event()
        self._send = send

    def tokens(self, ids: Iterable[int], **more: Any) -> None:
        self._send(common_pb2.TokenChunk(request_id=self.submit.request_id, token_ids=list(ids), **more))

    def finish(self, finish: common_pb2.Finish, error: str = "", ids: Iterable[int] = ()) -> None:
        self.tokens(ids, finish=finish, error=error)


class Output:
    """A script: says `ids` one a message, from where the request was taken up, and finishes as an engine does."""

    def __init__(self, ids: list[int], *, end: bool = True) -> None:
        self.ids = ids
        self.end = end

    async def __call__(self, running: Running) -> None:
        submit = running.submit
        rest = self.ids[submit.resumed_tokens :]
        most = submit.sampling.max_new_tokens
        for index, token in enumerate(rest[:most]):
            running.tokens([token])
            await asyncio.sleep(0)
            if index + 1 == most:
                running.finish(common_pb2.LENGTH)
                return
        if self.end:
            running.finish(common_pb2.STOP)


class FakeGroup(gpu_scheduler_pb2_grpc.GpuSchedulerServicer):
    """A gpu_scheduler at a path, on this node, or at a TCP address, over gRPC. `script` runs for each request that
    comes."""

    def __init__(self, where: str, script: Script) -> None:
        self._grpc = ":" in where
        self.address = where if self._grpc else f"unix:{where}"
        self.script = script
        self.requests: list[Running] = []
        self.streams = 0
        self.outlook = gpu_scheduler_pb2.Outlook()
        """Told to a gateway that begins to follow it."""
        self.followed: list[bool] = []
        self._arrival = asyncio.Condition()
        self._server: Any = None
        self._channels: set[FramedChannel[gpu_scheduler_pb2.FromGateway]] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        if self._grpc:
            self._server = grpc.aio.server()
            gpu_scheduler_pb2_grpc.add_GpuSchedulerServicer_to_server(self, self._server)
            self.address = f"127.0.0.1:{self._server.add_insecure_port(self.address)}"
            await self._server.start()
        else:
            path = sockets.stream_path(self.address)
            assert path is not None
            sockets.clear_stale(path)
            self._server = await asyncio.get_running_loop().create_unix_server(self._accept, path)

    async def die(self) -> None:
        """At once, as by a kill: streams break."""
        for task in self._tasks:
            task.cancel()
        if self._grpc:
            await self._server.stop(None)
            return
        self._server.close()
        for channel in list(self._channels):
            channel.close()

    async def arrived(self, count: int) -> Running:
        """Waits for the `count`-th request (from 1)."""
        async with self._arrival:
            await self._arrival.wait_for(lambda: len(self.requests) >= count)
        return self.requests[count - 1]

    def _accept(self) -> asyncio.Protocol:
        self.streams += 1
        stream = _FakeStream(self, lambda message: channel.send(message))
        channel = FramedChannel(gpu_scheduler_pb2.FromGateway, stream.take, lambda: self._channels.discard(channel))
        self._channels.add(channel)
        return channel

    async def Serve(self, messages: AsyncIterator[gpu_scheduler_pb2.FromGateway], context: Any) -> Any:
        self.streams += 1
        outgoing: asyncio.Queue[gpu_scheduler_pb2.ToGateway] = asyncio.Queue()
        stream = _FakeStream(self, outgoing.put_nowait)

        async def read() -> None:
            async for message in messages:
                stream.take(message)

        self.spawn(read())
        while True:
            message = await outgoing.get()
            while not outgoing.empty():
                message.MergeFrom(outgoing.get_nowait())
            yield message

    async def run(self, running: Running) -> None:
        async with self._arrival:
            self.requests.append(running)
            self._arrival.notify_all()
        await self.script(running)

    def spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _FakeStream:
    """What one gateway's stream has open."""

    def __init__(self, group: FakeGroup, send: Callable[[gpu_scheduler_pb2.ToGateway], None]) -> None:
        self._group = group
        self._send = send
        self._open: dict[str, Running] = {}

    def _chunk(self, chunk: common_pb2.TokenChunk) -> None:
        self._send(gpu_scheduler_pb2.ToGateway(chunks=[chunk]))

    def take(self, message: gpu_scheduler_pb2.FromGateway) -> None:
        if message.WhichOneof("message") == "follow_outlook":
            self._group.followed.append(message.follow_outlook.follow)
            self._send(gpu_scheduler_pb2.ToGateway(outlook=self._group.outlook))
            return
        if message.WhichOneof("message") == "cancel":
            running = self._open.get(message.cancel.request_id)
            if running is not None:
                running.cancelled.set()
            return
        running = self._open[message.submit.request_id] = Running(message.submit, self._chunk)
        self._group.spawn(self._group.run(running))


class FakePlacement(placement_pb2_grpc.PlacementServicer):
    """Publishes routes; answers Activate with what `activate` returns or raises, and who looks at the cluster with
    `cluster` and `decisions`."""

    def __init__(self, path: str) -> None:
        self.address = f"unix:{path}"
        self.routes: Watched[list[placement_pb2.Route]] = Watched([])
        self.activations: list[placement_pb2.ActivateRequest] = []
        self._activated = asyncio.Condition()
        self.activate: Callable[[placement_pb2.ActivateRequest], Awaitable[placement_pb2.Place]] | None = None
        self.refusal: tuple[grpc.StatusCode, str] | None = None
        self.evict: Callable[[placement_pb2.EvictRequest], Awaitable[placement_pb2.EvictResponse]] | None = None
        self.cluster = placement_pb2.Cluster()
        self.decisions: list[placement_pb2.Decision] = []
        self.steered: list[
            placement_pb2.EvictRequest
            | placement_pb2.LeaveGroupRequest
            | placement_pb2.MigrateRequest
            | placement_pb2.ReplicateRequest
        ] = []
        """What operators asked for."""
        self.looks = 0
        """How often the cluster was asked for."""
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        self._server = grpc.aio.server()
        placement_pb2_grpc.add_PlacementServicer_to_server(self, self._server)
        self._server.add_insecure_port(self.address)
        await self._server.start()

    async def die(self) -> None:
        assert self._server is not None
        await self._server.stop(None)

    async def activated(self, count: int) -> None:
        """Until so many activations have been requested."""
        async with asyncio.timeout(PATIENCE_S), self._activated:
            await self._activated.wait_for(lambda: len(self.activations) >= count)

    async def WatchRoutes(self, request: Any, context: Any) -> Any:
        async for routes in self.routes.follow():
            yield placement_pb2.Routes(revision=self.routes.revision, routes=routes)

    async def Activate(self, request: placement_pb2.ActivateRequest, context: Any) -> placement_pb2.ActivateResponse:
        async with self._activated:
            self.activations.append(request)
            self._activated.notify_all()
        if self.refusal is not None:
            await context.abort(*self.refusal)
        assert self.activate is not None, "the test expects no activation"
        return placement_pb2.ActivateResponse(place=await self.activate(request))

    async def Evict(self, request: placement_pb2.EvictRequest, context: Any) -> placement_pb2.EvictResponse:
        self.steered.append(request)
        if self.refusal is not None:
            await context.abort(*self.refusal)
        if self.evict is not None:
            try:
                return await self.evict(request)
            except Conflict as error:
                await context.abort(grpc.StatusCode.ABORTED, str(error))
        return placement_pb2.EvictResponse(residency=request.target)

    async def Migrate(self, request: placement_pb2.MigrateRequest, context: Any) -> placement_pb2.MigrateResponse:
        self.steered.append(request)
        return placement_pb2.MigrateResponse(seconds=0.5)

    async def LeaveGroup(self, request: placement_pb2.LeaveGroupRequest, context: Any) -> placement_pb2.EvictResponse:
        self.steered.append(request)
        if self.refusal is not None:
            await context.abort(*self.refusal)
        return placement_pb2.EvictResponse(residency=request.target)

    async def Replicate(self, request: placement_pb2.ReplicateRequest, context: Any) -> placement_pb2.ReplicateResponse:
        if self.refusal is not None:
            await context.abort(*self.refusal)
        self.steered.append(request)
        return placement_pb2.ReplicateResponse(group=request.to_group or "chosen", seconds=0.5)

    async def GetCluster(self, request: placement_pb2.GetClusterRequest, context: Any) -> placement_pb2.Cluster:
        self.looks += 1
        return self.cluster

    async def Explain(self, request: placement_pb2.ExplainRequest, context: Any) -> placement_pb2.ExplainResponse:
        return placement_pb2.ExplainResponse(decisions=self.decisions[: request.limit])


def place(group: FakeGroup, residency: common_pb2.Residency = common_pb2.ACTIVE) -> placement_pb2.Place:
    return placement_pb2.Place(group=group.address.rsplit("/")[-1], address=group.address, residency=residency)


def route(
    name: str,
    folder: str,
    *places: placement_pb2.Place,
    residency: common_pb2.Residency | None = None,
    error: str = "",
    context_tokens: int = 512,
    default_slo: common_pb2.Slo | None = None,
    embedding: common_pb2.Embedding | None = None,
    sampling: common_pb2.SamplingDefaults | None = None,
    aliases: Sequence[str] = (),
) -> placement_pb2.Route:
    if residency is None:
        residency = places[0].residency if places else common_pb2.COLD
    model = common_pb2.ModelSpec(
        name=name,
        path=folder,
        architecture="LlamaForCausalLM",
        context_tokens=context_tokens,
        weights_bytes=1000,
        default_slo=default_slo,
        generation=1,
        embedding=embedding,
        sampling=sampling,
        aliases=aliases,
    )
    return placement_pb2.Route(
        model=model, residency=residency, places=places, error=error, measured_weights_bytes=1234
    )
