"""A keeper, a balloond and one engine process, and the parent's end of the engine's socket."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import socket
import subprocess
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path

import psutil

from balloond.client import BalloondClient
from gpu_scheduler.engines import processes
from kv_kinds import messages
from kv_kinds.layout import KvLayout
from loader.copies.handoff_client import HandoffClient
from protos import common_pb2, engine_pb2
from services.errors import PrismError
from services.ipc import children
from services.ipc.framing import FramedChannel, frame
from testing.patience import PATIENCE_S

DEVICE = "cpu:0"
KV_EXTENT = 64 << 10
WEIGHTS_EXTENT = 1 << 20
MODEL_BYTES = 40 << 20
START_S = float(os.environ.get("PRISM_TEST_START_S", PATIENCE_S))
"""Imports take long on a busy machine; a GPU's kernels are compiled when a machine first sees them."""
STEP_S = PATIENCE_S
"""Several ranks on busy cores wait for each other at every step."""


def extent_bytes(device: str) -> int:
    """Bytes of an extent of KV on such a device: small on a CPU, where models are."""
    return KV_EXTENT if device.startswith("cpu") else 8 << 20


OPTIONS: dict[str, int] = {}
"""Of all loads that do not say otherwise."""

COUNTED = (
    "retractions",
    "evicted_tokens",
    "moved_tokens",
    "evicting_s",
    "hibernations",
    "forward_steps",
    "prefill_tokens",
    "decode_tokens",
    "decode_steps",
    "urgent_steps",
    "stood_still_s",
)
"""Of an engine's stats: since its process started."""


@contextlib.asynccontextmanager
async def node(
    folder: Path, capacity_bytes: int = 512 << 20, device: str = DEVICE, others: Mapping[str, int] | None = None
) -> AsyncIterator[Node]:
    """A keeper and a balloond with one device, and `others` with their bytes."""
    devices = {device: capacity_bytes, **(others or {})}
    config = folder / "balloond.toml"
    config.write_text(
        f'name = "balloond"\nlisten = "unix:{folder}/b.sock"\nnode = "test"\nhandoff = "{folder}/h.sock"\n'
        f'keeper = "{folder}/k.sock"\nlog_level = "warning"\n'
        + "".join(f'[[devices]]\nname = "{name}"\ncapacity_bytes = {nbytes}\n' for name, nbytes in devices.items())
    )
    with contextlib.ExitStack() as stack:
        for arguments in (
            ["balloond.keeper", "--socket", f"{folder}/k.sock"],
            ["balloond", "--config", str(config)],
        ):
            process = subprocess.Popen([sys.executable, "-m", *arguments])
            stack.callback(_end, process)
        client = BalloondClient(f"unix:{folder}/b.sock")
        try:
            async with asyncio.timeout(START_S):
                while not await _answers(client):
                    await asyncio.sleep(0.05)
            yield Node(client, f"{folder}/h.sock", device, list(devices)[1:])
        finally:
            await client.close()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    process.wait(STEP_S)


async def _answers(client: BalloondClient) -> bool:
    try:
        await client.inspect()
    except PrismError:
        return False
    return True


@dataclass
class Node:
    client: BalloondClient
    handoff: str
    device: str
    others: Sequence[str] = ()

    @property
    def devices(self) -> list[str]:
        return [self.device, *self.others]

    async def book(self, model: str, *, floor_bytes: int = 4 << 20, weights_bytes: int = MODEL_BYTES) -> None:
        """On every device."""
        for device in self.devices:
            await self.client.set_booking(
                device, model, quota_bytes=0, weights_bytes=weights_bytes, floor_bytes=floor_bytes
            )

    async def limit(self, model: str, nbytes: int, device: str = "") -> None:
        await self.client.set_limit(device or self.device, model, nbytes)

    @property
    def kv_extent_bytes(self) -> int:
        return extent_bytes(self.device)

    async def leased_bytes(self) -> int:
        """Of all devices."""
        return sum(device.leased_bytes for device in (await self.client.inspect()).devices)

    async def until(self, what: Callable[[], Awaitable[bool]]) -> None:
        async with asyncio.timeout(STEP_S):
            while not await what():
                await asyncio.sleep(0.01)


@dataclass
class Answer:
    """What came back of one request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[common_pb2.TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[common_pb2.TokenLogprob] = field(default_factory=list)
    label_logprobs: list[float] = field(default_factory=list)
    finish: common_pb2.Finish = common_pb2.FINISH_UNSPECIFIED
    error: str = ""
    parked: bool = False
    retracted: list[str] = field(default_factory=list)
    """Reason of each retraction after which the engine resumed it by itself."""
    prefilled: list[tuple[int, int]] = field(default_factory=list)
    """(cached, computed) tokens of its prompt, as its steps began."""
    embedding: list[float] = field(default_factory=list)
    told_meanwhile: int = 0
    """Messages with tokens of others, from the first of `prefilled` to its first token."""
    cached_tokens: int = 0
    prompt_tokens: int = 0
    ended: asyncio.Event = field(default_factory=asyncio.Event)


def open_to_others(end: EngineEnd) -> list[str]:
    """Where the engine's processes take connections that do not come from this host."""
    found = (each for rank in end.ranks for each in psutil.Process(rank.pid).net_connections("inet"))
    listening = [each.laddr for each in found if each.status == psutil.CONN_LISTEN]
    return [f"{at.ip}:{at.port}" for at in listening if not ip_address(at.ip).is_loopback]


def taken_bytes(stats: engine_pb2.EngineStats) -> int:
    """Of KV, beside the reserve."""
    return stats.kv_held_bytes - stats.kv_reserve_bytes


class EngineEnd:
    """The parent of one engine."""

    def __init__(self, ranks: Sequence[children.Process], channel: FramedChannel[engine_pb2.FromEngine]) -> None:
        self.ranks = ranks
        self.process = ranks[0]
        self.answers: dict[str, Answer] = defaultdict(Answer)
        self.stats = engine_pb2.EngineStats()
        """As it told them last; what it counts, since `renew`."""
        self._counted: engine_pb2.EngineStats | None = engine_pb2.EngineStats()
        """What it had counted before; None until it tells."""
        self.most_taken_bytes = 0
        """`taken_bytes`, of all that its stats told; tests may begin anew."""
        self.kept_bytes = 0
        """Of the device by a sleeping engine, once it has told it."""
        self.step = ""
        """Of the command under way, as it told it last."""
        self.progress: list[common_pb2.Progress] = []
        """All that it told of commands."""
        self.told = 0
        """Messages with tokens: one for each step that made some."""
        self.order: list[str] = []
        """Request ids by their first token."""
        self._channel = channel
        self._heard: asyncio.Queue[engine_pb2.FromEngine] = asyncio.Queue()
        self._changed = asyncio.Condition()
        self._number = 0
        self._reader = asyncio.get_running_loop().create_task(self._read())

    async def _read(self) -> None:
        while (message := await self._channel.recv()) is not None:
            kind = message.WhichOneof("message")
            if kind == "tokens":
                self.told += 1
                for chunk in message.tokens.chunks:
                    self._take(chunk)
            elif kind == "parked":
                answer = self.answers[message.parked.request_id]
                answer.parked = True
                answer.ended.set()
            elif kind == "retracted":
                self.answers[message.retracted.request_id].retracted.append(message.retracted.reason)
            elif kind == "prefilled":
                for prompt in message.prefilled.prompts:
                    assert not self.answers[prompt.request_id].tokens, "its first token said that its prompt is done"
                    answer = self.answers[prompt.request_id]
                    answer.told_meanwhile = answer.told_meanwhile if answer.prefilled else -self.told
                    answer.prefilled.append((prompt.cached_tokens, prompt.computed_tokens))
            elif kind == "stats":
                self._take_stats(message.stats)
            elif kind == "kept":
                self.kept_bytes = message.kept.bytes
            elif kind == "progress":
                self.step = message.progress.progress.step
                self.progress.append(message.progress.progress)
            elif kind != "compiling":  # kernels that this machine has not compiled before: tests wait, whatever it is
                self._heard.put_nowait(message)
            async with self._changed:
                self._changed.notify_all()
            await asyncio.sleep(0)  # what came together with this one would be taken before anybody has looked

    def _take_stats(self, stats: engine_pb2.EngineStats) -> None:
        if self._counted is None:
            self._counted = stats
        self.stats.CopyFrom(stats)
        self.most_taken_bytes = max(self.most_taken_bytes, taken_bytes(stats))
        for name in COUNTED:
            setattr(self.stats, name, getattr(stats, name) - getattr(self._counted, name))

    @property
    def has_counted(self) -> bool:
        """Whether it has told stats: those to come count from the first ones."""
        return self._counted is not None

    def renew(self) -> None:
        """A warm engine is as good as a new one: forgets all that it has told."""
        assert self._heard.empty(), "there is more to hear"
        self.answers.clear()
        self.order.clear()
        self.progress.clear()
        self.stats, self._counted = engine_pb2.EngineStats(), None
        self.most_taken_bytes, self.kept_bytes, self.step = 0, 0, ""

    def _take(self, chunk: common_pb2.TokenChunk) -> None:
        answer = self.answers[chunk.request_id]
        if chunk.token_ids and not answer.tokens:
            self.order.append(chunk.request_id)
            answer.told_meanwhile += self.told - 1 if answer.prefilled else 0
            answer.cached_tokens, answer.prompt_tokens = chunk.cached_tokens, chunk.prompt_tokens
        assert not (chunk.prompt_logprobs and answer.tokens), "the prompt comes before the answer"
        answer.prompt_logprobs += chunk.prompt_logprobs
        answer.label_logprobs += chunk.label_logprobs
        answer.tokens += chunk.token_ids
        answer.logprobs += chunk.logprobs
        if chunk.embedding:
            answer.embedding = list(chunk.embedding)
            answer.cached_tokens, answer.prompt_tokens = chunk.cached_tokens, chunk.prompt_tokens
        if chunk.finish:
            assert not answer.ended.is_set(), "a request ended twice"
            answer.cached_tokens = answer.cached_tokens or chunk.cached_tokens
            answer.finish, answer.error = chunk.finish, chunk.error
            answer.ended.set()

    async def until(self, what: Callable[[], bool]) -> None:
        """Until `what` is true; looked at after every message of the engine."""
        async with asyncio.timeout(STEP_S), self._changed:
            await self._changed.wait_for(what)

    async def steps(self, count: int) -> None:
        """Waits until so many more steps have made tokens or all requests have ended, but for a second at most:
        requests that are left may wait for memory."""
        last = self.told + count

        def over() -> bool:
            return self.told >= last or all(answer.ended.is_set() for answer in self.answers.values())

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1), self._changed:
                await self._changed.wait_for(over)

    # --- commands

    async def hear(self, *kinds: str) -> engine_pb2.FromEngine:
        """The next message that is not about requests; it must be one of `kinds`."""
        async with asyncio.timeout(START_S):
            message = await self._heard.get()
        kind = message.WhichOneof("message")
        assert kind in kinds, message.failed if kind == "failed" else kind
        return message

    def send(self, **message: object) -> int:
        """Gives a command; its command_id is filled in and returned."""
        self._channel.send(self._command(message))
        return self._number

    def send_together(self, **messages: object) -> int:
        """Commands in one piece, which the engine reads at once: between two pieces it may make a step. The command_id
        of the first; the others' follow."""
        first = self._number + 1
        frames = [frame(self._command({name: message})) for name, message in messages.items()]
        assert self._channel._transport is not None
        self._channel._transport.write(b"".join(frames))
        return first

    def _command(self, message: Mapping[str, object]) -> engine_pb2.ToEngine:
        command = engine_pb2.ToEngine(**message)  # type: ignore[arg-type]
        inner = getattr(command, str(command.WhichOneof("message")))
        if hasattr(inner, "command_id") and not inner.command_id:
            self._number += 1
            inner.command_id = self._number
        return command

    async def do(self, **message: object) -> engine_pb2.Done:
        """Gives a command that has to succeed."""
        self.send(**message)
        return (await self.hear("done")).done

    async def hold(self, load: engine_pb2.Load) -> tuple[engine_pb2.WeightsMapped, engine_pb2.Measured]:
        """Loads a model from disk; answers for the first rank."""
        self.send(load=load)
        mapped = await self.mapped()
        return mapped[0], (await self.hear("done")).done.measured

    async def mapped(self) -> list[engine_pb2.WeightsMapped]:
        """What every rank mapped, in their order."""
        return [(await self.hear("weights_mapped")).weights_mapped for _ in self.ranks]

    async def fail(self, **message: object) -> engine_pb2.Failed:
        """Gives a command that has to fail."""
        self.send(**message)
        return (await self.hear("failed")).failed

    # --- requests

    def ask(
        self,
        request_id: str,
        tokens: Sequence[int],
        max_new_tokens: int,
        priority: int = 0,
        resumed: Sequence[int] = (),
        adapter: common_pb2.Adapter | None = None,
        **sampling: object,
    ) -> None:
        """`resumed`: what it has said before, beside `max_new_tokens`."""
        generate = engine_pb2.Generate(
            request_id=request_id,
            token_ids=[*tokens, *resumed],
            sampling=common_pb2.Sampling(max_new_tokens=max_new_tokens, **sampling),  # type: ignore[arg-type]
            priority=priority,
            resumed_tokens=len(resumed),
            adapter=adapter,
        )
        self.answers[request_id]  # it is awaited from now on
        self.send(generate=generate)

    def embed(self, request_id: str, tokens: Sequence[int]) -> None:
        self.send(generate=engine_pb2.Generate(request_id=request_id, token_ids=tokens, embed=True))

    async def answer(self, request_id: str) -> Answer:
        async with asyncio.timeout(STEP_S):
            await self.answers[request_id].ended.wait()
        return self.answers[request_id]

    async def close(self) -> int:
        """Closes the socket, as the death of the parent does; returns the exit status."""
        self._channel.close()
        self._reader.cancel()
        async with asyncio.timeout(STEP_S):
            return max([await rank.wait() for rank in self.ranks], key=abs)


@contextlib.asynccontextmanager
async def engine(
    *arguments: str, pass_fds: Sequence[int] = (), ranks: int = 1, module: str = "gpu_scheduler.engines.sglang"
) -> AsyncIterator[EngineEnd]:
    """A warm engine, of so many processes. `module` is their program."""
    ours, theirs = socket.socketpair()
    started = await processes.start(
        module,
        ["--log-level", "error", *arguments],
        theirs,
        ranks=ranks,
        shared_fds=pass_fds,
        # SGLang adds up its pool after every step, and ends the process when a token is missing; ranks compare theirs.
        environment={"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"},
    )
    theirs.close()
    end = EngineEnd(started, await FramedChannel(engine_pb2.FromEngine).open(ours))
    try:
        hello = (await end.hear("hello")).hello
        assert hello.pid == end.process.pid and hello.engine == "sglang"
        yield end
    finally:
        processes.kill(started)
        await end.close()


def load(
    at: Node,
    model: str,
    path: Path,
    *,
    context_tokens: int,
    from_image: bool = False,
    expected_checksum: str = "",
    embedding: int = 0,
    weights_bytes: int = 0,
    kv_bytes_per_token: int = 0,
    kv: KvLayout = KvLayout(),  # noqa: B008 (it cannot be changed)
    **options: int,
) -> engine_pb2.Load:
    """`embedding`: the dimensions of a model that makes them. `weights_bytes`, `kv_bytes_per_token`, `kv`: as the
    loader found them; 0 or no kinds: it did not."""
    spec = common_pb2.ModelSpec(
        name=model,
        path=str(path),
        context_tokens=context_tokens,
        weights_bytes=weights_bytes,
        kv_bytes_per_token=kv_bytes_per_token or kv.marginal(0),
        kv_kinds=messages.kinds(kv),
    )
    if embedding:
        spec.embedding.dimensions = embedding
    on_host = at.device.startswith("cpu")
    span = {"kv_span_bytes": str(256 << 20)} if on_host else {}
    return engine_pb2.Load(
        model=spec,
        device=at.device,
        others=[engine_pb2.Load.Part(device=device) for device in at.others],
        balloond_socket=at.handoff,
        from_image=from_image,
        expected_checksum=expected_checksum,
        kv_extent_bytes=at.kv_extent_bytes,
        weights_extent_bytes=WEIGHTS_EXTENT if on_host else 32 << 20,
        poison_fresh_pages=True,
        options={**span, **{name: str(value) for name, value in {**OPTIONS, **options}.items()}},
    )


class Images:
    """The loader's part: copies weights extents out and in."""

    def __init__(self, at: Node) -> None:
        self._client = HandoffClient(at.handoff, answer_timeout_s=STEP_S)
        self._task = asyncio.get_running_loop().create_task(self._client.run())

    async def take(self, lease_id: str) -> bytes:
        async with self._client.borrowed(lease_id) as extents:
            parts = []
            for extent in extents:
                with mmap.mmap(extent.fd, extent.nbytes, prot=mmap.PROT_READ) as memory:
                    parts.append(memory[:])
            return b"".join(parts)

    async def put(self, lease_id: str, image: bytes, new: bool = True) -> None:
        """`new`: the engine has written nothing there since it mapped the extents."""
        async with self._client.borrowed(lease_id) as extents:
            at = 0
            for extent in extents:
                with mmap.mmap(extent.fd, extent.nbytes) as memory:
                    assert not new or not any(memory[:64]), "a new extent is zero"
                    memory[:] = image[at : at + extent.nbytes]
                at += extent.nbytes
            assert at == len(image)

    def close(self) -> None:
        self._task.cancel()
