"""Commands of the gpu_scheduler to an engine that holds a model. Commands that need SGLang idle wait until it is.

Imports SGLang: only the engine process may import this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.io_struct import AbortReq

from gpu_scheduler.engines.sglang.base import states
from gpu_scheduler.engines.sglang.base.errors import CommandError, LeaveLoop, NotNow, RejectedRequest
from gpu_scheduler.engines.sglang.base.request_table import LiveRequest
from gpu_scheduler.engines.sglang.base.states import EngineState
from gpu_scheduler.policy.adapter_room import adapter_key
from protos import common_pb2, engine_pb2
from services.wording.paths import without_folders
from services.wording.plurals import agreeing, counted

if TYPE_CHECKING:
    from gpu_scheduler.engines.sglang.model.lifecycle import Lifecycle

_LOOK_S = 0.005
"""Seconds between two looks whether an adapter was read."""
_HANDED_BACK = "handed back"
_NOT_SERVING = "not serving"


class Unload(LeaveLoop):
    """Unwinds SGLang's event loop: the model leaves, the process stays."""

    def __init__(self, command_id: int) -> None:
        super().__init__("unload")
        self.command_id = command_id


def told(command_id: int, error: CommandError) -> engine_pb2.Failed:
    """Message that reports the failure of a command to the gpu_scheduler, without names of folders."""
    return engine_pb2.Failed(
        command_id=command_id,
        reason=without_folders(str(error)),
        model_at_fault=error.model_at_fault,
        may_pass=error.may_pass,
        weights_differ=error.weights_differ,
    )


class LoadFailed(LeaveLoop):
    """Unwinds SGLang's event loop: the model was never active, and will not be. It leaves, the process stays."""

    def __init__(self, error: CommandError) -> None:
        super().__init__(str(error))
        self.error = error


class Shutdown(LeaveLoop):
    """Unwinds SGLang's event loop: the process ends."""


class Commands:
    """The commands of one model, their dispatch and deferred work."""

    def __init__(self, lifecycle: Lifecycle, changed: Callable[[], None]) -> None:
        """`changed` is called when what the loop waits for may have changed."""
        self._lifecycle, self._model = lifecycle, lifecycle.model
        self._changed = changed
        self._drain_until: tuple[int, float] | None = None
        """(command_id, monotonic seconds until when requests may finish) of a drain under way."""
        self._draining = False
        """True from a drain or an export until the next activation: no request is started."""
        self._hibernate_id: int | None = None
        self._export_id: int | None = None
        self._withheld: list[LiveRequest] = []
        """Requests that end with the drain that follows an export."""
        self._unread: list[engine_pb2.Generate] = []
        """Requests whose adapters are being read, in their order. SGLang does not have them yet."""

    # --- dispatch

    def take(self, message: engine_pb2.ToEngine) -> list[Any]:
        """Acts on one message; returns the requests and aborts that SGLang is to take in. Raises LeaveLoop if the model
        leaves or the process ends."""
        kind = message.WhichOneof("message")
        if kind == "generate":
            return self._generate(message.generate)
        if kind == "forget_adapter":
            self._forget_adapter(message.forget_adapter)
            return []
        if kind == "abort":
            return self._abort(message.abort.request_id)
        if kind == "shutdown":
            raise Shutdown
        if kind == "ping":
            self._model.channel.send(pong=engine_pb2.Pong())
            return []
        if kind is None:
            return []
        command = getattr(message, kind)
        handlers: dict[str, Callable[[Any], list[Any] | None]] = {
            "load": self._load,
            "verify": self._verify,
            "hibernate": self._hibernate,
            "wake": self._wake,
            "unload": self._unload,
            "drain": self._drain,
            "export_kv": self._export_kv,
            "import_kv": self._import_kv,
            "imported_kv": self._imported_kv,
        }
        try:
            states.check(kind, self._model.state)
            return handlers[kind](command) or []
        except CommandError as error:
            self.fail(command.command_id, error)
            return []

    def fail(self, command_id: int, error: CommandError) -> None:
        """Reports that a command failed. Raises LoadFailed if it is the Load that failed."""
        if command_id == self._model.load.command_id:
            raise LoadFailed(error)
        self._model.channel.send(failed=told(command_id, error))
        self._changed()

    def _done(self, command_id: int, measured: engine_pb2.Measured | None = None) -> None:
        """Reports that a command is done."""
        self._model.channel.send(done=engine_pb2.Done(command_id=command_id, measured=measured))
        self._changed()

    # --- requests

    def _generate(self, generate: engine_pb2.Generate) -> list[Any]:
        """Starts a request, or refuses it: REJECTED if it can never run here, BROKEN if its adapter cannot be used,
        FAILED if the engine is not serving. It starts later if its adapter has to be read."""
        model = self._model
        if not self._serves():
            self._refuse(generate.request_id, common_pb2.FAILED, _NOT_SERVING)
            return []
        if generate.HasField("adapter") and model.adapters is not None and not model.adapters.ready(generate.adapter):
            self._unread.append(generate)
            return []
        try:
            adapter = adapter_key(generate.adapter.name, generate.adapter.generation)
            entry = model.request_table.add(
                generate.request_id, len(generate.token_ids), generate.resumed_tokens, adapter
            )
        except ValueError as error:
            self._refuse(generate.request_id, common_pb2.REJECTED, str(error))
            return []
        try:
            return [model.to_sglang(generate, entry.rid)]
        except RejectedRequest as error:
            self._end(entry, common_pb2.REJECTED, str(error))
        except CommandError as error:
            finish = common_pb2.BROKEN if error.model_at_fault else common_pb2.FAILED
            self._end(entry, finish, without_folders(str(error)))
        return []

    def _serves(self) -> bool:
        return self._model.state is EngineState.ACTIVE and not self._draining and self._hibernate_id is None

    def _generate_read(self) -> list[Any]:
        """Starts the requests whose adapters were read; ends all that wait if the engine stops serving."""
        adapters = self._model.adapters
        if not self._unread or adapters is None:
            return []
        held, self._unread = self._unread, []
        inputs: list[Any] = []
        for generate in held:
            inputs += self._generate(generate)
        if not self._unread:
            adapters.settle()
        return inputs

    def _forget_adapter(self, forgotten: engine_pb2.ForgetAdapter) -> None:
        model = self._model
        if model.adapters is not None:
            model.adapters.forget(adapter_key(forgotten.name, forgotten.generation), model.request_table.adapters)

    def _refuse(self, request_id: str, finish: common_pb2.Finish, error: str) -> None:
        """Sends the end of a request."""
        self._model.send_chunks([common_pb2.TokenChunk(request_id=request_id, finish=finish, error=error)])

    def _end(self, entry: LiveRequest, finish: common_pb2.Finish, error: str = "") -> None:
        """Ends a request that SGLang does not have, or not any more."""
        self._model.request_table.close(entry)
        self._refuse(entry.request_id, finish, error)

    def _abort(self, request_id: str) -> list[Any]:
        """Aborts a request; one that is not here is ignored."""
        if unread := [each for each in self._unread if each.request_id == request_id]:
            self._unread = [each for each in self._unread if each not in unread]
            self._refuse(request_id, common_pb2.ABORTED, "")
            return []
        entry = self._model.request_table.by_id(request_id)
        if entry is None:
            return []
        if not entry.ending:
            entry.ending = common_pb2.ABORTED
        return [AbortReq(rid=entry.rid)]

    # --- draining

    def _hand_back_all(self) -> list[Any]:
        """Hands all remaining requests back to the gpu_scheduler; SGLang lets go of running ones after its next
        step."""
        aborts: list[Any] = []
        for entry in self._model.request_table:
            if not entry.ending:
                entry.ending, entry.error = common_pb2.FAILED, _HANDED_BACK
                aborts.append(AbortReq(rid=entry.rid))
        return aborts

    def _hand_back_waiting(self) -> list[Any]:
        """Hands back requests that have not started, or were retracted: these would have to start again."""
        aborts: list[Any] = []
        for request in self._model.scheduler.waiting_queue:
            entry = self._model.request_table.by_rid(request.rid)
            if entry is not None and not entry.ending:
                entry.ending, entry.error = common_pb2.FAILED, _HANDED_BACK
                aborts.append(AbortReq(rid=entry.rid))
        return aborts

    # --- residency; each may return inputs for SGLang

    def _drain(self, command: engine_pb2.Drain) -> list[Any]:
        """Stops starting requests; running ones have `finish_ms` to end. Raises NotNow if a drain is under way."""
        if self._drain_until is not None:
            raise NotNow("a drain is under way")
        self._draining = True
        self._end_withheld()
        self._drain_until = (command.command_id, self._model.ranks.now() + command.finish_ms / 1e3)
        return self._hand_back_waiting() if command.finish_ms > 0 else self._hand_back_all()

    def tick(self, now: float) -> list[Any]:
        """Does the work that is due by the clock, because requests have ended or because adapters were read; returns
        inputs for SGLang."""
        read = self._generate_read()
        return read + self._tick(now)

    def _tick(self, now: float) -> list[Any]:
        if self._export_id is not None and not len(self._model.request_table):
            self._exported()
        if self._drain_until is None:
            return []
        command_id, until = self._drain_until
        if not len(self._model.request_table):
            self._drain_until = None
            self._done(command_id)
            return []
        # Requests retracted meanwhile would have to start again.
        return self._hand_back_waiting() if now < until else self._hand_back_all()

    # --- KV that moves to another engine

    def _export_kv(self, command: engine_pb2.ExportKv) -> list[Any]:
        """Exports the KV of running requests: a copy of whole pages while they run on (`live`), or all of it once they
        have stopped. Raises NotNow."""
        self._only_alone()
        if self._draining:
            raise NotNow("a drain is under way")
        if command.live:
            self._model.kv_transfer.keep()
            self._export(command.command_id, self._model.running())
            return []
        self._draining = True
        self._export_id = command.command_id
        aborts = self._hand_back_waiting()
        for entry in self._model.request_table:
            if not entry.ending:
                entry.withheld = True
                self._withheld.append(entry)
        return aborts + self._hand_back_all()

    def _exported(self) -> None:
        """Reports the places of the KV of withheld requests, once all requests have stopped."""
        command_id, self._export_id = self._export_id, None
        assert command_id is not None
        model = self._model
        stopped, model.outputs.stopped = model.outputs.stopped, {}
        # A request that ended by itself, or had no output yet, has had its end reported.
        self._withheld = [entry for entry in self._withheld if entry.rid in stopped]
        # The number of tokens to come was reported with the live export before.
        withheld = [(entry.request_id, entry.adapter, stopped[entry.rid], 0) for entry in self._withheld]
        self._export(command_id, withheld)

    def _export(self, command_id: int, requests: Sequence[tuple[str, str, Sequence[int], int]]) -> None:
        model = self._model
        model.channel.send(kv_places=model.kv_transfer.export(command_id, requests))
        self._done(command_id)

    def _end_withheld(self) -> None:
        """Ends the withheld requests: an export is over, or will not be waited for. Requests that have stopped end now,
        the others end as usual."""
        if self._export_id is not None:
            failed = engine_pb2.Failed(command_id=self._export_id, reason="it took too long")
            self._model.channel.send(failed=failed)
            self._export_id = None
            stopped, self._model.outputs.stopped = self._model.outputs.stopped, {}
            for entry in self._withheld:
                entry.withheld = False
            self._withheld = [entry for entry in self._withheld if entry.rid in stopped]
        self._model.kv_transfer.let_go()
        for entry in self._withheld:
            self._refuse(entry.request_id, common_pb2.FAILED, _HANDED_BACK)
        self._withheld.clear()

    def _import_kv(self, command: engine_pb2.ImportKv) -> None:
        """Makes room for KV from another engine and reports the places. Raises NotNow."""
        self._only_alone()
        self._model.channel.send(kv_places=self._model.kv_transfer.begin_import(command))

    def _imported_kv(self, command: engine_pb2.ImportedKv) -> None:
        """Ends an import, whose KV has been copied or not. Raises NotNow."""
        self._model.kv_transfer.end_import(command.command_id, command.failed)
        self._done(command.command_id)

    def _only_alone(self) -> None:
        """Raises NotNow for engines that do not move their KV."""
        if self._model.ranks.size > 1:
            raise NotNow("an engine of several ranks does not move its KV")
        if self._model.embeds:
            raise NotNow("what makes embeddings has no KV worth while: its requests end with their prompts")

    def next_deadline_s(self, now: float) -> float | None:
        """Seconds until `tick` has something to do without an event; None: it waits for events only."""
        drained_s = None if self._drain_until is None else max(0.0, self._drain_until[1] - now)
        if not self._unread:
            return drained_s
        return _LOOK_S if drained_s is None else min(_LOOK_S, drained_s)

    def _load(self, command: engine_pb2.Load) -> None:
        raise NotNow("the engine holds a model already")

    def _verify(self, command: engine_pb2.Verify) -> None:
        if command.command_id != self._model.command_id:
            raise NotNow(f"command {command.command_id} is not the one under way ({self._model.command_id})")
        if (measured := self._lifecycle.verify()) is not None:
            self._active(measured)

    def _active(self, measured: engine_pb2.Measured) -> None:
        self._draining = False
        self._done(self._model.command_id, measured)

    def _hibernate(self, command: engine_pb2.Hibernate) -> None:
        """Hibernates once SGLang is idle. Raises NotNow while requests run."""
        if running := len(self._model.request_table):
            runs = f"{counted(running, 'request')} {agreeing(running, 'runs', 'run')}"
            raise NotNow(f"hibernate is refused: {runs}; drain first")
        self._end_withheld()
        self._model.kv_transfer.abandon()
        self._hibernate_id = command.command_id

    def _wake(self, command: engine_pb2.Wake) -> None:
        self._model.command_id = command.command_id
        self._lifecycle.wake()

    def _unload(self, command: engine_pb2.Unload) -> None:
        """Ends all requests and commands under way, and leaves the loop. Raises Unload."""
        self._end_withheld()
        for generate in self._unread:
            self._refuse(generate.request_id, common_pb2.FAILED, _HANDED_BACK)
        self._unread.clear()
        for entry in self._model.request_table:
            self._end(entry, entry.ending or common_pb2.FAILED, entry.error or _HANDED_BACK)
        # Commands that this one overtakes are reported as failed.
        overtaken = [self._hibernate_id, None if self._drain_until is None else self._drain_until[0]]
        overtaken += self._model.kv_transfer.imports
        if self._model.state in (EngineState.FILLING, EngineState.PROVING):
            overtaken.append(self._model.command_id)
        for command_id in overtaken:
            if command_id is not None:
                failed = engine_pb2.Failed(command_id=command_id, reason="the model was unloaded")
                self._model.channel.send(failed=failed)
        raise Unload(command.command_id)

    def when_idle(self) -> bool:
        """Does the work that waits for SGLang to be idle, which it is. True if something was done."""
        model = self._model
        if model.adapters is not None:
            model.adapters.tidy(model.request_table.adapters)
        if self._hibernate_id is not None:
            command_id, self._hibernate_id = self._hibernate_id, None
            self._attempt(command_id, self._lifecycle.hibernate)
            self._lifecycle.tell_kept()
            return True
        if model.probe is not None and model.probe.finished:
            try:
                measured = self._lifecycle.proven()
            except CommandError as error:
                self.fail(model.command_id, error)
                return True
            self._active(measured)
            return True
        return False

    def _attempt(self, command_id: int, work: Callable[[], None]) -> None:
        """Does the work of a command on all ranks together and reports its end."""
        try:
            with self._model.together():
                work()
        except CommandError as error:
            self.fail(command_id, error)
        else:
            self._done(command_id)
