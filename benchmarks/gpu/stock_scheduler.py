"""SGLang's Scheduler behind our socket. The front is ours, as in our own engine, so that the two cost the same: reading
in place of SGLang's sockets, sleeping when idle, and writing.

Imports SGLang: for the reference's own process.
"""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path
from typing import Any

import sglang
from sglang.srt.managers.io_struct import AbortReq, BatchTokenIDOutput, LoadLoRAAdapterReqInput
from sglang.srt.models import registry as _models  # noqa: F401  (imports what a model needs, before Hello)
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.server_args import ServerArgs

from benchmarks.gpu import stock_model
from gpu_scheduler.engines.sglang import plugin
from gpu_scheduler.engines.sglang.base import current, options
from gpu_scheduler.engines.sglang.base.environment import has_gpu
from gpu_scheduler.engines.sglang.base.errors import LeaveLoop, RejectedRequest
from gpu_scheduler.engines.sglang.base.request_table import RequestTable
from gpu_scheduler.engines.sglang.hooks import attention, cpu_kernels
from gpu_scheduler.engines.sglang.hooks import lora as hooks_lora
from gpu_scheduler.engines.sglang.hooks import process as hooks_process
from gpu_scheduler.engines.sglang.hooks.hook import Hook
from gpu_scheduler.engines.sglang.hooks.scheduler import SocketlessScheduler, step_begins
from gpu_scheduler.engines.sglang.kv.pools import latent_pool
from gpu_scheduler.engines.sglang.model import stats
from gpu_scheduler.engines.sglang.model.outputs import Outputs
from gpu_scheduler.engines.sglang.model.requests import to_sglang
from gpu_scheduler.engines.sglang.ranks.channel import Channel
from gpu_scheduler.engines.sglang.step.current import set_loop
from loader.checkpoints.architectures.kv_of_config import kv_of_folder
from protos import common_pb2, engine_pb2

_FRONT = (
    hooks_process.parallel_groups,
    hooks_process.watchdog,
    hooks_lora.unpinned,  # on a CPU alone
)


def count_retracted(result: Any, *_: Any) -> Any:
    current.model().counters.retractions += len(result[0])
    return result


def count_evicted(result: Any, *_: Any, **__: Any) -> Any:
    current.model().counters.evicted_tokens += result.num_tokens_evicted
    return result


class CountingScheduler(SocketlessScheduler):
    """SGLang's own Scheduler, which counts its steps."""

    def run_batch(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        step_begins(batch)
        return super().run_batch(batch, *args, **kwargs)


def hooks() -> list[Hook]:
    front = [hook for hook in plugin.all_hooks() if hook.function in _FRONT]
    retraction = "sglang.srt.managers.schedule_batch.ScheduleBatch.retract_decode"
    eviction = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache._evict"
    on_a_cpu = [*attention.HOOKS, *cpu_kernels.HOOKS]
    return [*front, *on_a_cpu, Hook(retraction, count_retracted, "AFTER"), Hook(eviction, count_evicted, "AFTER")]


class StockOutputs(Outputs):
    """Takes what SGLang gathers for its detokenizer."""

    def send_output(self, output: Any, _received: Any = None) -> None:
        if not isinstance(output, BatchTokenIDOutput):
            super().send_output(output)
            return
        message = engine_pb2.FromEngine()
        chosen = output.output_token_logprobs_val
        best = output.output_top_logprobs_val, output.output_top_logprobs_idx
        for i, rid in enumerate(output.rids):
            logprobs = (chosen[i], best[0][i], best[1][i]) if chosen else None
            self.add(message, rid, output.output_ids[i], output.finished_reasons[i], output.cached_tokens[i], logprobs)
        self.send(message)


class Front:
    """A stand-in for our engine's instance and its loop, for a Scheduler of SGLang's that has neither."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.request_table = RequestTable()
        self.counters = stats.EngineCounters()
        self.probe = None  # it measures nothing of its own, so all tokens count
        self.outputs = StockOutputs(self.request_table, channel.send_message, lambda *_: None)
        self._told_at = 0.0
        self._adapters: set[str] = set()
        """Those that SGLang has read."""

    def build(self, load: engine_pb2.Load) -> None:
        named = stock_model.sglang_arguments(load)
        index = int(load.device.partition(":")[2] or 0)
        stock_model.bound(load)
        server_args = ServerArgs(**named)
        publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=index))
        self.scheduler = CountingScheduler(server_args, options.port_args())
        stock_model.check_pool(named["max_total_tokens"], self.scheduler.max_total_num_tokens)
        self._context_tokens = int(self.scheduler.model_config.context_len) - options.CONTEXT_SLACK_TOKENS
        kinds = kv_of_folder(Path(load.model.path), self.scheduler.tp_worker.model_runner.kv_cache_dtype.itemsize, 1)
        # Nothing is told of a model whose KV the loader does not know.
        self._bytes_per_token = 0 if kinds is None else kinds.marginal(0)
        measured = engine_pb2.Measured(kv_bytes_per_token=self._bytes_per_token, context_tokens=self._context_tokens)
        self.channel.send(done=engine_pb2.Done(command_id=load.command_id, measured=measured))

    # --- called by the Scheduler

    def prefill_begins(self, prompts: int) -> None:
        """The reference prefills whenever it can."""

    def decode_begins(self) -> None:
        """And decodes when it does not."""

    def pull(self) -> list[Any]:
        inputs: list[Any] = []
        for message in self.channel.receive():
            kind = message.WhichOneof("message")
            if kind == "shutdown":
                raise LeaveLoop("shutdown")
            if kind == "generate":
                inputs += self._generate(message.generate)
            elif kind == "abort":
                inputs += self._abort(message.abort.request_id)
            else:
                raise ValueError(f"the reference has no {kind}")
        if self.channel.closed:
            raise LeaveLoop("the benchmark is gone")
        if time.monotonic() - self._told_at >= stats.EVERY_S:
            self._tell()
        return inputs

    def sleep(self) -> None:
        self._tell()
        self.channel.wait(None)

    # --- requests

    def _generate(self, generate: engine_pb2.Generate) -> list[Any]:
        entry = self.request_table.add(generate.request_id, len(generate.token_ids), generate.resumed_tokens)
        try:
            vocabulary = int(self.scheduler.model_config.vocab_size)
            adapter = self._adapter_of(generate)
            return [to_sglang(generate, entry.rid, self._context_tokens, vocabulary, adapter=adapter)]
        except RejectedRequest as error:
            self.request_table.close(entry)
            rejected = common_pb2.TokenChunk(request_id=entry.request_id, finish=common_pb2.REJECTED, error=str(error))
            self._send_chunks([rejected])
            return []

    def _adapter_of(self, generate: engine_pb2.Generate) -> str | None:
        """SGLang's id of the request's adapter, which it reads if it has not yet. Raises RejectedRequest if it
        cannot."""
        if not generate.HasField("adapter"):
            return None
        name, path = generate.adapter.name, generate.adapter.path
        if name not in self._adapters:
            asked = LoadLoRAAdapterReqInput(lora_name=name, lora_path=path, lora_id=name)
            result = self.scheduler.load_lora_adapter(asked)
            if not result.success:
                raise RejectedRequest(f"SGLang cannot read adapter {name}: {result.error_message}")
            self._adapters.add(name)
        return name

    def _abort(self, request_id: str) -> list[Any]:
        entry = self.request_table.by_id(request_id)
        if entry is None:
            return []
        entry.ending = common_pb2.ABORTED
        return [AbortReq(rid=entry.rid)]

    def _send_chunks(self, chunks: list[common_pb2.TokenChunk]) -> None:
        self.channel.send(tokens=engine_pb2.Tokens(chunks=chunks))

    def _tell(self) -> None:
        self._told_at = time.monotonic()
        scheduler, counters = self.scheduler, self.counters
        allocator = scheduler.token_to_kv_pool_allocator
        cached = scheduler.tree_cache.full_evictable_size()
        # If windows have a pool of their own, the tokens of the other layers are counted.
        free = allocator.full_available_size() if scheduler.is_hybrid_swa else allocator.available_size()
        pool = scheduler.max_total_num_tokens
        told = engine_pb2.EngineStats(
            running=stats.running(scheduler),
            waiting=len(scheduler.waiting_queue),
            kv_held_bytes=pool * self._bytes_per_token,
            kv_used_bytes=(pool - free - cached) * self._bytes_per_token,
            kv_cached_bytes=cached * self._bytes_per_token,
            kv_limit_bytes=pool * self._bytes_per_token,
            retractions=counters.retractions,
            evicted_tokens=counters.evicted_tokens,
            forward_steps=counters.forward_steps,
            prefill_tokens=counters.prefill_tokens,
            decode_tokens=counters.decode_tokens,
        )
        self.channel.send(stats=told)


def run(channel_fd: int) -> None:
    for hook in hooks():
        HookRegistry.register(hook.target, hook.function, HookType[hook.kind])
    load_plugins()
    plugin.verify(hooks())
    if not has_gpu():
        latent_pool.attend_by_torch()
    gc.collect()
    gc.freeze()  # as our engine does
    channel = Channel(channel_fd)
    channel.send(hello=engine_pb2.Hello(pid=os.getpid(), engine="stock", version=sglang.__version__))
    front = Front(channel)
    current.set_model(front)
    set_loop(front)  # type: ignore[arg-type]
    channel.wait(None)
    first = channel.receive()
    if not first:
        return
    channel.unread(first[1:])
    front.build(first[0].load)
    try:
        front.scheduler.run_event_loop()
    except LeaveLoop:
        pass
