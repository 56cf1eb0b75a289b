import re

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from protos import keeper_pb2, placement_pb2, placement_pb2_grpc
from services.errors import NotFound, Unavailable
from services.rpc import rpc

NAME = "prism.placement.v1.Placement"


class Servicer(placement_pb2_grpc.PlacementServicer):
    async def Activate(self, request, context):
        raise NotFound(f"no model {request.model}")

    async def GetCluster(self, request, context):
        raise ZeroDivisionError("oh")

    async def WatchRoutes(self, request, context):
        yield placement_pb2.Routes(revision=7)
        raise Unavailable("gone")


@pytest.fixture
async def address(tmp_path):
    address = f"unix:{tmp_path}/s.sock"
    server = rpc.Server(address)
    server.add(placement_pb2_grpc.add_PlacementServicer_to_server, Servicer(), NAME)
    await server.start()
    await server.set_serving(True)
    yield address
    await server.stop(0)


async def test_rpc_domain_error_is_answered_with_its_status_and_line(address):
    async with rpc.channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await placement_pb2_grpc.PlacementStub(channel).Activate(placement_pb2.ActivateRequest(model="m"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert caught.value.details() == "no model m"


@pytest.mark.parametrize("method", ["Activate", "WatchRoutes"])
async def test_rpc_bytes_that_are_no_message_are_an_invalid_argument(address, method):
    async with rpc.channel(address) as channel:
        call = channel.unary_unary if method == "Activate" else channel.unary_stream
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            answer = call(f"/{NAME}/{method}")(b"\x0a\x7f")
            await (answer if method == "Activate" else answer.read())
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "prism.placement.v1" in caught.value.details()


async def test_rpc_unexpected_error_is_internal_and_the_server_lives_on(address):
    async with rpc.channel(address) as channel:
        stub = placement_pb2_grpc.PlacementStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetCluster(placement_pb2.GetClusterRequest())
        assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert await rpc.healthy(address, 20)


async def test_rpc_error_in_a_stream_ends_it_with_its_status(address):
    async with rpc.channel(address) as channel:
        got = []
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for routes in placement_pb2_grpc.PlacementStub(channel).WatchRoutes(
                placement_pb2.WatchRoutesRequest()
            ):
                got.append(routes.revision)
    assert got == [7]
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_rpc_reflection_lists_the_services(address):
    async with rpc.channel(address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        answer = await call.read()
    names = {service.name for service in answer.list_services_response.service}
    assert {NAME, "grpc.health.v1.Health"} <= names


async def test_a_second_server_on_a_live_socket_is_refused_in_one_line(address):
    with pytest.raises(Unavailable, match="another process serves it"):
        await rpc.Server(address).start()
    assert await rpc.healthy(address, 20)


async def test_a_second_server_on_a_port_is_refused_in_one_line():
    first = rpc.Server("127.0.0.1:0")
    await first.start()
    with pytest.raises(Unavailable, match="cannot listen on 127.0.0.1"):
        await rpc.Server(f"127.0.0.1:{first.port}").start()
    await first.stop(0)


async def test_rpc_health_without_a_server_is_false(tmp_path):
    assert not await rpc.healthy(f"unix:{tmp_path}/none.sock", 0.2)


def test_keeper_messages_are_importable_without_a_server():
    assert keeper_pb2.ToKeeper(request_id=1).request_id == 1


@pytest.mark.parametrize(("minor", "major", "why"), [(7, 0, ""), (0, 1, "protocol 2.. is not spoken here")])
async def test_rpc_caller_of_another_minor_version_is_served_and_of_a_major_refused(
    address, monkeypatch, minor, major, why
):
    ours = rpc.PROTOCOL
    monkeypatch.setattr(rpc, "PROTOCOL", (ours[0] + major, ours[1] + minor))
    channel = rpc.channel(address)
    monkeypatch.setattr(rpc, "PROTOCOL", ours)
    async with channel:
        health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert health.status == health_pb2.HealthCheckResponse.SERVING, "whoever asks"
        stub = placement_pb2_grpc.PlacementStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Activate(placement_pb2.ActivateRequest(model="m"))
        call = stub.WatchRoutes(placement_pb2.WatchRoutesRequest())
        if why:
            assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert re.search(why, caught.value.details())
            with pytest.raises(grpc.aio.AioRpcError, match=why):
                await call.read()
        else:
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND
            assert (await call.read()).revision == 7


async def test_rpc_caller_without_a_version_is_served(address):
    async with grpc.aio.insecure_channel(address) as channel:
        call = placement_pb2_grpc.PlacementStub(channel).WatchRoutes(placement_pb2.WatchRoutesRequest())
        assert (await call.read()).revision == 7


async def test_rpc_health_watch_sends_the_present_status_and_changes(tmp_path):
    server = rpc.Server(f"unix:{tmp_path}/w.sock")
    await server.start()
    async with rpc.channel(server.address) as channel:
        call = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await call.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        await server.set_serving(True)
        assert (await call.read()).status == health_pb2.HealthCheckResponse.SERVING
        call.cancel()
    await server.stop(0)


class Stops(placement_pb2_grpc.PlacementServicer):
    """Is about to stop as it is asked the first `times`."""

    def __init__(self, times, code=grpc.StatusCode.UNAVAILABLE):
        self.times, self.code, self.asked = times, code, 0

    async def GetCluster(self, request, context):
        self.asked += 1
        if self.asked <= self.times:
            await context.abort(self.code, "stopping")
        return placement_pb2.Cluster()


async def _asked(tmp_path, stops, timeout_s):
    server = rpc.Server(f"unix:{tmp_path}/again.sock")
    server.add(placement_pb2_grpc.add_PlacementServicer_to_server, stops, NAME)
    await server.start()
    try:
        async with rpc.channel(server.address) as channel:
            method = placement_pb2_grpc.PlacementStub(channel).GetCluster
            return await rpc.answer(method, placement_pb2.GetClusterRequest(), timeout_s)
    finally:
        await server.stop(0)


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED])
async def test_rpc_call_to_a_stopping_server_is_made_again(tmp_path, code):
    stops = Stops(3, code)
    assert await _asked(tmp_path, stops, 20) == placement_pb2.Cluster()
    assert stops.asked == 4


async def test_rpc_call_that_was_refused_or_timed_out_is_not_made_again(tmp_path):
    for stops, timeout_s in ((Stops(9, grpc.StatusCode.NOT_FOUND), 20), (Stops(10**6), 2)):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await _asked(tmp_path, stops, timeout_s)
        assert caught.value.code() in (stops.code, grpc.StatusCode.DEADLINE_EXCEEDED)
        assert (stops.asked == 1) == (timeout_s == 20)
