"""One model in this engine, from Load to Unload: its parts, and how it is built, proven, put to sleep and taken apart.

Imports SGLang: only the engine process may import this.
"""

from __future__ import annotations

import gc
import math
import os
import time
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.managers.io_struct import TokenizedEmbeddingReqInput, TokenizedGenerateReqInput
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from gpu_scheduler.engines.sglang.base import collector, current, device, options, stalls
from gpu_scheduler.engines.sglang.base.errors import BrokenModel, CommandError, NoMemory, RejectedRequest, WrongWeights
from gpu_scheduler.engines.sglang.base.request_table import RequestTable
from gpu_scheduler.engines.sglang.base.states import EngineState
from gpu_scheduler.engines.sglang.kv.admission import Admission
from gpu_scheduler.engines.sglang.kv.elastic_kv import ElasticKv
from gpu_scheduler.engines.sglang.kv.kv_transfer import KvTransfer
from gpu_scheduler.engines.sglang.memory.graph_memory import GraphMemory
from gpu_scheduler.engines.sglang.memory.model_memory import ModelMemory
from gpu_scheduler.engines.sglang.memory.shared_range import SharedRange
from gpu_scheduler.engines.sglang.model import quota, teardown
from gpu_scheduler.engines.sglang.model.outputs import Outputs
from gpu_scheduler.engines.sglang.model.probe import PROMPT_TOKENS, Probe
from gpu_scheduler.engines.sglang.model.requests import EosIds, to_embed, to_sglang
from gpu_scheduler.engines.sglang.model.stats import EngineCounters
from gpu_scheduler.engines.sglang.policy import quota as policy
from gpu_scheduler.engines.sglang.policy.agreement import RankFacts
from gpu_scheduler.engines.sglang.policy.grammar import slow_of
from gpu_scheduler.engines.sglang.weights import post_processing, weights_range
from gpu_scheduler.engines.sglang.weights.loader import CheckpointLoader, ImageLoader, RandomLoader
from gpu_scheduler.engines.sharing.step_gate import StepAnswer
from protos import common_pb2, engine_pb2
from services.telemetry import log

if TYPE_CHECKING:
    from gpu_scheduler.engines.sglang.ranks.channel import Channel, FollowerChannel
    from gpu_scheduler.engines.sglang.ranks.ranks import Ranks
    from gpu_scheduler.engines.sglang.weights.read_ahead import ReadAhead

_log = log.get(__name__)
_STRICT = os.environ.get("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY") == "1"
_PROGRESS_EVERY_S = 0.1
_KV_DIFFERENCE = 0.02
"""Share by which a token's KV may differ from what config.json makes it: pools round pages."""
_MAP_DUMMY_WAIT_S = 5.0
_WEIGHTS_SPAN_BYTES = 256 << 30
"""Bytes of addresses for weights where the size of the checkpoint is not known. Where it is known, twice as many bytes
are reserved: layers may be widened, and quantised ones are not what their files are."""
_GRAPHS_SPAN_BYTES = 16 << 30
"""Bytes of addresses for memory of CUDA graphs."""


class Instance:
    """One model, made by a Load. SGLang's hooks find it through `current` while it exists."""

    scheduler: Any
    server_args: Any
    """SGLang's ServerArgs for this model."""
    kv: ElasticKv
    admission: Admission
    kv_transfer: KvTransfer

    def __init__(
        self,
        load: engine_pb2.Load,
        memory: ModelMemory,
        channel: Channel | FollowerChannel,
        ranks: Ranks,
    ) -> None:
        self.load = load
        self.memory = memory
        self.ranks = ranks
        self.channel = channel
        self.counters = EngineCounters()
        self.options = options.Options.parse(load.options, load.device, load.model)
        stalls.trace(self.options.stall_trace_ms)
        self.device = torch.device(load.device)
        self.state = EngineState.WARM
        self.request_table = RequestTable()
        self.probe: Probe | None = None
        self.outputs = Outputs(self.request_table, channel.send_message, self._heard_probe)
        self._measured: engine_pb2.Measured | None = None
        """Measurements of the model, once it was proven in this process."""
        self.graphs: GraphMemory | None = None
        """Memory of CUDA graphs, if it leaves while the model sleeps."""
        self._clean = True
        """True if every closed CUDA graph released its memory."""
        self.booked_bytes = 0
        """Bytes that this process may take of its device beside extents; 0: no bound."""
        self.paddings: set[int] = set()
        """Widths by which SGLang may pad tensors of the checkpoint (`never_make_up` in `hooks/process.py`)."""
        self.reader: ReadAhead | None = None
        """The reader of the checkpoint's files, while they are read."""
        self.checksum = load.expected_checksum
        self._weights: weights_range.MappedWeights | None = None
        self._manifest = b""
        self._progress_at = 0.0
        self._missing: CommandError | None = None
        """Error in restoring CUDA graphs on wake; raised by `verify`."""
        self.command_id = load.command_id
        """Id of the command under way that loads or wakes the model."""

    # --- several ranks

    @contextmanager
    def together(self) -> Iterator[None]:
        """Context for work that may fail on one rank: each rank does its part inside, and afterwards all go on, or all
        raise CommandError."""
        failure: CommandError | None = None
        try:
            yield
        except CommandError as error:
            failure = error
        self.ranks.settle(failure)

    def _facts(self) -> RankFacts:
        """This rank's facts for the next step."""
        shared = self.memory.kv
        assert isinstance(shared, SharedRange)
        slow = slow_of(self.scheduler.running_batch)
        mark = self._mark() if _STRICT else None
        return replace(shared.facts(), arrived=self.kv.ids.arrived(), slow=slow, mark=mark)

    def _mark(self) -> Hashable:
        """Digest of the state that SGLang's scheduler decides by; for tests, that no rank decides differently."""
        scheduler, envelopes = self.scheduler, self.kv.envelopes
        running = scheduler.running_batch.reqs
        return (
            self.state.value,
            (envelopes.available, envelopes.live, envelopes.held, scheduler.tree_cache.evictable_size()),
            tuple(request.rid for request in scheduler.waiting_queue),
            tuple((request.rid, len(request.output_ids)) for request in running),
        )

    def running(self) -> list[tuple[str, list[int], int]]:
        """(request id, all tokens so far, tokens that may follow) of each request whose prompt is computed."""
        found = []
        for request in self.scheduler.running_batch.reqs:
            entry = self.request_table.by_rid(request.rid)
            if entry is not None and not request.finished():
                left = request.sampling_params.max_new_tokens - len(request.output_ids)
                found.append((entry.request_id, [*request.origin_input_ids, *request.output_ids], max(0, left)))
        return found

    # --- reports

    def send_chunks(self, chunks: list[common_pb2.TokenChunk]) -> None:
        """Sends chunks of requests' outputs to the gpu_scheduler."""
        self.channel.send(tokens=engine_pb2.Tokens(chunks=chunks))

    def progress(self, step: str, done: int, total: int) -> None:
        """Reports `done` of `total` bytes of a step, at most ten times a second, and at the end."""
        now = time.monotonic()
        if now - self._progress_at >= _PROGRESS_EVERY_S or done >= total:
            self._progress_at = now
            progress = common_pb2.Progress(step=step, done=done, total=total, unit="bytes")
            self.channel.send(progress=engine_pb2.Progressed(command_id=self.command_id, progress=progress))

    def _tell_weights_mapped(self, checksum: str) -> None:
        """Reports where the weights lie on each rank. `checksum` is empty until they are filled."""
        mapped = engine_pb2.WeightsMapped(
            command_id=self.command_id,
            lease_id=self.memory.lease_id,
            manifest=self._manifest,
            checksum=checksum,
            weights_bytes=self.memory.weights_bytes,
            rank=self.ranks.rank,
        )
        for each in self.ranks.gather(mapped):
            self.channel.send(weights_mapped=each)

    # --- building

    def build(self) -> None:
        """Makes SGLang's Scheduler: reads or awaits the weights, makes the pools. Raises CommandError."""
        devices = self.ranks.gather(self.load.device)
        peers = all(self.ranks.gather(device.reads(self.device, devices)))
        device.restore_stack(self.device)
        loader: type = RandomLoader if self.options.random_weights else CheckpointLoader
        if self.load.from_image:
            loader = ImageLoader
        ranks = self.ranks.size
        arguments = options.server_args(self.load.model, self.load.device, self.options, loader, ranks, peers)
        self.server_args = arguments
        index = int(self.load.device.partition(":")[2] or 0)
        os.environ["SGLANG_LOGPROB_CHUNK_SIZE"] = str(self.options.scored_together)  # read as the model is made
        scheduler = Scheduler(arguments, options.port_args(), index, self.ranks.rank, 0, 0, 0, 0, None)
        self.scheduler = scheduler
        self.kv = scheduler.token_to_kv_pool_allocator.kv
        self._check_kv()
        assert self.memory.kv is not None
        self.ranks.listen(self._facts, self.memory.kv.wake_fd)
        # It is enough for min_new_tokens; stop strings are matched in the gateway.
        scheduler.tokenizer = EosIds(scheduler.model_config.hf_eos_token_id or (), scheduler.model_config.vocab_size)
        self.admission = Admission(
            self.kv, self.options.soft_wait_ms / 1e3, self.options.hard_wait_ms / 1e3, self._evict_tokens
        )
        self.kv_transfer = KvTransfer(self.kv, self.admission, scheduler, self.memory.lease_id, self.device)
        self.state = EngineState.FILLING if self.load.from_image else EngineState.PROVING
        if not self.load.from_image:
            self._begin_probe()

    def _check_kv(self) -> None:
        """Raises BrokenModel if SGLang's pools take other bytes for a token than the loader found by config.json:
        floor, admission and placement would count with wrong ones."""
        model, found = self.load.model, self.kv.bytes_of(1)
        expected = -(-model.kv_bytes_per_token // max(1, model.devices))
        if expected and abs(found - expected) > _KV_DIFFERENCE * expected:
            raise BrokenModel(
                f"{model.path}: a token's KV takes {found} bytes of each device, and config.json makes it {expected}"
            )

    def open_graphs(self) -> GraphMemory | None:
        """Memory for CUDA graphs that leaves with the weights and the KV. None where graphs take ordinary memory: not
        on a GPU, not wanted, no room, or several ranks, which read each other's buffers by a mechanism that works with
        ordinary memory only."""
        on_gpu = self.device.type == "cuda" and self.options.cuda_graphs and not self.embeds
        if on_gpu and self.options.graphs_leave and self.ranks.size == 1:
            pieces, memory = self.memory.open_pieces(_GRAPHS_SPAN_BYTES)
            try:
                self.graphs = GraphMemory(pieces, memory)
            except (NoMemory, OSError, RuntimeError, AttributeError, TypeError) as error:
                pieces.close()
                self.give_up_graphs(options.one_line(error))
        return self.graphs

    def give_up_graphs(self, why: str) -> None:
        """Returns to ordinary memory for CUDA graphs, for the reason `why`."""
        _log.warning("CUDA graphs take memory that stays while the model sleeps", model=self.load.model.name, why=why)
        gc.collect()
        self._close_graphs()

    def _close_graphs(self) -> None:
        graphs, self.graphs = self.graphs, None
        if graphs is not None:
            self._clean &= graphs.close()

    @contextmanager
    def weights_born_here(self, *, copy: bool) -> Iterator[None]:
        """Context for the loaders, in which SGLang builds the model and its parameters go to their final places; with
        the values that SGLang makes them with, if `copy`."""
        span = 2 * self.load.model.weights_bytes or _WEIGHTS_SPAN_BYTES
        self._weights = weights_range.MappedWeights(self.memory.open_weights(span), self.memory.need_weights)
        with weights_range.born_in(self._weights, copy=copy):
            yield

    def process_weights(self, model: torch.nn.Module) -> None:
        """Has SGLang process the weights that were read, for its kernels; what is made of them goes into the weights
        range. Called within `weights_born_here`. Raises BrokenModel, NoMemory."""
        assert self._weights is not None
        post_processing.process(model, self._weights)

    def bind_weights(self, model: torch.nn.Module, *, copy: bool) -> None:
        """Moves tensors that are elsewhere into the weights range as well, and reports the layout to the gpu_scheduler.
        Called by the loaders, once. Raises CommandError, on all ranks."""
        assert self._weights is not None
        with self.together():
            weights_range.bind(model, self._weights, copy=copy)
            if weights_range.close_gaps(model, self._weights):
                device.finish(self.device)
                self.memory.shrink_weights(self._weights.used)
        device.finish(self.device)  # their old places go back to the device
        device.forget_peak(self.device)
        layout = weights_range.lay_out(model, self._weights)
        manifest = weights_range.manifest(layout, self.memory.weights_bytes, weights_range.python_scalars(model))
        self._manifest = manifest.SerializeToString(deterministic=True)
        if copy:
            self.checksum = self._sum_weights()
        self._tell_weights_mapped(self.checksum if copy else "")

    def _sum_weights(self) -> str:
        """Checksum of the whole weights range."""
        assert self._weights is not None
        return weights_range.checksum(self._weights.memory[: self.memory.weights_bytes])

    @property
    def context_tokens(self) -> int:
        """Most tokens of a request, prompt and output together."""
        return int(self.scheduler.model_config.context_len) - options.CONTEXT_SLACK_TOKENS

    @property
    def vocab_size(self) -> int:
        """Tokens of the model's vocabulary."""
        return int(self.scheduler.model_config.vocab_size)

    @property
    def embeds(self) -> bool:
        """Whether the model makes embeddings, and no text."""
        return self.load.model.HasField("embedding")

    def to_sglang(
        self, generate: engine_pb2.Generate, rid: str
    ) -> TokenizedGenerateReqInput | TokenizedEmbeddingReqInput:
        """SGLang's request for a Generate message. Raises RejectedRequest for a request that this model can never
        run."""
        if generate.embed != self.embeds:
            raise RejectedRequest(f"the model makes {'embeddings' if self.embeds else 'text'}")
        if generate.embed:
            return to_embed(generate, rid, self.context_tokens, self.vocab_size)
        return to_sglang(generate, rid, self.context_tokens, self.vocab_size, self.ranks.seed)

    def _evict_tokens(self, tree: Any, tokens: int) -> None:
        tree.evict(EvictParams(num_tokens=tokens))

    # --- proving

    def verify(self) -> engine_pb2.Measured | None:
        """Checks the filled weights range and maps the dummy KV block. After a wake the model is active again, and its
        measurements are returned as they were: its weights are those that passed the probe, bit for bit. Else the probe
        begins, and None is returned. Raises CommandError with everything unmapped again."""
        try:
            with self.together():
                missing, self._missing = self._missing, None
                if missing is not None:
                    raise missing
                found = self._sum_weights()
                if self.checksum and found != self.checksum:
                    raise WrongWeights(f"the weights do not verify: {found} instead of {self.checksum}")
            self.checksum = found
            self.kv.hold_dummy(_MAP_DUMMY_WAIT_S)
        except CommandError:
            self.roll_back()
            raise
        if self._measured is not None:
            self.state = EngineState.ACTIVE
            return self._measured
        self.state = EngineState.PROVING
        self._begin_probe()
        return None

    @property
    def decode_step_s(self) -> float:
        """Seconds of a decode step of one request alone on the device; 0 before it was measured."""
        return 0.0 if self._measured is None else self._measured.decode_step_ms / 1e3

    def decodes_within(self, seconds: float) -> None:
        """Lowers the measured duration of a decode step to `seconds`, if that is less. The probe may have measured too
        much: where a host starts many models at once, four prove themselves on a device while kernels are compiled. An
        engine that believes its target to be out of reach makes no bid (`engines/sharing/decode_arbitration.py`), for
        as long as it lives."""
        if self._measured is not None and seconds < self.decode_step_s:
            self._measured.decode_step_ms = 1e3 * seconds

    def _begin_probe(self) -> None:
        """Begins the probe, with a prompt of a whole chunk on a GPU."""
        tokens = self.options.chunked_prefill_size if self.device.type == "cuda" else PROMPT_TOKENS
        self.probe = Probe(self.vocab_size, self.context_tokens, tokens, self.options.probe_together, self.embeds)

    def _heard_probe(self, rid: str, token_ids: list[int], values: list[float], ended: bool) -> None:
        """Passes output of a request that is not in the table to the probe."""
        if self.probe is not None and self.probe.has(rid):
            self.probe.heard(token_ids, values, ended)

    def proven(self) -> engine_pb2.Measured:
        """Makes the model active and returns its measurements; called once the probe has ended and SGLang is idle.
        Raises CommandError, with everything unmapped again, if the probe failed or its output is not a number."""
        assert self.probe is not None
        trace, problem, self.probe = self.probe.trace, self.probe.problem, None
        teardown.prefixes(self.scheduler)
        if problem:
            self.roll_back()
            raise NoMemory(problem)
        if not all(math.isfinite(value) for value in trace.values):
            self.roll_back()
            raise BrokenModel(f"{self.load.model.path}: the model's output is not a number")
        gc.collect()
        private_bytes, booked = self._within_quota()
        collector.settle()
        self.state = EngineState.ACTIVE
        own = engine_pb2.Measured.Rank(
            lease_id=self.memory.lease_id, weights_bytes=self.memory.weights_bytes, private_bytes=private_bytes
        )
        ranks = self.ranks.gather(own)
        self._measured = engine_pb2.Measured(
            weights_bytes=max(rank.weights_bytes for rank in ranks),
            kv_bytes_per_token=self.kv.bytes_of(1),
            private_bytes=max(rank.private_bytes for rank in ranks),
            ranks=ranks,
            prefill_tokens_per_s=trace.prefill_tokens_per_s,
            prefill_chunk_tokens=trace.prefill_tokens,
            decode_step_ms=trace.decode_step_ms,
            context_tokens=self.context_tokens,
            graph_bytes=self.graphs.mapped_bytes if self.graphs is not None else 0,
            quota_bytes=max(self.ranks.gather(booked)),
            most_running=int(self.scheduler.max_running_requests),
        )
        return self._measured

    def _within_quota(self) -> tuple[int, int]:
        """(bytes taken at most, bytes to book); from now on the process is held to the second, which is 0 where
        nothing is enforced. Raises NoMemory, with everything unmapped again, when the catalogue's quota is less
        than was taken."""
        elastic = self.memory.weights_bytes + self.kv.memory.mapped_bytes
        if self.device.type != "cuda":
            return device.private_bytes(self.device, elastic), 0
        spec, failure, peak, booked = self.load.model, None, 0, 0
        try:
            rows = max(self.options.max_running_requests, self.options.scored_together)
            quota.draw_most(self.scheduler, rows)
            peak = device.private_bytes(self.device, elastic, self.graphs)
            given = 0 if spec.quota_is_default else -(-spec.quota_bytes // self.ranks.size)
            booked = policy.booked(spec.name, peak, given)
        except NoMemory as error:
            failure = error
        try:
            self.ranks.settle(failure)
        except CommandError:
            self.roll_back()
            raise
        kinds = device.kept(self.device, self.graphs)
        if self.options.enforce_quota:
            quota.enforce(self.device, policy.left_to_torch(booked, peak, kinds["driver"]), self.graphs)
            self.booked_bytes = booked
        _log.info("private memory", model=spec.name, peak=peak, quota=booked, now=kinds)
        return peak, booked

    # --- sleeping

    def hibernate(self) -> None:
        """Unmaps every extent; process, addresses and objects stay. SGLang must be idle."""
        teardown.prefixes(self.scheduler)
        self._unmap()
        self.counters.hibernations += 1
        self.state = EngineState.HIBERNATING

    def tell_kept(self) -> None:
        """Reports the bytes that stay on the device while the model sleeps. Called once its memory is back, so that no
        command waits for it."""
        if self.state is not EngineState.HIBERNATING or self.device.type != "cuda":
            return
        self._lower_stack()
        kinds = device.kept(self.device, self.graphs)
        most = max(self.ranks.gather(device.own(kinds)))
        _log.info("hibernating", model=self.load.model.name, kept=kinds, own=device.own(kinds))
        self.channel.send(kept=engine_pb2.Kept(bytes=most))

    def wake(self) -> None:
        """Maps the weights range again, zero; graphs come back with their values while it is filled. Raises
        CommandError, still hibernating."""
        try:
            with self.together():
                self.memory.map_weights()
        except CommandError:
            self.memory.unmap_weights()
            self.ranks.gather(None)
            raise
        self.state = EngineState.FILLING
        self._tell_weights_mapped("")
        self._missing = None
        device.restore_stack(self.device)
        try:
            if self.graphs is not None:
                self.graphs.come_back()
        except CommandError as error:
            # Raised once the weights are here, since only then the gpu_scheduler waits for an answer. Kept without its
            # trace, which leads to SGLang's objects.
            self._missing = type(error)(str(error))

    def roll_back(self) -> None:
        """Unmaps everything on every device, as in hibernation, after a verification failed."""
        self._unmap()
        self._lower_stack()
        self.state = EngineState.HIBERNATING
        self.ranks.gather(None)

    def _unmap(self) -> None:
        """Saves values of graphs and unmaps graphs, KV and weights."""
        if self.graphs is not None:
            self.graphs.save()
        device.finish(self.device)
        if self.graphs is not None:
            self.graphs.leave()
        self.kv.give_up_everything()
        self.memory.unmap_weights()

    def _lower_stack(self) -> None:
        if self.options.small_stack:
            device.lower_stack(self.device)

    # --- leaving

    def close(self) -> tuple[bool, int]:
        """Removes the model once SGLang's loop was left; this process keeps its imports and its process group. Returns
        (clean, bytes): False if something of the model stayed, which torch would count with the next one's, and the
        bytes that the process keeps of its device."""
        current.set_instance(None)
        self.ranks.listen(RankFacts)
        self.ranks.ask(StepAnswer)
        if (scheduler := self.__dict__.pop("scheduler", None)) is not None:
            if (grammars := getattr(scheduler, "grammar_manager", None)) is not None:
                grammars.grammar_backend.close()
            device.wait(self.device)
            teardown.take_apart(scheduler)
            del scheduler
        self.__dict__.pop("kv", None)
        self.__dict__.pop("admission", None)
        self.__dict__.pop("loop", None)
        self._weights = None
        teardown.forget()
        # SGLang's objects refer to each other in cycles, and their tensors point into ranges that are released next.
        collector.look_at_all()
        self._close_graphs()
        collector.settle()
        device.finish(self.device)
        quota.lift(self.device)
        self.memory.close()
        self._lower_stack()
        if self.device.type != "cuda":
            return self._clean, 0
        kinds = device.kept(self.device)
        _log.info("warm again", left=self.load.model.name, kept=kinds)
        return self._clean, device.own(kinds)
