"""Engine processes that a benchmark asks, ours and the reference's, through the code that gpu_schedulers use."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import services.ipc.forking  # noqa: F401  (before grpc: engines are started)
from benchmarks.gpu import shapes, stock
from gpu_scheduler.engines.engine import EngineProcess, Spawn
from gpu_scheduler.engines.kinds import KINDS
from protos import common_pb2, engine_pb2
from services.telemetry import log
from testing.engines import harness

KINDS["stock"] = replace(KINDS["sglang"], module="benchmarks.gpu.stock")
START_S = 300.0
"""Kernels are compiled when a machine first sees them."""


@dataclass
class Reply:
    """What came back of one request, and when (monotonic seconds)."""

    prompt: Sequence[int]
    asked_s: float
    tokens: list[int] = field(default_factory=list)
    top: list[dict[int, float]] = field(default_factory=list)
    """For each token the log-probabilities of the best ones, if they were asked for."""
    first_s: float = 0.0
    last_s: float = 0.0
    arrived_s: list[float] = field(default_factory=list)
    """When each message with tokens of it came: a step of the engine each."""
    cached_tokens: int = 0
    parked: int = 0
    finish: common_pb2.Finish = common_pb2.FINISH_UNSPECIFIED
    error: str = ""
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def ok(self) -> bool:
        return self.finish == common_pb2.LENGTH

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.asked_s

    @property
    def tpot_s(self) -> float:
        return (self.last_s - self.first_s) / (len(self.tokens) - 1)


class Client:
    """One engine with a model. A gpu_scheduler's Listener."""

    def __init__(self, name: str, engine: EngineProcess) -> None:
        self.name = name
        self.engine = engine
        self.stats = engine_pb2.EngineStats()
        self.measured = engine_pb2.Measured()
        self.mapped: list[engine_pb2.WeightsMapped] = []
        """Layout of the weights on each rank, as the engine reported it once it had read the checkpoint."""
        self.lease_ids: list[str] = []
        """By rank."""
        self.received = 0
        """Tokens of all requests so far."""
        self.open: dict[str, Reply] = {}
        self._asked: dict[str, tuple[int, common_pb2.Adapter | None, dict[str, Any]]] = {}
        self._number = 0
        self._gone = False
        self._asleep = False
        self._held: list[str] = []
        """Requests to send once the engine is back."""
        self.prefills_changed: Callable[[], None] = lambda: None
        """Called when a request is sent, has its first token, or ends."""
        engine.listener = self

    @property
    def lease_id(self) -> str:
        return self.lease_ids[0]

    def ask(
        self,
        prompt: Sequence[int],
        new_tokens: int,
        *,
        asked_s: float | None = None,
        adapter: common_pb2.Adapter | None = None,
        **sampling: Any,
    ) -> Reply:
        """A greedy request; `asked_s` is when it was due, if not now."""
        if self._gone:
            raise RuntimeError(f"{self.name} is gone")
        self._number += 1
        name = str(self._number)
        reply = self.open[name] = Reply(prompt, time.monotonic() if asked_s is None else asked_s)
        self._asked[name] = new_tokens, adapter, sampling
        if self._asleep:
            self._held.append(name)
        else:
            self._send(name)
        return reply

    def _send(self, name: str) -> None:
        reply, (new_tokens, adapter, sampling) = self.open[name], self._asked[name]
        left = new_tokens - len(reply.tokens)
        if left <= 0:  # handed back between its last token and hearing that it was the last
            reply.finish = common_pb2.LENGTH
            self._end(name)
            return
        asked = common_pb2.Sampling(max_new_tokens=left, ignore_eos=True, **sampling)
        self.engine.generate(
            engine_pb2.Generate(
                request_id=name,
                token_ids=[*reply.prompt, *reply.tokens],
                sampling=asked,
                priority=int(name),
                resumed_tokens=len(reply.tokens),
                adapter=adapter,
            )
        )
        self.prefills_changed()

    async def hibernate(self) -> None:
        """What runs is handed back first, and goes on after `wake`."""
        self._asleep = True
        await self.engine.command(engine_pb2.ToEngine(drain=engine_pb2.Drain())).done()
        await self.engine.command(engine_pb2.ToEngine(hibernate=engine_pb2.Hibernate())).done()

    async def wake(self, fill: Callable[[], Awaitable[None]]) -> None:
        """`fill` puts the weights where they were."""
        command = self.engine.command(engine_pb2.ToEngine(wake=engine_pb2.Wake()))
        await command.mapped()
        await fill()
        self.engine.verify(command)
        await command.done()
        self._asleep = False
        held, self._held = self._held, []
        for name in held:
            self._send(name)

    def abort(self, reply: Reply) -> None:
        """Nothing if it has ended."""
        for name, other in self.open.items():
            if other is reply:
                self.engine.abort(name)

    def abort_all(self) -> None:
        for name in self.open:
            self.engine.abort(name)

    async def quiet(self, timeout_s: float) -> None:
        """Until nothing is open any more, and the statistics say so. Raises TimeoutError, RuntimeError."""
        async with asyncio.timeout(timeout_s):
            while self.open:
                await next(iter(self.open.values())).ended.wait()
            while self.stats.running or self.stats.waiting:
                await asyncio.sleep(0.01)
        if self._gone:
            raise RuntimeError(f"{self.name} is gone")

    # --- Listener

    def on_tokens(self, _engine: EngineProcess, chunks: list[common_pb2.TokenChunk]) -> None:
        now = time.monotonic()
        for chunk in chunks:
            reply = self.open[chunk.request_id]
            if chunk.token_ids:
                first = not reply.tokens
                if first:
                    reply.first_s, reply.cached_tokens = now, chunk.cached_tokens
                reply.last_s = now
                reply.arrived_s.append(now)
                reply.tokens.extend(chunk.token_ids)
                reply.top.extend({top.token_id: top.logprob for top in one.top} for one in chunk.logprobs)
                self.received += len(chunk.token_ids)
                if first:
                    self.prefills_changed()
            if chunk.finish == common_pb2.FAILED and self._asleep:
                self._held.append(chunk.request_id)
            elif chunk.finish:
                reply.finish, reply.error = chunk.finish, chunk.error
                self._end(chunk.request_id)

    def _end(self, name: str) -> None:
        self.open.pop(name).ended.set()
        del self._asked[name]
        self.prefills_changed()

    def on_parked(self, _engine: EngineProcess, request_id: str) -> None:
        """It found no memory: asked again, with what it said so far."""
        self.open[request_id].parked += 1
        self._send(request_id)

    def on_retracted(self, _engine: EngineProcess, request_id: str, reason: str) -> None: ...

    def on_prefilled(self, _engine: EngineProcess, prompts: list[engine_pb2.Prefilled.Prompt]) -> None: ...

    def on_stats(self, _engine: EngineProcess, stats: engine_pb2.EngineStats) -> None:
        self.stats = stats

    def on_death(self, _engine: EngineProcess) -> None:
        self._gone = True
        for name, reply in list(self.open.items()):
            reply.error = "the engine died"
            self._end(name)


def as_dict(message: Any) -> dict[str, Any]:
    return {
        field.name: [as_dict(each) for each in value] if field.is_repeated else value
        for field, value in message.ListFields()
    }


def say(text: str) -> None:
    print(f"[{time.monotonic() - _BEGUN:6.1f} s] {text}", flush=True)


_BEGUN = time.monotonic()


@dataclass(frozen=True)
class Model:
    """What all engines of a run serve."""

    path: Path
    device: str
    context_tokens: int
    options: Mapping[str, Any]
    """Ours; the reference gets the same arguments."""
    others: Sequence[str] = ()
    """Devices of the other ranks."""
    weights_bytes: int = 0
    """What a catalogue would say of it, by which our engine chooses its prefill steps; the reference does not."""
    kv_dtype: str = ""
    """"fp8", or empty for that of the weights."""
    adapters: common_pb2.AdapterPool | None = None
    """Room for adapters; None: there is none."""

    def tell(self, spec: common_pb2.ModelSpec) -> None:
        """Fills in what our engine and SGLang's are told of the model beside its path, context and size."""
        spec.kv_dtype = self.kv_dtype
        if self.adapters is not None:
            spec.adapters.CopyFrom(self.adapters)


def parser(description: str, *, shape: str = "8b") -> argparse.ArgumentParser:
    """With what all these programs take; `shape` is the default."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", type=Path, required=True, help="folder for the JSON file")
    made.add_argument("--commit", default="unknown")
    made.add_argument("--device", default="cuda:0", help="cpu:0 to try the program: what it measures then means little")
    made.add_argument("--shape", choices=shapes.NAMES, default=shape, help="of the models")
    return made


def begin() -> None:
    """First thing of a program."""
    log.configure("benchmark", "warning")


async def warm(
    kind: str, environment: Mapping[str, str], ranks: int = 1, index: int = 1, board_fd: int | None = None
) -> EngineProcess:
    engine = await EngineProcess.start(Spawn(kind, "error", environment, ranks, START_S), index, board_fd)
    await engine.hello(START_S)
    return engine


async def elastic(
    at: harness.Node,
    name: str,
    model: Model,
    *,
    poison: bool = False,
    environment: Mapping[str, str] | None = None,
    index: int = 1,
    board_fd: int | None = None,
) -> Client:
    """An engine of ours with memory from balloond, where `name` is booked."""
    client = Client(name, await warm("sglang", environment or {}, 1 + len(model.others), index, board_fd))
    load = harness.load(
        at,
        name,
        model.path,
        context_tokens=model.context_tokens,
        weights_bytes=model.weights_bytes,
        **model.options,
    )
    load.device = model.device
    model.tell(load.model)
    del load.others[:]
    load.others.extend(_parts(model))
    load.poison_fresh_pages = poison
    begun = time.monotonic()
    command = client.engine.command(engine_pb2.ToEngine(load=load))
    async with asyncio.timeout(START_S):
        client.mapped = await command.mapped()
        client.lease_ids = [rank.lease_id for rank in client.mapped]
        client.measured = await command.done()
    say(f"{name} is ready after {time.monotonic() - begun:.1f} s")
    return client


def _parts(model: Model) -> list[engine_pb2.Load.Part]:
    return [engine_pb2.Load.Part(device=device) for device in model.others]


async def reference(
    name: str,
    model: Model,
    pool_tokens: int,
    front: str = "scheduler",
    environment: Mapping[str, str] | None = None,
    most_bytes: int = 0,
) -> Client:
    """Unmodified SGLang with a pool of `pool_tokens`, a multiple of the page size. Several ranks only with the front
    "engine". `most_bytes`: of the device for torch, with the front "scheduler"; 0: as many as there are."""
    assert front in stock.FRONTS
    client = Client(name, await warm("stock", {stock.FRONT_VARIABLE: front, **(environment or {})}))
    options = {key: str(value) for key, value in model.options.items()}
    spec = common_pb2.ModelSpec(name=name, path=str(model.path), context_tokens=model.context_tokens)
    model.tell(spec)
    options |= {"pool_tokens": str(pool_tokens), "most_bytes": str(most_bytes)}
    load = engine_pb2.Load(model=spec, device=model.device, options=options, others=_parts(model))
    begun = time.monotonic()
    async with asyncio.timeout(START_S):
        client.measured = await client.engine.command(engine_pb2.ToEngine(load=load)).done()
    say(f"{name} is ready after {time.monotonic() - begun:.1f} s")
    return client


async def give_up(at: harness.Node, client: Client, floor_bytes: int, limit_bytes: int) -> None:
    """The idle engine's KV leaves, down to the floor, and may come back at once."""
    await at.limit(client.name, floor_bytes)
    async with asyncio.timeout(10.0):
        while client.stats.kv_held_bytes > floor_bytes:
            await asyncio.sleep(0.01)
    await at.limit(client.name, limit_bytes)


async def stop(clients: Sequence[Client]) -> None:
    await asyncio.gather(*(client.engine.stop() for client in clients))


def fail(problems: Sequence[str]) -> None:
    """Says what went wrong and ends the program; nothing if there is nothing."""
    for problem in problems:
        print(f"FAILED: {problem}", file=sys.stderr, flush=True)
    if problems:
        raise SystemExit(1)
