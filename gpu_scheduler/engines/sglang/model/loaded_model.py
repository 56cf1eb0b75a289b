"""One model in this engine, from Load to Unload: its memory, its parts, its requests and what it reports.

Imports SGLang: only the engine process may import this.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.managers.io_struct import TokenizedEmbeddingReqInput, TokenizedGenerateReqInput

from gpu_scheduler.engines.sglang.base import device, options, stalls
from gpu_scheduler.engines.sglang.base.errors import BrokenModel, CommandError, NoMemory, NotNow, RejectedRequest
from gpu_scheduler.engines.sglang.base.request_table import RequestTable
from gpu_scheduler.engines.sglang.base.states import EngineState
from gpu_scheduler.engines.sglang.kv.engine_kv import FREED_TOGETHER, EngineKv
from gpu_scheduler.engines.sglang.kv.kv_transfer import KvTransfer
from gpu_scheduler.engines.sglang.kv.prefix_tree import PrefixTree
from gpu_scheduler.engines.sglang.kv.provisioning import KvProvisioning
from gpu_scheduler.engines.sglang.kv.state_provisioning import StateProvisioning
from gpu_scheduler.engines.sglang.memory.graph_memory import GraphMemory
from gpu_scheduler.engines.sglang.memory.model_memory import ModelMemory
from gpu_scheduler.engines.sglang.memory.shared_range import SharedRange
from gpu_scheduler.engines.sglang.model.adapters import Adapters
from gpu_scheduler.engines.sglang.model.outputs import Outputs
from gpu_scheduler.engines.sglang.model.probe import Probe
from gpu_scheduler.engines.sglang.model.requests import to_embed, to_sglang
from gpu_scheduler.engines.sglang.model.stats import EngineCounters
from gpu_scheduler.engines.sglang.policy.agreement import RankFacts
from gpu_scheduler.engines.sglang.policy.slow_grammars import slow_of
from gpu_scheduler.engines.sglang.weights import post_processing, weights_range
from kv_kinds import messages
from kv_kinds.layout import KvLayout
from protos import common_pb2, engine_pb2
from services.telemetry import log

if TYPE_CHECKING:
    from gpu_scheduler.engines.sglang.ranks.channel import Channel, FollowerChannel
    from gpu_scheduler.engines.sglang.ranks.ranks import Ranks
    from gpu_scheduler.engines.sglang.weights.read_ahead import ReadAhead

_log = log.get(__name__)
_PROGRESS_EVERY_S = 0.1
_KV_DIFFERENCE = 0.02
"""Share by which a token's KV may differ from what config.json makes it: pools round pages."""
_WEIGHTS_SPAN_BYTES = 256 << 30
"""Bytes of addresses for weights where the size of the checkpoint is not known. Where it is known, twice as many bytes
are reserved: layers may be widened, and quantised ones are not what their files are."""
_TABLES_SPAN_BYTES = 1 << 30
"""Bytes of addresses beside those: tables of rotary embeddings grow with the context, not with the weights."""
_GRAPHS_SPAN_BYTES = 16 << 30
"""Bytes of addresses for memory of CUDA graphs."""


class LoadedModel:
    """One model, made by a Load and changed by its `Lifecycle`. SGLang's hooks find it through `current` while it
    exists."""

    # Attributes of SGLang's scheduler and of what is made with it. `forget` deletes all that are annotated here.
    scheduler: Any
    server_args: Any
    """SGLang's ServerArgs for this model."""
    kv: EngineKv
    tree: PrefixTree
    provisioning: KvProvisioning
    state_provisioning: StateProvisioning | None
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
        self.measured: engine_pb2.Measured | None = None
        """Measurements of the model, once it was proven in this process."""
        self.graphs: GraphMemory | None = None
        """Memory of CUDA graphs, if it leaves while the model sleeps."""
        self.clean = True
        """False if memory of CUDA graphs stays in the process when the model leaves, or, in a strict engine, if
        something still refers to a part of the model."""
        self.booked_bytes = 0
        """Bytes that this process may take of its device beside extents; 0: no bound."""
        self.paddings: set[int] = set()
        """Widths by which SGLang may pad tensors of the checkpoint (`never_make_up` in `hooks/process.py`)."""
        self.reader: ReadAhead | None = None
        """The reader of the checkpoint's files, while they are read."""
        self.adapters = Adapters(memory) if load.model.HasField("adapters") else None
        self.checksum = load.expected_checksum
        self._weights: weights_range.MappedWeights | None = None
        self._manifest = b""
        self.strict = os.environ.get("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY") == "1"
        """Whether the engine ends where something is amiss that requests would not notice; for tests."""
        self._progress_at = 0.0
        self._kv_span_bytes = 0
        self._captured = 0
        """CUDA graphs captured so far."""
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

    def facts(self) -> RankFacts:
        """This rank's facts for the next step."""
        shared = self.memory.kv
        assert isinstance(shared, SharedRange)
        slow = slow_of(self.scheduler.running_batch)
        mark = self._mark() if self.strict else None
        return replace(shared.facts(), arrived=self.kv.ids.arrived(), slow=slow, mark=mark)

    def _mark(self) -> Hashable:
        """Digest of the state that SGLang's scheduler decides by; for tests, that no rank decides differently."""
        scheduler, kv = self.scheduler, self.kv
        running = scheduler.running_batch.reqs
        return (
            self.state.value,
            kv.mark(),
            kv.evictable(self.tree),
            0 if kv.states is None else self.tree.mamba_evictable_size(),
            tuple(request.rid for request in scheduler.waiting_queue),
            tuple((request.rid, len(request.output_ids)) for request in running),
        )

    def running(self) -> list[tuple[str, str, list[int], int]]:
        """(request id, adapter, all tokens so far, tokens that may follow) of each request whose prompt is
        computed."""
        found = []
        for request in self.scheduler.running_batch.reqs:
            entry = self.request_table.by_rid(request.rid)
            if entry is not None and not request.finished():
                left = request.sampling_params.max_new_tokens - len(request.output_ids)
                tokens = [*request.origin_input_ids, *request.output_ids]
                found.append((entry.request_id, entry.adapter, tokens, max(0, left)))
        return found

    # --- reports

    def send_chunks(self, chunks: list[common_pb2.TokenChunk]) -> None:
        """Sends chunks of requests' outputs to the gpu_scheduler."""
        self.channel.send(tokens=engine_pb2.Tokens(chunks=chunks))

    def retracted(self, request: Any, reason: str) -> None:
        """Counts and reports that SGLang's `request` was taken out of the running batch and waits to go on."""
        self.counters.retractions += 1
        if (entry := self.request_table.by_rid(request.rid)) is not None:
            self.channel.send(retracted=engine_pb2.Retracted(request_id=entry.request_id, reason=reason))

    def captures(self) -> None:
        """Reports that the next CUDA graph is captured. How many there will be is not known here."""
        self.progress("capturing CUDA graphs", self._captured, 0, "graphs")
        self._captured += 1

    def progress(self, step: str, done: int, total: int, unit: str = "bytes") -> None:
        """Reports `done` of `total` units of a step, at most ten times a second, and at the end; `total` 0: unknown."""
        now = time.monotonic()
        if now - self._progress_at >= _PROGRESS_EVERY_S or done >= total:
            self._progress_at = now
            progress = common_pb2.Progress(step=step, done=done, total=total, unit=unit)
            self.channel.send(progress=engine_pb2.Progressed(command_id=self.command_id, progress=progress))

    def tell_weights_mapped(self, checksum: str) -> None:
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

    # --- memory

    @property
    def kv_span_bytes(self) -> int:
        """Bytes of addresses for the KV of tokens: more than any limit, and the same on all ranks. The first call is
        one that all ranks make."""
        if not self._kv_span_bytes:
            limit = min(self.ranks.gather(self.memory.limit_bytes))
            self._kv_span_bytes = max(self.options.kv_span_bytes, limit)
        return self._kv_span_bytes

    @property
    def kv_layout(self) -> KvLayout:
        """The kinds of KV that SGLang's pools were made for, on each device."""
        whole = self.options.chunked_prefill_size
        chunk = max(whole, FREED_TOGETHER) if whole > 0 else self.context_tokens  # 0 or less: prompts are not cut
        return self.kv.layout(chunk + self.options.page_size)

    def check_kv(self) -> None:
        """Raises BrokenModel if SGLang's pools take other bytes for a token than the loader found by config.json, or
        more tokens of a window: floor, admission and placement would count with wrong ones."""
        model, found = self.load.model, self.kv.bytes_of(1)
        counted = messages.layout(model).share(max(1, model.devices))
        expected = counted.marginal(0)
        if expected and abs(found - expected) > _KV_DIFFERENCE * expected:
            raise BrokenModel(
                f"{model.path}: a token's KV takes {found} bytes of each device, and config.json makes it {expected}"
            )
        for kind, other in zip(self.kv_layout.kinds, counted.kinds, strict=False):
            if kind.window_tokens and other.window_tokens and kind.most_in_window > other.most_in_window:
                raise BrokenModel(
                    f"{model.path}: a request may hold {kind.most_in_window} tokens of a window, and its floor is for "
                    f"{other.most_in_window}: chunked_prefill_size or page_size of the engine is too large for it"
                )
        states = sum(kind.bytes_per_state for kind in counted.kinds)
        found = 0 if self.kv.states is None else self.kv.states.envelopes.envelope_bytes
        if model.kv_kinds and found != states:
            raise BrokenModel(
                f"{model.path}: a state takes {found} bytes of each device, and config.json makes it {states}"
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
        self.close_graphs()

    def close_graphs(self) -> None:
        """Releases the memory of CUDA graphs; `clean` tells whether all of it left."""
        graphs, self.graphs = self.graphs, None
        if graphs is not None:
            self.clean &= graphs.close()

    @contextmanager
    def weights_born_here(self, *, copy: bool) -> Iterator[None]:
        """Context for the loaders, in which SGLang builds the model and its parameters go to their final places; with
        the values that SGLang makes them with, if `copy`."""
        weights_bytes = self.load.model.weights_bytes
        span = 2 * weights_bytes + _TABLES_SPAN_BYTES if weights_bytes else _WEIGHTS_SPAN_BYTES
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
            self.checksum = self.sum_weights()
        self.tell_weights_mapped(self.checksum if copy else "")

    def sum_weights(self) -> str:
        """Checksum of the whole weights range."""
        assert self._weights is not None
        return weights_range.checksum(self._weights.memory[: self.memory.weights_bytes])

    def forget(self) -> None:
        """Deletes the attributes that refer to parts of SGLang's scheduler, and lets go of the weights, once the
        scheduler was taken apart: tables of SGLang's lie in the memory of CUDA graphs, which is released next."""
        for name in LoadedModel.__annotations__:
            vars(self).pop(name, None)
        self.adapters = self._weights = None

    # --- requests

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
        run, CommandError if its adapter cannot be used."""
        if generate.embed != self.embeds:
            raise RejectedRequest(f"the model makes {'embeddings' if self.embeds else 'text'}")
        if generate.embed:
            return to_embed(generate, rid, self.context_tokens, self.vocab_size)
        adapter = self._adapter_of(generate)
        return to_sglang(generate, rid, self.context_tokens, self.vocab_size, self.ranks.seed, adapter)

    def _adapter_of(self, generate: engine_pb2.Generate) -> str | None:
        """SGLang's id of the request's adapter, which is read if it is not here; None: it has none. Raises
        CommandError."""
        if not generate.HasField("adapter"):
            return None
        if self.adapters is None:
            raise NotNow(f"the model was loaded without room for adapter {generate.adapter.name}")
        return self.adapters.need(generate.adapter, self.request_table.adapters)

    @property
    def decode_step_s(self) -> float:
        """Seconds of a decode step of one request alone on the device; 0 before it was measured."""
        return 0.0 if self.measured is None else self.measured.decode_step_ms / 1e3

    def decodes_within(self, seconds: float) -> None:
        """Lowers the measured duration of a decode step to `seconds`, if that is less. The probe may have measured too
        much: where a host starts many models at once, four prove themselves on a device while kernels are compiled. An
        engine that believes its target to be out of reach makes no bid (`engines/sharing/decode_arbitration.py`), for
        as long as it lives."""
        if self.measured is not None and seconds < self.decode_step_s:
            self.measured.decode_step_ms = 1e3 * seconds

    def _heard_probe(self, rid: str, token_ids: list[int], values: list[float], ended: bool) -> None:
        """Passes output of a request that is not in the table to the probe."""
        if self.probe is not None and self.probe.has(rid):
            self.probe.heard(token_ids, values, ended)
