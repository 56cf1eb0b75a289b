"""One engine process from the outside: start it, send it commands, receive its tokens, notice its death.

The engine inherits one end of a socket pair; the closing of the other end is its death (protos/engine.proto). It is
started by the main thread of a process that outlives it: engines have the kernel kill them when the thread that started
them ends.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from gpu_scheduler.engines import processes
from gpu_scheduler.engines.kinds import KINDS
from gpu_scheduler.telemetry import counters
from protos import common_pb2, engine_pb2
from services.errors import PrismError, TimedOut
from services.ipc import children
from services.ipc.framing import FramedChannel
from services.runtime import tasks
from services.telemetry import log

_log = log.get(__name__)
_LONGEST_COMPILE_S = 3600.0
"""Seconds of the longest compilation of a kernel; the longest that was seen took a third of this, on a busy core."""
_BETWEEN_STEPS = ("drain", "export_kv", "import_kv")
"""Commands during which an engine goes on with its steps."""


class EngineDied(PrismError):
    """The engine process is gone. Its requests can run elsewhere."""


class CommandFailed(PrismError):
    """The engine could not carry out a command; the message is its reason. `model_at_fault`: the checkpoint is broken,
    trying again cannot help. `weights_differ`: its weights range was not filled with what was announced. `may_pass`:
    the host was at fault, and may recover soon."""

    def __init__(self, reason: str, model_at_fault: bool, weights_differ: bool = False, may_pass: bool = False) -> None:
        super().__init__(reason)
        self.model_at_fault = model_at_fault
        self.weights_differ = weights_differ
        self.may_pass = may_pass


class Listener(Protocol):
    """Receiver of an engine's messages. Called in the event loop, never re-entered."""

    def on_tokens(self, engine: EngineProcess, chunks: list[common_pb2.TokenChunk]) -> None: ...

    def on_prefilled(self, engine: EngineProcess, prompts: list[engine_pb2.Prefilled.Prompt]) -> None: ...

    def on_parked(self, engine: EngineProcess, request_id: str) -> None: ...

    def on_retracted(self, engine: EngineProcess, request_id: str, reason: str) -> None: ...

    def on_stats(self, engine: EngineProcess, stats: engine_pb2.EngineStats) -> None: ...

    def on_death(self, engine: EngineProcess) -> None: ...


@dataclass(frozen=True)
class Spawn:
    """How engines of one kind are started."""

    kind: str
    log_level: str = "warning"
    environment: Mapping[str, str] | None = None
    ranks: int = 1
    """Processes of one engine: as many as its group has devices."""
    start_timeout_s: float = 180.0
    """Seconds until an engine has to be warm: imports of SGLang take seconds on a fast disk, a minute on a cold and
    busy one."""


class Command:
    """A residency command under way. Await `mapped()` where the command maps weights, then `done()`."""

    def __init__(
        self, number: int, ranks: int, on_progress: Callable[[common_pb2.Progress], None] | None, *, steps: bool = False
    ) -> None:
        loop = asyncio.get_running_loop()
        self.number = number
        self.steps = steps
        """Whether the engine goes on with steps meanwhile, and reads its socket between them."""
        self._ranks = ranks
        self._on_progress = on_progress
        self._parts: list[engine_pb2.WeightsMapped] = []
        self._mapped: asyncio.Future[list[engine_pb2.WeightsMapped]] = loop.create_future()
        self._places: asyncio.Future[engine_pb2.KvPlaces] = loop.create_future()
        self._done: asyncio.Future[engine_pb2.Measured] = loop.create_future()
        # Each may fail before it is awaited; a later await still raises the error.
        for future in (self._mapped, self._places, self._done):
            future.add_done_callback(lambda f: f.cancelled() or f.exception())

    async def mapped(self) -> list[engine_pb2.WeightsMapped]:
        """The mapped weights of all ranks, in their order. Raises EngineDied or CommandFailed."""
        return await asyncio.shield(self._mapped)

    async def places(self) -> engine_pb2.KvPlaces:
        """The places of KV blocks, for commands that move KV. Raises EngineDied or CommandFailed."""
        return await asyncio.shield(self._places)

    async def done(self) -> engine_pb2.Measured:
        return await asyncio.shield(self._done)

    def progressed(self, progress: common_pb2.Progress) -> None:
        if self._on_progress is not None:
            self._on_progress(progress)

    def weights_mapped(self, message: engine_pb2.WeightsMapped) -> None:
        self._parts.append(message)
        if len(self._parts) == self._ranks and not self._mapped.done():
            self._mapped.set_result(self._parts)

    def lies(self, places: engine_pb2.KvPlaces) -> None:
        if not self._places.done():
            self._places.set_result(places)

    def succeed(self, measured: engine_pb2.Measured) -> None:
        if not self._done.done():
            self._done.set_result(measured)

    def fail(self, error: PrismError) -> None:
        for future in (self._mapped, self._places, self._done):
            if not future.done():
                future.set_exception(error)

    @property
    def ended(self) -> bool:
        return self._done.done()


class EngineProcess:
    """One engine: a process, or several of which the first speaks for all. Made by `EngineProcess.start`; used from one
    event loop."""

    _numbers = itertools.count(1)

    def __init__(self, ranks: Sequence[children.Process], index: int) -> None:
        self.ranks = ranks
        """The engine's processes by rank."""
        self.index = index
        """The engine's number on the shared board: 1 or above, not shared with another living engine of the group."""
        self.pid = ranks[0].pid
        self.stats = engine_pb2.EngineStats()
        self.heard = 0
        """Messages received from the engine."""
        self.kept_bytes = 0
        """Bytes that the engine has kept on each of its devices since its model last fell asleep or left, leases aside;
        0: not reported."""
        self.told_kept = asyncio.Event()
        self.listener: Listener | None = None
        self.on_compiling: Callable[[engine_pb2.Compiling], None] | None = None
        """Called for each kernel that the engine begins to compile or has compiled."""
        self._compiling_since: float | None = None
        self._compiled_at = -math.inf
        """When the engine last said that it compiles a kernel, or has compiled one."""
        self.dead = asyncio.Event()
        self._channel = FramedChannel(engine_pb2.FromEngine, self._take, self._ended)
        self._stopping = False
        self._commands: dict[int, Command] = {}
        self._hello: asyncio.Future[engine_pb2.Hello] = asyncio.get_running_loop().create_future()
        self._hello.add_done_callback(lambda f: f.cancelled() or f.exception())

    def __repr__(self) -> str:
        state = "dead" if self.dead.is_set() else "alive"
        return f"EngineProcess(pid={self.pid}, {state}, commands={len(self._commands)})"

    @classmethod
    async def start(cls, spawn: Spawn, index: int, board_fd: int | None) -> EngineProcess:
        """Starts the processes; `hello()` returns once they are warm."""
        ours, theirs = socket.socketpair()
        arguments = ["--log-level", spawn.log_level]
        if board_fd is not None:
            arguments += ["--board-fd", str(board_fd), "--board-index", str(index)]
        try:
            ranks = await processes.start(
                KINDS[spawn.kind].module,
                arguments,
                theirs,
                ranks=spawn.ranks,
                shared_fds=[] if board_fd is None else [board_fd],
                environment=spawn.environment,
            )
        finally:
            theirs.close()
        engine = cls(ranks, index)
        await engine._channel.open(ours)
        tasks.spawn(engine._reap(), f"engine {engine.pid}")
        for number, rank in enumerate(ranks[1:], start=1):
            tasks.spawn(engine._watch(rank, number), f"rank {number} of engine {engine.pid}")
        return engine

    async def hello(self, timeout_s: float) -> engine_pb2.Hello:
        """Waits until the engine is warm. Raises EngineDied, TimedOut."""
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(self._hello)
        except TimeoutError:
            raise TimedOut(f"engine {self.pid} was not warm after {timeout_s:.0f} s") from None

    @property
    def alive(self) -> bool:
        return not self.dead.is_set()

    @property
    def compiling_s(self) -> float:
        """Seconds for which the engine has been compiling the kernel that it last reported; 0 if that is done."""
        return 0.0 if self._compiling_since is None else time.monotonic() - self._compiling_since

    def since_compiling_s(self, *, longest_s: float = _LONGEST_COMPILE_S) -> float:
        """Seconds since the engine compiled a kernel; 0 while it does, infinite if it never did, or if one has taken
        `longest_s` seconds, so that its compiler seems to hang."""
        if self._compiling_since is None:
            return time.monotonic() - self._compiled_at
        return 0.0 if self.compiling_s < longest_s else math.inf

    @property
    def commanded(self) -> bool:
        """Whether the engine has unanswered commands that keep it from its steps."""
        return not all(command.steps for command in self._commands.values())

    @property
    def owes(self) -> bool:
        """Whether the engine has unanswered commands."""
        return bool(self._commands)

    def command(
        self, message: engine_pb2.ToEngine, on_progress: Callable[[common_pb2.Progress], None] | None = None
    ) -> Command:
        """Sends a command that is answered by Done or Failed; fills its command_id in."""
        steps = message.WhichOneof("message") in _BETWEEN_STEPS
        command = Command(next(self._numbers), len(self.ranks), on_progress, steps=steps)
        getattr(message, str(message.WhichOneof("message"))).command_id = command.number
        if not self.alive:
            command.fail(EngineDied(f"engine {self.pid} is gone"))
            return command
        self._commands[command.number] = command
        self._channel.send(message)
        return command

    def verify(self, command: Command) -> None:
        """Tells the engine that its weights range is filled; `command` is the Load or Wake under way."""
        self._channel.send(engine_pb2.ToEngine(verify=engine_pb2.Verify(command_id=command.number)))

    def imported(self, command: Command, failed: bool) -> None:
        """Tells the engine that the places of `command`, an ImportKv, are filled, or never will be."""
        imported = engine_pb2.ImportedKv(command_id=command.number, failed=failed)
        self._channel.send(engine_pb2.ToEngine(imported_kv=imported))

    def generate(self, message: engine_pb2.Generate) -> None:
        self._channel.send(engine_pb2.ToEngine(generate=message))

    def abort(self, request_id: str) -> None:
        self._channel.send(engine_pb2.ToEngine(abort=engine_pb2.Abort(request_id=request_id)))

    def forget_adapter(self, adapter: common_pb2.Adapter) -> None:
        forgotten = engine_pb2.ForgetAdapter(name=adapter.name, generation=adapter.generation)
        self._channel.send(engine_pb2.ToEngine(forget_adapter=forgotten))

    def ping(self) -> None:
        """Sends a ping. The engine answers when it next reads its socket, between two steps; the answer counts in
        `heard`."""
        self._channel.send(engine_pb2.ToEngine(ping=engine_pb2.Ping()))

    async def stop(self, grace_s: float = 3.0) -> None:
        """Asks the process to end and kills it when it does not."""
        self._stopping = True
        self._channel.send(engine_pb2.ToEngine(shutdown=engine_pb2.Shutdown()))
        try:
            async with asyncio.timeout(grace_s):
                await self._all_ended()
        except TimeoutError:
            self.kill()
            await self._all_ended()
        await self.dead.wait()

    def kill(self) -> None:
        processes.kill(self.ranks)

    async def give_up(self, grace_s: float = 5.0) -> None:
        """Kills the engine. A process that survives even that, in a driver call that does not return, counts as dead
        after `grace_s`."""
        self.kill()
        try:
            async with asyncio.timeout(grace_s):
                await self.dead.wait()
        except TimeoutError:
            _log.error("a killed engine does not end", engine=self.pid)
            self._ended()

    async def _all_ended(self) -> None:
        await asyncio.gather(*(rank.wait() for rank in self.ranks))

    async def _reap(self) -> None:
        status = await self.ranks[0].wait()
        await self.dead.wait()
        _log.info("engine ended", engine=self.pid, status=status)

    async def _watch(self, rank: children.Process, number: int) -> None:
        """Kills the engine when one of its ranks dies: the others would wait for it for ever."""
        status = await rank.wait()
        if not self._stopping and self.alive:
            _log.warning("a rank died, its engine ends", engine=self.pid, rank=number, process=rank.pid, status=status)
            self.kill()

    def _take(self, message: engine_pb2.FromEngine) -> None:
        kind = message.WhichOneof("message")
        self.heard += 1
        if kind == "tokens":
            if self.listener is not None:
                self.listener.on_tokens(self, list(message.tokens.chunks))
        elif kind == "stats":
            self.stats = message.stats
            if self.listener is not None:
                self.listener.on_stats(self, message.stats)
        elif kind == "prefilled":
            if self.listener is not None:
                self.listener.on_prefilled(self, list(message.prefilled.prompts))
        elif kind == "parked":
            if self.listener is not None:
                self.listener.on_parked(self, message.parked.request_id)
        elif kind == "retracted":
            if self.listener is not None:
                self.listener.on_retracted(self, message.retracted.request_id, message.retracted.reason)
        elif kind == "kept":
            self.kept_bytes = message.kept.bytes
            self.told_kept.set()
        elif kind == "pong":
            pass
        elif kind == "compiling":
            self._compiles(message.compiling)
        elif kind == "hello":
            if not self._hello.done():
                self._hello.set_result(message.hello)
        elif kind == "progress":
            if command := self._commands.get(message.progress.command_id):
                command.progressed(message.progress.progress)
        elif kind == "weights_mapped":
            if command := self._commands.get(message.weights_mapped.command_id):
                command.weights_mapped(message.weights_mapped)
        elif kind == "kv_places":
            if command := self._commands.get(message.kv_places.command_id):
                command.lies(message.kv_places)
        elif kind == "done":
            if command := self._commands.pop(message.done.command_id, None):
                command.succeed(message.done.measured)
        elif kind == "failed":
            if command := self._commands.pop(message.failed.command_id, None):
                failed = message.failed
                command.fail(
                    CommandFailed(failed.reason, failed.model_at_fault, failed.weights_differ, failed.may_pass)
                )
        else:
            raise RuntimeError(f"an engine said {kind!r}, which this gpu_scheduler does not know")

    def _compiles(self, told: engine_pb2.Compiling) -> None:
        self._compiling_since = None if told.done else time.monotonic()
        self._compiled_at = time.monotonic()
        if told.done:
            counters.COMPILED.labels(told.compiler).inc()
            counters.COMPILING_S.labels(told.compiler).inc(told.seconds)
            _log.info("kernel compiled", engine=self.pid, kernel=told.kernel, ms=round(1e3 * told.seconds, 1))
        if self.on_compiling is not None:
            self.on_compiling(told)

    def _ended(self) -> None:
        if self.dead.is_set():
            return
        self.dead.set()
        if not self._stopping:
            # A process that closed its socket is of no use any more, whether or not it still runs.
            self.kill()
        self._channel.close()
        error = EngineDied(f"engine {self.pid} died")
        if not self._hello.done():
            self._hello.set_exception(error)
        commands, self._commands = self._commands, {}
        for command in commands.values():
            command.fail(error)
        if self.listener is not None:
            self.listener.on_death(self)
