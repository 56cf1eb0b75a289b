"""The echo engine's loop: read commands, take a step, send the step's tokens.

Options of Load, all numbers as text: `step_ms` (milliseconds of one decode step, default 1), `prefill_tokens_per_s`
(default: prefill takes no time), `kept_bytes` (bytes that it reports to keep on its device once the model has left,
default 0).
"""

from __future__ import annotations

import os
import select
import time
from dataclasses import dataclass, field

from gpu_scheduler.engines.echo.errors import OutOfMemory, WrongPattern
from gpu_scheduler.engines.echo.memory import EchoMemory, open_memory
from gpu_scheduler.engines.echo.rule import embedding, label_logprobs, next_token
from kv_kinds import messages
from protos import common_pb2, engine_pb2
from services.ipc.framing import BlockingChannel
from services.telemetry import log

_log = log.get(__name__)
_STATS_EVERY_S = 0.1
_AGAIN_S = 0.2
"""Seconds after which a prompt that found no memory is tried again, if no request has ended before."""


@dataclass
class _Running:
    request: engine_pb2.Generate
    context: list[int]
    emitted: int = 0
    eos: frozenset[int] = field(default_factory=frozenset)


class EchoEngine:
    """Serves one model at a time; see the package docstring."""

    def __init__(self, channel: BlockingChannel[engine_pb2.ToEngine]) -> None:
        self._channel = channel
        self._memory: EchoMemory | None = None
        self._step_s = 0.001
        self._prefill_s_per_token = 0.0
        self._kept_bytes = 0
        self._dimensions = 0
        """Dimensions of the model's embeddings; 0: it makes text."""
        self._waiting: list[_Running] = []
        self._running: dict[str, _Running] = {}
        self._next_step = 0.0
        self._next_prefill = 0.0
        self._drain: tuple[int, float] | None = None
        """(command_id, end in monotonic seconds) of the Drain under way; (0, +inf) once it is over."""
        self._stop = False
        self._stats = engine_pb2.EngineStats()
        self._stats_at = 0.0
        self._stats_due = False

    def run(self) -> None:
        self._send(hello=engine_pb2.Hello(pid=os.getpid(), engine="echo", version="1"))
        while not self._stop and not self._channel.closed:
            self._wait()
            for message in self._channel.recv_ready():
                self._take(message)
            if self._memory is not None:
                self._memory.attend(idle=not self._running)
            self._step(time.monotonic())
        if self._memory is not None:
            self._memory.close()

    # --- waiting

    def _wait(self) -> None:
        """Waits until a command comes, memory has work to do, or the next step is due; for ever if there is nothing to
        do."""
        reads = [self._channel.fileno()]
        if self._memory is not None and self._memory.wake_fd is not None:
            reads.append(self._memory.wake_fd)
        writes = [self._channel.fileno()] if self._channel.pending else []
        now = time.monotonic()
        timeout = None
        if self._waiting:
            timeout = max(0.0, self._next_prefill - now)
        if self._running:
            until_step = max(0.0, self._next_step - now)
            timeout = until_step if timeout is None else min(timeout, until_step)
        if self._drain is not None and self._drain[0]:  # a finished drain has nothing to wait for
            until_end = max(0.0, self._drain[1] - now)
            timeout = until_end if timeout is None else min(timeout, until_end)
        if self._stats_due:
            until_stats = max(0.0, self._stats_at + _STATS_EVERY_S - now)
            timeout = until_stats if timeout is None else min(timeout, until_stats)
        _, writable, _ = select.select(reads, writes, [], timeout)
        if writable:
            self._channel.flush_ready()

    # --- commands

    def _send(self, **message: object) -> None:
        self._channel.send(engine_pb2.FromEngine(**message))  # type: ignore[arg-type]

    def _take(self, message: engine_pb2.ToEngine) -> None:
        kind = message.WhichOneof("message")
        if kind == "generate":
            self._accept(message.generate)
        elif kind == "abort":
            self._end(message.abort.request_id, common_pb2.ABORTED)
        elif kind == "shutdown":
            self._stop = True
        elif kind == "ping":
            self._send(pong=engine_pb2.Pong())
        elif kind == "forget_adapter":
            pass  # what it says does not depend on adapters
        elif kind == "drain":
            command = message.drain
            self._drain = (command.command_id, time.monotonic() + command.finish_ms / 1e3)
        else:
            command = getattr(message, str(kind))
            try:
                getattr(self, f"_{kind}", self._unknown)(command)
            except (OutOfMemory, WrongPattern, ValueError) as error:
                differ = isinstance(error, WrongPattern)
                self._send(
                    failed=engine_pb2.Failed(command_id=command.command_id, reason=str(error), weights_differ=differ)
                )

    def _unknown(self, command: object) -> None:
        raise ValueError(f"the echo engine knows no {type(command).__name__}")

    def _load(self, command: engine_pb2.Load) -> None:
        if self._memory is not None:
            raise ValueError("this engine holds a model already")
        options = command.options
        self._step_s = float(options.get("step_ms", "1")) / 1e3
        speed = float(options.get("prefill_tokens_per_s", "0"))
        self._prefill_s_per_token = 1 / speed if speed else 0.0
        self._kept_bytes = int(options.get("kept_bytes", "0"))
        self._dimensions = command.model.embedding.dimensions
        self._memory = open_memory(command)
        try:
            manifest, checksum = self._memory.map_weights(fill=not command.from_image)
        except OutOfMemory:
            self._memory.close()
            self._memory = None
            raise
        self._announce_weights(command.command_id, manifest, checksum)
        if not command.from_image:
            self._activate(command.command_id)

    def _announce_weights(self, command_id: int, manifest: bytes, checksum: str) -> None:
        memory = self._held()
        self._send(
            weights_mapped=engine_pb2.WeightsMapped(
                command_id=command_id,
                lease_id=memory.lease_id,
                manifest=manifest,
                checksum=checksum,
                weights_bytes=memory.weights_bytes,
            )
        )

    def _held(self) -> EchoMemory:
        if self._memory is None:
            raise ValueError("this engine holds no model")
        return self._memory

    def _verify(self, command: engine_pb2.Verify) -> None:
        self._held().verify()
        self._activate(command.command_id)

    def _activate(self, command_id: int) -> None:
        memory = self._held()
        memory.start_kv()
        self._drain = None
        measured = engine_pb2.Measured(
            weights_bytes=memory.weights_bytes,
            kv_bytes_per_token=memory.kv.marginal(0),
            kv_kinds=messages.kinds(memory.kv),
            prefill_tokens_per_s=1 / self._prefill_s_per_token if self._prefill_s_per_token else 1e6,
            decode_step_ms=1e3 * self._step_s,
            context_tokens=memory.context_tokens,
        )
        self._send(done=engine_pb2.Done(command_id=command_id, measured=measured))

    def _hibernate(self, command: engine_pb2.Hibernate) -> None:
        memory = self._held()
        if self._running or self._waiting:
            raise ValueError("requests run; drain first")
        memory.leave()
        self._stats.hibernations += 1
        self._stats_due = True
        self._send(done=engine_pb2.Done(command_id=command.command_id))

    def _wake(self, command: engine_pb2.Wake) -> None:
        manifest, checksum = self._held().map_weights(fill=False)
        self._announce_weights(command.command_id, manifest, checksum)

    def _unload(self, command: engine_pb2.Unload) -> None:
        for request_id in [r.request.request_id for r in self._waiting] + list(self._running):
            self._end(request_id, common_pb2.FAILED, "handed back")
        if self._memory is not None:
            self._memory.close()
            self._memory = None
        self._stats = engine_pb2.EngineStats()
        self._drain = None
        self._send(kept=engine_pb2.Kept(bytes=self._kept_bytes))
        self._send(done=engine_pb2.Done(command_id=command.command_id))

    # --- requests

    def _accept(self, request: engine_pb2.Generate) -> None:
        running = _Running(request, list(request.token_ids))
        if self._memory is None or self._drain is not None:
            self._send_chunks([self._last_chunk(request.request_id, common_pb2.FAILED, "not serving")])
            return
        if request.sampling.WhichOneof("grammar") is not None:
            why = "the echo engine serves no grammars and no tool_choice that needs one"
            self._send_chunks([self._last_chunk(request.request_id, common_pb2.REJECTED, why)])
            return
        if request.embed != bool(self._dimensions):
            self._send_chunks(
                [self._last_chunk(request.request_id, common_pb2.REJECTED, "the model makes no such thing")]
            )
            return
        running.eos = frozenset(request.sampling.stop_token_ids)
        self._waiting.append(running)
        self._waiting.sort(key=lambda r: r.request.priority)

    @staticmethod
    def _last_chunk(request_id: str, finish: common_pb2.Finish, error: str = "") -> common_pb2.TokenChunk:
        return common_pb2.TokenChunk(request_id=request_id, finish=finish, error=error)

    def _send_chunks(self, chunks: list[common_pb2.TokenChunk]) -> None:
        if chunks:
            self._send(tokens=engine_pb2.Tokens(chunks=chunks))

    def _end(self, request_id: str, finish: common_pb2.Finish, error: str = "") -> None:
        known = self._running.pop(request_id, None) is not None
        kept = [r for r in self._waiting if r.request.request_id != request_id]
        known = known or len(kept) < len(self._waiting)
        self._waiting = kept
        if known:
            self._free(request_id)
            self._send_chunks([self._last_chunk(request_id, finish, error)])

    def _free(self, request_id: str) -> None:
        self._next_prefill = 0.0
        if self._memory is not None:
            self._memory.free(request_id)
        self._stats_due = True

    def _step(self, now: float) -> None:
        chunks: list[common_pb2.TokenChunk] = []
        if self._waiting and self._drain is None and now >= self._next_prefill:
            chunks += self._prefill()
        # If a prompt finds no memory, running requests go on: the prompt waits for their end.
        if not chunks and self._running and now >= self._next_step:
            chunks += [chunk for running in list(self._running.values()) if (chunk := self._advance(running))]
            self._stats.forward_steps += 1
            self._stats.decode_tokens += len(chunks)
            # Steps keep their interval; after a stall it starts anew instead of catching up.
            self._next_step = max(self._next_step + self._step_s, now)
        self._send_chunks(chunks)
        if self._drain is not None:
            self._continue_drain(now)
        if self._stats_due and now - self._stats_at >= _STATS_EVERY_S:
            self._tell_stats(now)

    def _prefill(self) -> list[common_pb2.TokenChunk]:
        """Starts every waiting request that fits, in one forward pass for all of them."""
        assert self._memory is not None
        chunks: list[common_pb2.TokenChunk] = []
        started: list[_Running] = []
        tokens = 0
        while self._waiting:
            running = self._waiting[0]
            if not self._memory.fit(running.request.request_id, len(running.context)):
                if not self._running and not started:
                    # This engine can never make room for it: back into the shared queue.
                    self._waiting.pop(0)
                    self._free(running.request.request_id)
                    self._send(parked=engine_pb2.Parked(request_id=running.request.request_id))
                    continue
                self._next_prefill = time.monotonic() + _AGAIN_S
                break
            started.append(self._waiting.pop(0))
            tokens += len(running.context)
        if self._prefill_s_per_token:
            time.sleep(tokens * self._prefill_s_per_token)  # the forward pass: the process is busy meanwhile
        now = time.monotonic()
        if not self._running:
            self._next_step = now + self._step_s
        for running in started:
            if running.request.embed:
                chunks.append(self._embed(running.request))
                continue
            if running.request.sampling.HasField("prompt_logprobs_from"):
                chunks.append(self._scored_prompt(running.request))
            if running.request.sampling.prompt_only:
                self._free(running.request.request_id)
                chunks.append(self._last_chunk(running.request.request_id, common_pb2.LENGTH))
                labels = running.request.sampling.label_token_ids
                chunks[-1].label_logprobs.extend(label_logprobs(running.context, labels))
                continue
            self._running[running.request.request_id] = running
            chunk = self._advance(running)
            if chunk is not None:
                chunk.prompt_tokens = len(running.request.token_ids)
                chunks.append(chunk)
        self._stats.prefill_tokens += tokens
        self._stats_due = True
        return chunks

    def _embed(self, request: engine_pb2.Generate) -> common_pb2.TokenChunk:
        self._free(request.request_id)
        return common_pb2.TokenChunk(
            request_id=request.request_id,
            embedding=embedding(request.token_ids, self._dimensions),
            finish=common_pb2.STOP,
            prompt_tokens=len(request.token_ids),
        )

    @staticmethod
    def _scored_prompt(request: engine_pb2.Generate) -> common_pb2.TokenChunk:
        """Log-probabilities of the prompt: all its tokens are certain, as those of answers are."""
        scores = [common_pb2.TokenLogprob()] * (len(request.token_ids) - request.sampling.prompt_logprobs_from)
        return common_pb2.TokenChunk(request_id=request.request_id, prompt_logprobs=scores)

    def _advance(self, running: _Running) -> common_pb2.TokenChunk | None:
        """Generates one token of one request. None if the request had to be parked for want of memory."""
        assert self._memory is not None
        request = running.request
        if not self._memory.fit(request.request_id, len(running.context) + 1):
            self._running.pop(request.request_id, None)
            self._free(request.request_id)
            self._stats.retractions += 1
            self._send(parked=engine_pb2.Parked(request_id=request.request_id))
            return None
        token = next_token(running.context)
        running.context.append(token)
        running.emitted += 1
        chunk = common_pb2.TokenChunk(request_id=request.request_id, token_ids=[token])
        if request.sampling.logprobs:
            chunk.logprobs.add(logprob=0.0)
        if token in running.eos and not request.sampling.ignore_eos:
            chunk.finish = common_pb2.STOP
        elif running.emitted >= request.sampling.max_new_tokens > 0:
            chunk.finish = common_pb2.LENGTH
        elif len(running.context) >= self._memory.context_tokens > 0:
            chunk.finish = common_pb2.LENGTH
        if chunk.finish:
            self._running.pop(request.request_id, None)
            self._free(request.request_id)
        return chunk

    def _continue_drain(self, now: float) -> None:
        assert self._drain is not None
        command_id, until = self._drain
        over = list(self._running) if now >= until else []
        # Waiting requests are not started any more.
        for request_id in [r.request.request_id for r in self._waiting] + over:
            self._end(request_id, common_pb2.FAILED, "handed back")
        if not self._running and not self._waiting and command_id:
            self._send(done=engine_pb2.Done(command_id=command_id))
            self._drain = (0, float("inf"))

    def _tell_stats(self, now: float) -> None:
        self._stats_at, self._stats_due = now, bool(self._running)
        self._stats.running = len(self._running)
        self._stats.waiting = len(self._waiting)
        if self._memory is not None:
            self._memory.describe(self._stats)
        self._send(stats=self._stats)
