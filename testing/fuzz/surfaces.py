"""Every way into a running system, by name."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from types import ModuleType

from protos import balloond_pb2, gateway_pb2, gpu_scheduler_pb2, loader_pb2, placement_pb2
from services.ipc import sockets as addresses
from testing.fuzz import grpc_calls, http_raw, http_schema, peer, sockets
from testing.fuzz.mutate import Mutator
from testing.fuzz.outcome import SurfaceOutcome
from testing.fuzz.system import MOST_BODY_BYTES, Fuzzed
from testing.systems.local import MODELS

Surface = Callable[[Fuzzed, int, int, SurfaceOutcome], Awaitable[None]]
"""The system, how many cases, a seed, and where it is told."""


def _calls(process: str, module: ModuleType) -> Surface:
    (service,) = module.DESCRIPTOR.services_by_name.values()

    async def run(it: Fuzzed, cases: int, seed: int, outcome: SurfaceOutcome) -> None:
        mutator = Mutator(random.Random(seed), await it.words())
        await grpc_calls.fuzz(it.world.local.unix(process), service, mutator, cases, outcome)

    return run


def _too_long(process: str, module: ModuleType) -> Surface:
    (service,) = module.DESCRIPTOR.services_by_name.values()

    async def run(it: Fuzzed, cases: int, seed: int, outcome: SurfaceOutcome) -> None:
        await grpc_calls.oversized(it.world.local.unix(process), service, outcome)

    return run


def _datagrams(name: str) -> Surface:
    async def run(it: Fuzzed, cases: int, seed: int, outcome: SurfaceOutcome) -> None:
        words = {field: list(some) for field, some in (await it.words()).items()}
        await peer.run(name, str(it.state / f"{name}.sock"), seed, cases, words, outcome)

    return run


async def _frames(it: Fuzzed, cases: int, seed: int, outcome: SurfaceOutcome) -> None:
    path = addresses.stream_path(it.world.local.unix("gpu_scheduler-cpu-0"))
    assert path is not None
    mutator = Mutator(random.Random(seed), await it.words())
    await sockets.fuzz_frames(path, gpu_scheduler_pb2.FromGateway, mutator, cases, outcome)


async def _no_http2(it: Fuzzed, cases: int, seed: int, outcome: SurfaceOutcome) -> None:
    await sockets.fuzz_bytes(str(it.state / "balloond.sock"), Mutator(random.Random(seed)), cases, outcome)


async def _http(it: Fuzzed, cases: int, seed: int, outcome: SurfaceOutcome) -> None:
    host, _, port = it.world.local.http.rpartition(":")
    requests = http_raw.Requests(random.Random(seed), MODELS[0], it.key, MOST_BODY_BYTES)
    await http_raw.fuzz(host, int(port), requests, cases, outcome)


async def _described(it: Fuzzed, cases: int, seed: int, outcome: SurfaceOutcome) -> None:
    await asyncio.to_thread(http_schema.fuzz, it.world.base, it.key, MODELS[0], cases, seed, outcome)


_SERVERS = {
    "balloond": balloond_pb2,
    "loader": loader_pb2,
    "placement": placement_pb2,
    "gpu_scheduler-cpu-0": gpu_scheduler_pb2,
    "gateway": gateway_pb2,
}
SURFACES: dict[str, Surface] = {
    **{f"gRPC of {process}": _calls(process, module) for process, module in _SERVERS.items()},
    **{f"too long, gRPC of {process}": _too_long(process, module) for process, module in _SERVERS.items()},
    "handoff": _datagrams("handoff"),
    "keeper": _datagrams("keeper"),
    "stream of gpu_scheduler": _frames,
    "no HTTP/2 to balloond": _no_http2,
    "HTTP, raw": _http,
    "HTTP, raw, with keys": _http,
    "HTTP as described": _described,
    "HTTP as described, with keys": _described,
}
