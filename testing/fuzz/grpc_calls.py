"""Bytes over the wire to every method of a gRPC service, past every generated stub."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Sequence

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass

from services.rpc import rpc
from testing.fuzz.mutate import Mutator
from testing.fuzz.outcome import SurfaceOutcome
from testing.fuzz.system import ADDED
from testing.patience import PATIENCE_S

CALL_S = 0.4
"""A call's deadline."""
HANGS_S = PATIENCE_S
"""A call that has not ended so long after its deadline hangs."""
_AT_ONCE = 12
_BIG = 65 << 20
"""Beyond the longest message that a server takes."""
WAITS = frozenset(
    (
        "MakeRoom",
        "Activate",
        "AddModel",
        "RemoveModel",
        "Evict",
        "Migrate",
        "Replicate",
        "LeaveGroup",
        "DrainGroup",
        "TakeKv",
    )
)
"""Methods whose answer may take longer than a call's deadline here; also what waits for one of these."""
_REMOVES = frozenset(("Remove", "RemoveModel"))
"""Methods that would, rightly, take away what the others are to be asked about."""
_CUT = "Internal error from Core"
"""What our own end says of a stream that ended while it was written to."""
_OURS = frozenset(("UNKNOWN", "INTERNAL", "UNIMPLEMENTED", "DATA_LOSS"))
"""Statuses that say that the server is at fault."""


async def fuzz(
    address: str,
    service: ServiceDescriptor,
    mutator: Mutator,
    cases: int,
    outcome: SurfaceOutcome,
    skip: Sequence[str] = (),
) -> None:
    """`cases` calls, of each method in turn."""
    methods = [method for method in service.methods if method.name not in skip]
    turns = itertools.islice(itertools.cycle(methods), cases)
    async with rpc.channel(address) as channel:
        workers = [_work(channel, service, turns, mutator, outcome) for _ in range(_AT_ONCE)]
        await asyncio.gather(*workers)


async def oversized(address: str, service: ServiceDescriptor, outcome: SurfaceOutcome) -> None:
    """To each method one message that is longer than any may be."""
    options = [("grpc.max_send_message_length", 2 * _BIG)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        for method in service.methods:
            await _one(channel, service, method, [bytes(_BIG)], outcome, deadline_s=30.0)


async def _work(
    channel: grpc.aio.Channel,
    service: ServiceDescriptor,
    turns: Iterator[MethodDescriptor],
    everything: Mutator,
    outcome: SurfaceOutcome,
) -> None:
    for method in turns:
        mutator = everything.with_words(name=[ADDED]) if method.name in _REMOVES else everything
        kind = GetMessageClass(method.input_type)
        count = mutator.draw.randrange(1, 5) if method.client_streaming else 1
        messages = [mutator.wire(kind) for _ in range(count)]
        await _one(channel, service, method, messages, outcome)


async def _one(
    channel: grpc.aio.Channel,
    service: ServiceDescriptor,
    method: MethodDescriptor,
    messages: Sequence[bytes],
    outcome: SurfaceOutcome,
    deadline_s: float = CALL_S,
) -> None:
    outcome.cases += 1
    sent = f"{service.name}.{method.name} {[message[:150].hex() for message in messages]}"
    try:
        async with asyncio.timeout(deadline_s + HANGS_S):
            answer, details = await _call(channel, f"/{service.full_name}/{method.name}", method, messages, deadline_s)
    except TimeoutError:
        outcome.hangs += 1
        outcome.fault(f"hangs: {sent}")
        return
    outcome.answers[f"{method.name} {answer}"] += 1
    if answer in _OURS and details != _CUT:
        outcome.fault(f"{answer} {details[:200]}: {sent}")
    if answer == "DEADLINE_EXCEEDED" and method.name not in WAITS and not method.server_streaming:
        outcome.answers["late"] += 1


async def _call(
    channel: grpc.aio.Channel, path: str, method: MethodDescriptor, messages: Sequence[bytes], deadline_s: float
) -> tuple[str, str]:
    """(status, details). A stream is read until its first message: most never end by themselves."""
    try:
        if not method.server_streaming:
            assert not method.client_streaming
            await channel.unary_unary(path)(messages[0], timeout=deadline_s)
        else:
            if method.client_streaming:
                call = channel.stream_stream(path)(timeout=deadline_s)
                if not await _write(call, messages):
                    return (await call.code()).name, await call.details()
            else:
                call = channel.unary_stream(path)(messages[0], timeout=deadline_s)
            await call.read()
            call.cancel()
    except grpc.aio.AioRpcError as error:
        return error.code().name, error.details() or ""
    return "OK", ""


async def _write(call: grpc.aio.StreamStreamCall, messages: Sequence[bytes]) -> bool:
    """False when the stream ended while it was written to."""
    try:
        for message in messages:
            await call.write(message)
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        return False
    return True
