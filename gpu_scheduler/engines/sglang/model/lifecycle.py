"""The life of a model in this engine: it is built, proven, put to sleep, woken and taken apart.

Imports SGLang: only the engine process may import this.
"""

from __future__ import annotations

import gc
import math
import os
from typing import Any

from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.utils.hf_transformers.common import get_generation_config

from gpu_scheduler.engines.sglang.base import collector, device, options
from gpu_scheduler.engines.sglang.base.errors import BrokenModel, CommandError, NoMemory, WrongWeights
from gpu_scheduler.engines.sglang.base.states import EngineState
from gpu_scheduler.engines.sglang.kv import prefix_eviction
from gpu_scheduler.engines.sglang.kv.elastic_kv import MAP_DUMMY_WAIT_S
from gpu_scheduler.engines.sglang.kv.engine_kv import EngineKv, Tokens
from gpu_scheduler.engines.sglang.kv.kv_transfer import KvTransfer
from gpu_scheduler.engines.sglang.kv.prefix_tree import CORE, PrefixTree
from gpu_scheduler.engines.sglang.kv.provisioning import KvProvisioning
from gpu_scheduler.engines.sglang.kv.state_provisioning import StateProvisioning
from gpu_scheduler.engines.sglang.model import quota, teardown
from gpu_scheduler.engines.sglang.model.loaded_model import LoadedModel
from gpu_scheduler.engines.sglang.model.probe import PROMPT_TOKENS, Probe
from gpu_scheduler.engines.sglang.model.requests import EosIds
from gpu_scheduler.engines.sglang.policy import quota as policy
from gpu_scheduler.engines.sglang.policy.agreement import RankFacts
from gpu_scheduler.engines.sglang.weights import encoder
from gpu_scheduler.engines.sglang.weights.loader import CheckpointLoader, ImageLoader, RandomLoader
from gpu_scheduler.engines.sharing.step_gate import StepAnswer
from kv_kinds import messages
from protos import engine_pb2
from services.telemetry import log

_log = log.get(__name__)


class Lifecycle:
    """Takes one model from Load to Unload: each method is a step between two states (`base/states.py`)."""

    def __init__(self, model: LoadedModel) -> None:
        self.model = model
        self._missing: CommandError | None = None
        """Error in restoring CUDA graphs on wake; raised by `verify`."""

    # --- building

    def build(self, scheduler_class: type[Scheduler]) -> None:
        """Makes SGLang's Scheduler, of a class of ours: reads or awaits the weights, makes the pools. Raises
        CommandError."""
        model = self.model
        devices = model.ranks.gather(model.load.device)
        peers = all(model.ranks.gather(device.reads(model.device, devices)))
        device.restore_stack(model.device)
        loader: type = RandomLoader if model.options.random_weights else CheckpointLoader
        if model.load.from_image:
            loader = ImageLoader
        ranks = model.ranks.size
        arguments = options.server_args(model.load.model, model.load.device, model.options, loader, ranks, peers)
        model.server_args = arguments
        # On a CPU SGLang chooses the cores of the process by this number, and every rank has cores of its own.
        index = int(model.load.device.partition(":")[2] or 0) if model.device.type == "cuda" else model.ranks.rank
        os.environ["SGLANG_LOGPROB_CHUNK_SIZE"] = str(model.options.scored_together)  # read as the model is made
        os.environ["SGLANG_RADIX_FORCE_MISS"] = str(int(encoder.is_one(model.load.model)))  # read for each request
        os.environ["SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"] = CORE  # read as the cache is made
        # SGLang's cache knows a folder by its path, where another checkpoint may be by now.
        get_generation_config.cache_clear()
        publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=model.ranks.rank, gpu_id=index))
        scheduler = scheduler_class(arguments, options.port_args())
        model.scheduler = scheduler
        if model.adapters is not None:
            model.adapters.managed_by(scheduler.tp_worker.model_runner.lora_manager)
        assert model.memory.kv is not None
        allocator = scheduler.token_to_kv_pool_allocator
        states = getattr(scheduler.req_to_token_pool, "mamba_allocator", None)
        window = scheduler.sliding_window_size or 0
        model.kv = EngineKv(model.memory.kv, allocator.kinds, window, None if states is None else states.kv)
        if states is not None:
            model.kv.give_states = self._give_states
        model.tree = PrefixTree(scheduler.tree_cache)
        model.check_kv()
        model.ranks.listen(model.facts, model.memory.kv.wake_fd)
        # It is enough for min_new_tokens; stop strings are matched in the gateway.
        config = scheduler.model_config
        scheduler.tokenizer = EosIds(config.hf_eos_token_id or (), config.vocab_size)
        config.hf_eos_token_id = scheduler.tokenizer.additional_stop_token_ids
        model.provisioning = KvProvisioning(
            model.kv,
            model.options.soft_wait_ms / 1e3,
            model.options.hard_wait_ms / 1e3,
            self._evict,
            self._empty,
        )
        model.state_provisioning = None
        if states is not None:
            model.state_provisioning = StateProvisioning(
                model.kv,
                states.kv,
                model.provisioning,
                model.options.soft_wait_ms / 1e3,
                model.options.hard_wait_ms / 1e3,
                self._empty,
                self._evict_states,
            )
        model.kv_transfer = KvTransfer(
            model.kv, model.tree, model.provisioning, scheduler, model.memory.lease_id, model.device
        )
        model.state = EngineState.FILLING if model.load.from_image else EngineState.PROVING
        if not model.load.from_image:
            self._begin_probe()

    def _evict(self, _tree: Any, tokens: Tokens) -> None:
        """Evicts and counts `tokens` of each kind of the prefix cache, the leaf that was used longest ago first."""
        self.model.counters.evicted_tokens += self.model.tree.evict(*tokens)

    def _empty(self, kind: int, extents: int) -> None:
        """Evicts so that `extents` of one kind of KV empty, and returns them."""
        model = self.model
        model.counters.evicted_tokens += prefix_eviction.empty_extents(
            model.tree.of(kind), model.kv.kinds[kind], extents
        )
        model.kv.kinds[kind].give_up_empties()

    def _evict_states(self, count: int) -> None:
        """Evicts `count` cached states, the ones used longest ago first, and counts the tokens that leave with them."""
        self.model.counters.evicted_tokens += self.model.tree.evict_states(count)

    def _give_states(self, extents: int) -> int:
        """Evicts cached states, the ones used longest ago first, until `extents` have left or none are left; returns
        how many left."""
        model = self.model
        states = model.kv.states
        assert states is not None
        left = states.give_up_spare(model.kv.promised)
        while left < extents and (cached := model.tree.mamba_evictable_size()) > 0:
            each = states.envelopes.needed_for(1)
            self._evict_states(min(cached, -(-(extents - left) // each)))
            states.settle()
            left += states.give_up_spare(model.kv.promised)
        return left

    # --- proving

    def verify(self) -> engine_pb2.Measured | None:
        """Checks the filled weights range and maps the dummy KV block. After a wake the model is active again, and its
        measurements are returned as they were: its weights are those that passed the probe, bit for bit. Else the probe
        begins, and None is returned. Raises CommandError with everything unmapped again."""
        model = self.model
        try:
            with model.together():
                missing, self._missing = self._missing, None
                if missing is not None:
                    raise missing
                found = model.sum_weights()
                if model.checksum and found != model.checksum:
                    raise WrongWeights(f"the weights do not verify: {found} instead of {model.checksum}")
            model.checksum = found
            model.kv.hold_dummy(MAP_DUMMY_WAIT_S)
        except CommandError:
            self.roll_back()
            raise
        if model.measured is not None:
            model.state = EngineState.ACTIVE
            return model.measured
        model.state = EngineState.PROVING
        self._begin_probe()
        return None

    def _begin_probe(self) -> None:
        """Begins the probe, with a prompt of a whole chunk on a GPU."""
        model = self.model
        tokens = model.options.chunked_prefill_size if model.device.type == "cuda" else PROMPT_TOKENS
        model.probe = Probe(model.vocab_size, model.context_tokens, tokens, model.options.probe_together, model.embeds)

    def proven(self) -> engine_pb2.Measured:
        """Makes the model active and returns its measurements; called once the probe has ended and SGLang is idle.
        Raises CommandError, with everything unmapped again, if the probe failed or its output is not a number."""
        model = self.model
        assert model.probe is not None
        trace, problem, model.probe = model.probe.trace, model.probe.problem, None
        teardown.prefixes(model.scheduler)
        if problem:
            self.roll_back()
            raise NoMemory(problem)
        if not all(math.isfinite(value) for value in trace.values):
            self.roll_back()
            raise BrokenModel(f"{model.load.model.path}: the model's output is not a number")
        gc.collect()
        private_bytes, booked = self._within_quota()
        collector.settle_model()
        model.state = EngineState.ACTIVE
        own = engine_pb2.Measured.Rank(
            lease_id=model.memory.lease_id,
            weights_bytes=model.memory.weights_bytes + model.memory.adapters_bytes,
            private_bytes=private_bytes,
        )
        ranks = model.ranks.gather(own)
        model.measured = engine_pb2.Measured(
            weights_bytes=max(rank.weights_bytes for rank in ranks),
            kv_bytes_per_token=model.kv.bytes_of(1),
            kv_kinds=messages.kinds(model.kv_layout),
            private_bytes=max(rank.private_bytes for rank in ranks),
            ranks=ranks,
            prefill_tokens_per_s=trace.prefill_tokens_per_s,
            prefill_chunk_tokens=trace.prefill_tokens,
            decode_step_ms=trace.decode_step_ms,
            context_tokens=model.context_tokens,
            graph_bytes=model.graphs.mapped_bytes if model.graphs is not None else 0,
            quota_bytes=max(model.ranks.gather(booked)),
            most_running=int(model.scheduler.max_running_requests),
        )
        return model.measured

    def _within_quota(self) -> tuple[int, int]:
        """(bytes taken at most, bytes to book); from now on the process is held to the second, which is 0 where
        nothing is enforced. Raises NoMemory, with everything unmapped again, when the catalogue's quota is less
        than was taken."""
        model = self.model
        elastic = model.memory.weights_bytes + model.memory.adapters_bytes + model.kv.memory.mapped_bytes
        if model.device.type != "cuda":
            return device.private_bytes(model.device, elastic), 0
        spec, failure, peak, booked = model.load.model, None, 0, 0
        try:
            rows = max(model.options.max_running_requests, model.options.scored_together)
            quota.draw_most(model.scheduler, rows)
            peak = device.private_bytes(model.device, elastic, model.graphs)
            given = 0 if spec.quota_is_default else -(-spec.quota_bytes // model.ranks.size)
            of_token = [kind.bytes_of(1) for kind in model.kv.kinds]
            prefixes = policy.prefix_bytes(device.total_bytes(model.device), of_token)
            booked = policy.booked(spec.name, peak, given, prefixes)
        except NoMemory as error:
            failure = error
        try:
            model.ranks.settle(failure)
        except CommandError:
            self.roll_back()
            raise
        kinds = device.kept(model.device, model.graphs)
        if model.options.enforce_quota:
            quota.enforce(model.device, policy.left_to_torch(booked, peak, kinds["driver"]), model.graphs)
            model.booked_bytes = booked
        _log.info("private memory", model=spec.name, peak=peak, quota=booked, now=kinds)
        return peak, booked

    # --- sleeping

    def hibernate(self) -> None:
        """Unmaps every extent; process, addresses and objects stay. SGLang must be idle."""
        model = self.model
        teardown.prefixes(model.scheduler)
        self._unmap()
        model.counters.hibernations += 1
        model.state = EngineState.HIBERNATING

    def tell_kept(self) -> None:
        """Reports the bytes that stay on the device while the model sleeps. Called once its memory is back, so that no
        command waits for it."""
        model = self.model
        if model.state is not EngineState.HIBERNATING or model.device.type != "cuda":
            return
        self._lower_stack()
        kinds = device.kept(model.device, model.graphs)
        most = max(model.ranks.gather(device.own(kinds)))
        _log.info("hibernating", model=model.load.model.name, kept=kinds, own=device.own(kinds))
        model.channel.send(kept=engine_pb2.Kept(bytes=most))

    def wake(self) -> None:
        """Maps the weights range again, zero; graphs come back with their values while it is filled. Raises
        CommandError, still hibernating."""
        model = self.model
        try:
            with model.together():
                model.memory.map_weights()
        except CommandError:
            model.memory.unmap_weights()
            model.ranks.gather(None)
            raise
        model.state = EngineState.FILLING
        model.tell_weights_mapped("")
        self._missing = None
        device.restore_stack(model.device)
        try:
            if model.graphs is not None:
                model.graphs.come_back()
        except CommandError as error:
            # Raised once the weights are here, since only then the gpu_scheduler waits for an answer. Kept without its
            # trace, which leads to SGLang's objects.
            self._missing = type(error)(str(error))

    def roll_back(self) -> None:
        """Unmaps everything on every device, as in hibernation, after a verification failed."""
        model = self.model
        self._unmap()
        self._lower_stack()
        model.state = EngineState.HIBERNATING
        model.ranks.gather(None)

    def _unmap(self) -> None:
        """Saves values of graphs and unmaps graphs, KV and weights."""
        model = self.model
        if model.graphs is not None:
            model.graphs.save()
        device.finish(model.device)
        if model.graphs is not None:
            model.graphs.leave()
        model.kv.give_up_everything()
        if model.adapters is not None:
            model.adapters.empty()
        model.memory.unmap_weights()

    def _lower_stack(self) -> None:
        if self.model.options.small_stack:
            device.lower_stack(self.model.device)

    # --- leaving

    def close(self) -> tuple[bool, int]:
        """Removes the model once SGLang's loop was left; this process keeps its imports and its process group. Returns
        (clean, bytes): False if something of the model stayed, which torch would count with the next one's, and the
        bytes that the process keeps of its device."""
        model = self.model
        model.ranks.listen(RankFacts)
        model.ranks.ask(StepAnswer)
        parts: teardown.Parts = {}
        if (scheduler := vars(model).pop("scheduler", None)) is not None:
            scheduler.grammar_manager.grammar_backend.close()
            device.wait(model.device)
            parts = teardown.parts_of(scheduler)
            teardown.take_apart(scheduler)
            del scheduler
        model.forget()
        teardown.forget()
        # SGLang's objects refer to each other in cycles, and their tensors point into ranges that are released next.
        collector.look_at_model()
        if left := [name for name, part in parts.items() if part() is not None]:
            _log.warning("parts of the model are still referred to", parts=left)
            model.clean &= not model.strict
        model.close_graphs()
        collector.settle()
        device.finish(model.device)
        quota.lift(model.device)
        model.memory.close()
        self._lower_stack()
        if model.device.type != "cuda":
            return model.clean, 0
        kinds = device.kept(model.device)
        _log.info("warm again", left=model.load.model.name, kept=kinds)
        return model.clean, device.own(kinds)
