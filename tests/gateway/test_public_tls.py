"""TLS for the gateway's clients."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import trustme

from gateway.__main__ import build
from gateway.config import GatewayConfig
from gateway.http import messages
from gateway.http.server import HttpServer
from protos import common_pb2, gateway_pb2, gateway_pb2_grpc
from services.rpc.tls import Identity
from services.service import Service
from testing.patience import PATIENCE_S
from testing.ports import free_port
from tests.gateway import fakes
from tests.gateway.conftest import MODEL
from tests.gateway.fakes import FakeGroup, FakePlacement, Running
from tests.gateway.tokenizers import tiny
from tests.services.certificates import Files, issued


@pytest.fixture
def ca() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def files(tmp_path: Path, ca: trustme.CA) -> Files:
    return issued(tmp_path, "public", ca)


def trusting(*cas: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context()
    for ca in cas:
        ca.configure_trust(context)
    return context


class Gateway:
    """One with TLS, whose one model says " one", waits for `go_on`, then " two"."""

    def __init__(self, tmp_path: Path, folder: str, files: Files) -> None:
        self.go_on = asyncio.Event()
        self.placement = FakePlacement(str(tmp_path / "placement.sock"))
        self.group = FakeGroup(str(tmp_path / "group.sock"), self._say)
        self._folder = folder
        self.http, self.grpc = (f"127.0.0.1:{free_port()}" for _ in range(2))
        self.config = GatewayConfig(
            name="gateway",
            listen=self.grpc,
            http=self.http,
            placement=self.placement.address,
            public_tls=files.server,
            drain_s=5,
        )

    async def _say(self, running: Running) -> None:
        one, two = (tiny().encode(text, add_special_tokens=False).ids for text in ("one", " two"))
        running.tokens(one)
        await self.go_on.wait()
        running.tokens(two)
        running.finish(common_pb2.STOP)

    async def __aenter__(self) -> Gateway:
        await asyncio.gather(self.placement.start(), self.group.start())
        self.placement.routes.set([fakes.route(MODEL, self._folder, fakes.place(self.group))])
        self.service = Service(self.config)
        await build(self.service)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.service._end()
        await self.group.die()
        await self.placement.die()

    def refresh(self) -> bool:
        assert self.service.identity is not None
        return self.service.identity.followed.refresh()


@pytest.fixture
async def gateway(tmp_path: Path, folder: str, files: Files) -> AsyncIterator[Gateway]:
    async with Gateway(tmp_path, folder, files) as gateway:
        yield gateway


async def test_http_and_grpc_with_tls_refuse_plain_and_untrusting_clients(gateway: Gateway, ca: trustme.CA) -> None:
    gateway.go_on.set()
    async with httpx.AsyncClient(base_url=f"https://{gateway.http}", verify=trusting(ca), timeout=PATIENCE_S) as client:
        answer = await client.post("/v1/completions", json={"model": MODEL, "prompt": "hello"})
        assert answer.json()["choices"][0]["text"] == "one two"
    async with httpx.AsyncClient(
        base_url=f"https://{gateway.http}", verify=trusting(trustme.CA()), timeout=PATIENCE_S
    ) as client:
        with pytest.raises(httpx.ConnectError):
            await client.get("/health")
    async with httpx.AsyncClient(base_url=f"http://{gateway.http}", timeout=PATIENCE_S) as client:
        with pytest.raises(httpx.TransportError):
            await client.get("/health")
    credentials = grpc.ssl_channel_credentials(ca.cert_pem.bytes())
    async with grpc.aio.secure_channel(gateway.grpc, credentials) as channel:
        call = gateway_pb2_grpc.InferenceStub(channel).Generate(gateway_pb2.GenerateRequest(model=MODEL, text="hello"))
        assert "".join([part.text async for part in call]) == "one two"


async def test_new_certificate_is_presented_to_new_connections_while_streams_go_on(
    gateway: Gateway, files: Files, ca: trustme.CA
) -> None:
    new = trustme.CA()
    body: dict[str, Any] = {"model": MODEL, "prompt": "hello", "stream": True}
    old_grpc, new_grpc = (grpc.ssl_channel_credentials(each.cert_pem.bytes()) for each in (ca, new))
    async with (
        httpx.AsyncClient(base_url=f"https://{gateway.http}", verify=trusting(ca), timeout=PATIENCE_S) as before,
        httpx.AsyncClient(base_url=f"https://{gateway.http}", verify=trusting(new), timeout=PATIENCE_S) as after,
        grpc.aio.secure_channel(gateway.grpc, old_grpc) as channel_before,
        grpc.aio.secure_channel(gateway.grpc, new_grpc) as channel_after,
    ):
        asked = gateway_pb2.GenerateRequest(model=MODEL, text="hello")
        call = gateway_pb2_grpc.InferenceStub(channel_before).Generate(asked)
        assert (await call.read()).text == "one"
        async with before.stream("POST", "/v1/completions", json=body) as response:
            lines = response.aiter_lines()
            assert "one" in await anext(lines)
            files.issue(new)
            assert gateway.refresh()
            assert (await after.get("/health")).status_code == 200
            listed = await gateway_pb2_grpc.InferenceStub(channel_after).ListModels(gateway_pb2.ListModelsRequest())
            assert [model.name for model in listed.models] == [MODEL]
            gateway.go_on.set()
            assert any("two" in line for line in [line async for line in lines])
        rest = ""
        while (part := await call.read()) is not grpc.aio.EOF:
            rest += part.text
        assert "two" in rest


async def test_certificate_without_its_new_key_is_not_presented(gateway: Gateway, files: Files, ca: trustme.CA) -> None:
    files.certificate.write_bytes(ca.issue_cert("127.0.0.1").cert_chain_pems[0].bytes())
    assert not gateway.refresh()
    async with httpx.AsyncClient(base_url=f"https://{gateway.http}", verify=trusting(ca), timeout=PATIENCE_S) as client:
        assert (await client.get("/health")).status_code == 200


async def test_certificate_is_presented_with_or_without_a_server_name(files: Files, ca: trustme.CA) -> None:
    """A client that goes to an address sends no name; the newest certificate is shown to either."""

    async def hello(scope: Any, receive: Any, send: Any) -> None:
        await messages.respond(send, 200, b'"hello"')

    identity = Identity(files.server)
    server = HttpServer(hello, "127.0.0.1:0", identity)
    await server.start()
    files.issue(ca)
    assert identity.followed.refresh()
    wanted = ssl.PEM_cert_to_DER_cert(files.certificate.read_text())
    for host in ("localhost", "127.0.0.1"):
        _, writer = await asyncio.open_connection("127.0.0.1", server.port, ssl=trusting(ca), server_hostname=host)
        assert writer.get_extra_info("ssl_object").getpeercert(binary_form=True) == wanted
        writer.close()
    await server.stop()
