"""mTLS between nodes, over the wire."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme

from protos import placement_pb2, placement_pb2_grpc
from services.errors import Invalid
from services.rpc import rpc
from services.rpc.tls import Identity, from_environment
from services.rpc.watch import Watched
from services.runtime import tasks
from services.runtime.config import NodeTls
from testing.patience import PATIENCE_S
from tests.services import certificates
from tests.services.certificates import Files, issued

NAME = "prism.placement.v1.Placement"


class Servicer(placement_pb2_grpc.PlacementServicer):
    """Whose routes a test turns."""

    def __init__(self) -> None:
        self.revision = Watched(0)

    async def GetCluster(self, request: Any, context: Any) -> placement_pb2.Cluster:
        return placement_pb2.Cluster()

    async def WatchRoutes(self, request: Any, context: Any) -> AsyncIterator[placement_pb2.Routes]:
        async for revision in self.revision.follow():
            yield placement_pb2.Routes(revision=revision)


@pytest.fixture
def ca() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(autouse=True)
def in_the_clear_again() -> Iterator[None]:
    yield
    rpc.identify(None)


class Node:
    """A server with a certificate of its own."""

    def __init__(self, files: Files, **more: Any) -> None:
        self.files = files
        self.identity = Identity(files.node(**more))
        self.servicer = Servicer()
        self.server = rpc.Server("127.0.0.1:0", self.identity)
        self.server.add(placement_pb2_grpc.add_PlacementServicer_to_server, self.servicer, NAME)

    async def __aenter__(self) -> Node:
        await self.server.start()
        await self.server.set_serving(True)
        self.address = f"127.0.0.1:{self.server.port}"
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.server.stop(0)


async def code(address: str) -> grpc.StatusCode:
    """Of a call by what this process is now."""
    async with rpc.channel(address) as channel:
        try:
            await placement_pb2_grpc.PlacementStub(channel).GetCluster(
                placement_pb2.GetClusterRequest(), timeout=PATIENCE_S
            )
        except grpc.aio.AioRpcError as error:
            return error.code()
    return grpc.StatusCode.OK


async def test_tls_server_admits_only_callers_with_a_certificate_of_its_ca(tmp_path: Path, ca: trustme.CA) -> None:
    async with Node(issued(tmp_path, "server", ca)) as node:
        assert await code(node.address) == grpc.StatusCode.UNAVAILABLE  # in the clear
        without = grpc.ssl_channel_credentials(ca.cert_pem.bytes())
        async with grpc.aio.secure_channel(node.address, without) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await placement_pb2_grpc.PlacementStub(channel).GetCluster(placement_pb2.GetClusterRequest())
            assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
        stranger = issued(tmp_path, "stranger", trustme.CA())
        stranger.believe(ca)
        rpc.identify(Identity(stranger.node()))
        assert await code(node.address) == grpc.StatusCode.UNAVAILABLE
        rpc.identify(Identity(issued(tmp_path, "client", ca).node()))
        assert await code(node.address) == grpc.StatusCode.OK
        assert await rpc.healthy(node.address, 20)


async def test_tls_server_of_another_ca_or_name_is_not_trusted(tmp_path: Path, ca: trustme.CA) -> None:
    rpc.identify(Identity(issued(tmp_path, "client", ca).node()))
    other = issued(tmp_path, "other", trustme.CA())
    other.believe(ca)
    for files in (other, issued(tmp_path, "elsewhere", ca, "elsewhere.example")):
        async with Node(files) as node:
            assert await code(node.address) == grpc.StatusCode.UNAVAILABLE


async def test_tls_server_name_may_be_one_for_all_servers(tmp_path: Path, ca: trustme.CA) -> None:
    rpc.identify(Identity(issued(tmp_path, "client", ca).node(server_name="prism.internal")))
    async with Node(issued(tmp_path, "server", ca, "prism.internal")) as node:
        assert await code(node.address) == grpc.StatusCode.OK


async def test_unix_socket_is_served_without_tls(tmp_path: Path, ca: trustme.CA) -> None:
    identity = Identity(issued(tmp_path, "server", ca).node())
    server = rpc.Server(f"unix:{tmp_path}/s.sock", identity)
    await server.start()
    await server.set_serving(True)
    for mine in (None, identity):
        rpc.identify(mine)
        assert await rpc.healthy(server.address, 20)
    await server.stop(0)


async def test_tls_ca_and_certificates_rotate_while_streams_and_calls_run(tmp_path: Path, ca: trustme.CA) -> None:
    """The order of a rotation: everybody believes the new CA too; new certificates; the old CA is forgotten."""
    new = trustme.CA()
    client = issued(tmp_path, "client", ca)
    me = Identity(client.node())
    rpc.identify(me)
    async with Node(issued(tmp_path, "server", ca)) as node:
        stub = placement_pb2_grpc.PlacementStub(rpc.channel(node.address))
        routes = stub.WatchRoutes(placement_pb2.WatchRoutesRequest())
        assert (await routes.read()).revision == 0
        calls = asyncio.Condition()
        done = 0

        async def call_on() -> None:
            nonlocal done
            while True:
                await stub.GetCluster(placement_pb2.GetClusterRequest(), timeout=PATIENCE_S)
                async with calls:
                    done += 1
                    calls.notify_all()

        async def still_works(revision: int) -> None:
            node.servicer.revision.set(revision)
            assert (await routes.read()).revision == revision
            async with calls:
                wanted = done + 4
                await calls.wait_for(lambda: done >= wanted or any(caller.done() for caller in callers))
            assert not any(caller.done() for caller in callers)
            assert await code(node.address) == grpc.StatusCode.OK

        callers = [tasks.spawn(call_on(), f"caller {number}") for number in range(2)]
        everybody = [(client, me), (node.files, node.identity)]
        await still_works(1)
        for files, identity in everybody:
            files.believe(ca, new)
            assert identity.followed.refresh()
        await still_works(2)
        for revision, (files, identity) in enumerate(everybody, 3):
            files.issue(new)
            assert identity.followed.refresh()
            await still_works(revision)
        for revision, (files, identity) in enumerate(everybody, 5):
            files.believe(new)
            assert identity.followed.refresh()
            await still_works(revision)
        old = issued(tmp_path, "old", ca)
        old.believe(new)
        rpc.identify(Identity(old.node()))
        assert await code(node.address) == grpc.StatusCode.UNAVAILABLE
        await tasks.cancel(*callers)
        routes.cancel()


async def test_tls_certificate_without_its_key_is_refused_and_the_old_one_stays(tmp_path: Path, ca: trustme.CA) -> None:
    client = issued(tmp_path, "client", ca)
    rpc.identify(Identity(client.node()))
    async with Node(issued(tmp_path, "server", ca)) as node:
        certificates.write(node.files.certificate, ca.issue_cert("127.0.0.1").cert_chain_pems[0].bytes())
        assert not node.identity.followed.refresh()
        assert await code(node.address) == grpc.StatusCode.OK


@pytest.mark.parametrize("broken", ["certificate", "key", "ca"])
@pytest.mark.parametrize("text", ["", "nonsense", None])
def test_tls_files_that_cannot_be_used_are_refused_by_name_in_one_line(
    tmp_path: Path, ca: trustme.CA, broken: str, text: str | None
) -> None:
    files = issued(tmp_path, "server", ca)
    path: Path = getattr(files, broken)
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises(Invalid) as refused:
        Identity(files.node())
    assert str(path) in str(refused.value) and "\n" not in str(refused.value)


def test_tls_settings_are_all_or_none() -> None:
    with pytest.raises(ValueError):
        NodeTls.model_validate({"certificate": "a", "key": "b"})


async def test_tls_settings_of_tools_come_from_the_environment(
    tmp_path: Path, ca: trustme.CA, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.environ", dict(os.environ))
    assert from_environment() is None
    tool = issued(tmp_path, "tool", ca)
    os.environ["PRISM_TLS_CA"] = str(tool.ca)
    with pytest.raises(Invalid, match="PRISM_TLS_CERTIFICATE, PRISM_TLS_KEY must be set too"):
        from_environment()
    os.environ |= {"PRISM_TLS_CERTIFICATE": str(tool.certificate), "PRISM_TLS_KEY": str(tool.key)}
    async with Node(issued(tmp_path, "server", ca)) as node:

        async def asked() -> int:
            command = (sys.executable, "-m", "deploy.healthy", node.address)
            return await (await asyncio.create_subprocess_exec(*command, env=dict(os.environ))).wait()

        for _ in range(5):  # on a busy machine its 3 s may be over before the answer
            if (status := await asked()) == 0:
                break
        assert status == 0
        del os.environ["PRISM_TLS_CA"], os.environ["PRISM_TLS_CERTIFICATE"], os.environ["PRISM_TLS_KEY"]
        assert await asked() == 1
