"""The engine process: warm, then one model after another. Imports SGLang: only the engine process may import this."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import sglang
import torch
from sglang.srt.managers import scheduler as _  # noqa: F401  (imports what a model needs, before Hello)
from sglang.srt.models import registry as _models  # noqa: F401

from gpu_scheduler.engines.sglang.base import collector, current, states
from gpu_scheduler.engines.sglang.base.errors import CommandError, LeaveLoop, NoMemory
from gpu_scheduler.engines.sglang.base.faults import check_folder, fault
from gpu_scheduler.engines.sglang.base.options import Options, one_line
from gpu_scheduler.engines.sglang.base.states import EngineState
from gpu_scheduler.engines.sglang.hooks.scheduler import EngineScheduler
from gpu_scheduler.engines.sglang.memory.model_memory import ModelMemory, OpenMemory
from gpu_scheduler.engines.sglang.model.lifecycle import Lifecycle
from gpu_scheduler.engines.sglang.model.loaded_model import LoadedModel
from gpu_scheduler.engines.sglang.step.commands import LoadFailed, Unload, told
from gpu_scheduler.engines.sglang.step.current import set_loop
from gpu_scheduler.engines.sglang.step.loop import StepLoop
from protos import common_pb2, engine_pb2
from services.telemetry import log

if TYPE_CHECKING:
    from gpu_scheduler.engines.sglang.ranks.channel import Channel, FollowerChannel
    from gpu_scheduler.engines.sglang.ranks.ranks import Ranks
    from gpu_scheduler.engines.shared_board import BoardSeat

_log = log.get(__name__)
_FAILURE_S = 30.0
"""Seconds that a rank which failed waits for the others. They may be waiting for it in SGLang's collectives, where they
cannot hear it: then this process ends, and the gpu_scheduler ends the rest."""


class ModelHost:
    """The loop of a warm engine. While a model is loaded, SGLang's own loop runs inside `_load`."""

    def __init__(
        self, channel: Channel | FollowerChannel, ranks: Ranks, seat: BoardSeat, open_memory: OpenMemory
    ) -> None:
        """`seat`: this engine's place on the board that it shares with its neighbours. `open_memory` makes the memory
        of each model that is loaded."""
        self._channel = channel
        self._ranks = ranks
        self._seat = seat
        self._open_memory = open_memory
        self._ended = False

    def run(self) -> None:
        """Serves until the gpu_scheduler is gone or sends Shutdown."""
        collector.settle()
        self._ranks.begin()
        hello = engine_pb2.Hello(pid=os.getpid(), engine="sglang", version=sglang.__version__)
        self._channel.send(hello=hello)
        while not self._ended and not self._channel.closed:
            self._channel.wait(None)
            messages = self._channel.receive()
            for number, message in enumerate(messages, start=1):
                if message.WhichOneof("message") == "load":
                    # The messages after a Load are for the model.
                    self._channel.unread(messages[number:])
                    with log.bound(model=message.load.model.name):
                        self._load(message.load)
                    break
                self._take(message)

    def _take(self, message: engine_pb2.ToEngine) -> None:
        """Handles one message to a warm engine: requests fail, Unload and Drain are done at once, other commands are
        refused."""
        kind = message.WhichOneof("message")
        if kind == "shutdown":
            self._ended = True
        elif kind == "generate":
            chunk = common_pb2.TokenChunk(
                request_id=message.generate.request_id, finish=common_pb2.FAILED, error="not serving"
            )
            self._channel.send(tokens=engine_pb2.Tokens(chunks=[chunk]))
        elif kind in ("unload", "drain"):
            self._channel.send(done=engine_pb2.Done(command_id=getattr(message, kind).command_id))
        elif kind not in (None, "abort"):
            try:
                states.check(str(kind), EngineState.WARM)
            except CommandError as error:
                self._fail(getattr(message, str(kind)).command_id, error)

    def _fail(self, command_id: int, error: CommandError) -> None:
        """Reports to the gpu_scheduler that a command failed."""
        _log.warning("command failed", command=command_id, why=str(error))
        self._channel.send(failed=told(command_id, error))

    def _load(self, load: engine_pb2.Load) -> None:
        """Builds the model of `load` and serves it until it leaves. The engine is warm again when this returns."""
        try:
            self._own(load)
            lifecycle = self._open(load)
        except CommandError as error:
            self._fail(load.command_id, error)
            return
        current.set_model(lifecycle.model)
        failure: CommandError | None = None
        done: int | None = None
        collector.pause()
        try:
            self._build(lifecycle)
            done = self._serve(lifecycle)
        except CommandError as error:
            # Kept without its trace, which would keep SGLang's half-built objects alive.
            failure = type(error)(str(error))
        current.set_model(None)
        # The gpu_scheduler hears this once every device has its memory back. What stays on one rank ends all of them.
        cleans, kept = zip(*self._ranks.gather(lifecycle.close()), strict=True)
        clean = all(cleans)
        self._channel.send(kept=engine_pb2.Kept(bytes=max(kept)))
        if failure is not None:
            self._fail(load.command_id, failure)
        elif done is not None and clean:
            self._channel.send(done=engine_pb2.Done(command_id=done))
        elif done is not None:
            self._fail(done, CommandError("something of the model stayed in the process"))
        # If something stayed, the next model would have less memory, and the one after that less still: the process
        # ends.
        self._ended |= not clean

    def _own(self, load: engine_pb2.Load) -> None:
        """Replaces device and checksum in `load` by this rank's. Raises CommandError if the model needs another number
        of ranks."""
        if len(load.others) != self._ranks.size - 1:
            raise CommandError(f"this engine has {self._ranks.size} ranks, the model wants {1 + len(load.others)}")
        if self._ranks.rank > 0:
            part = load.others[self._ranks.rank - 1]
            load.device, load.expected_checksum = part.device, part.expected_checksum

    def _open(self, load: engine_pb2.Load) -> Lifecycle:
        """Opens the model's memory and begins its life. Raises CommandError, on all ranks or none."""
        memory: ModelMemory | None = None
        failure: CommandError | None = None
        try:
            memory = self._open_memory(load, Options.parse(load.options, load.device, load.model), self._ranks)
        except CommandError as error:
            failure = error
        try:
            self._ranks.settle(failure)
        except CommandError:
            if memory is not None:
                memory.close()
            raise
        assert memory is not None
        return Lifecycle(LoadedModel(load, memory, self._channel, self._ranks))

    def _build(self, lifecycle: Lifecycle) -> None:
        """Builds the model and agrees with the other ranks on the result. Raises CommandError on all ranks if one
        failed."""
        try:
            self._build_own(lifecycle)
        except CommandError as error:
            self._ranks.settle(error, _FAILURE_S)
        else:
            self._ranks.settle(None)

    def _build_own(self, lifecycle: Lifecycle) -> None:
        """Builds this rank's part of the model. Raises CommandError, whose type tells whether trying again may help
        (`fault`)."""
        path = lifecycle.model.load.model.path
        check_folder(path)
        try:
            lifecycle.build(EngineScheduler)
        except CommandError:
            raise
        except RuntimeError as error:
            _log.warning("SGLang could not start", path=path, exc_info=True)
            raise CommandError(one_line(error)) from error
        except Exception as error:
            # The loaders report faults of the weights themselves. For a configuration that it refuses, or with which it
            # cannot compute, SGLang raises errors of any type.
            _log.warning("SGLang could not build the model", path=path, exc_info=True)
            raise fault(error, path) from error

    def _serve(self, lifecycle: Lifecycle) -> int | None:
        """Runs SGLang's event loop until the model leaves. Returns the command_id of the Unload that ended it; None:
        something else ended it, and the process ends. Raises CommandError if the load failed, also at the
        trial that ends it."""
        model = lifecycle.model
        set_loop(StepLoop(lifecycle, self._seat))
        try:
            model.scheduler.run_event_loop()
        except Unload as left:
            return left.command_id
        except LoadFailed as left:
            raise left.error from None
        except LeaveLoop:
            self._ended = True
        except torch.OutOfMemoryError as error:
            why = f"{model.load.model.name} took more than its quota, or than the device has: {one_line(error)}"
            if model.state is not EngineState.PROVING:
                _log.error("out of memory", why=why, quota=model.booked_bytes)
                raise
            self._ranks.settle(NoMemory(why), _FAILURE_S)
        except Exception as error:
            # Behind an error of a device's no call to it succeeds, and only the process's end helps.
            if model.state is not EngineState.PROVING or isinstance(error, (CommandError, torch.AcceleratorError)):
                raise
            path = model.load.model.path
            _log.error("SGLang fails at the first request of the model", path=path, exc_info=True)
            self._ranks.settle(fault(error, path), _FAILURE_S)
        finally:
            set_loop(None)
        return None
