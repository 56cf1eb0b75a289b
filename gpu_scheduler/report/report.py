"""The group's state as placement and operators see it, built from the parts that own it."""

from __future__ import annotations

from collections.abc import Callable

from gpu_scheduler.config import GpuSchedulerConfig
from gpu_scheduler.engines.warm_pool import WarmPool
from gpu_scheduler.memory.devices import count
from gpu_scheduler.memory.group_memory import GroupMemory
from gpu_scheduler.queue.dispatcher import Dispatcher
from gpu_scheduler.residents import Resident, Residents
from kv_kinds import messages as kv_messages
from protos import common_pb2, gpu_scheduler_pb2


class GroupReport:
    """Builds GroupState messages (protos/gpu_scheduler.proto)."""

    def __init__(
        self,
        config: GpuSchedulerConfig,
        residents: Residents,
        dispatcher: Dispatcher,
        memory: GroupMemory,
        pools: dict[str, WarmPool],
        why_no_image: Callable[[Resident], str] = lambda resident: "",
    ) -> None:
        """`why_no_image`: why there is no image of a model that has an engine; empty if there is one."""
        self._config = config
        self._residents = residents
        self._dispatcher = dispatcher
        self._memory = memory
        self._pools = pools
        self._why_no_image = why_no_image
        self._revision = 0

    def build(self) -> gpu_scheduler_pb2.GroupState:
        self._revision += 1
        return gpu_scheduler_pb2.GroupState(
            group=self._config.group,
            address=self._config.address or self._config.listen,
            revision=self._revision,
            devices=self._config.devices,
            residents=[self._resident(resident) for resident in self._residents],
            memory=self._memory.states if self._memory.known else [],
            warm_engines=sum(pool.idle for pool in self._pools.values()),
            free_bytes=self._memory.free_bytes,
            node=self._memory.node,
            weights_extent_bytes=self._config.weights_extent_bytes,
            drained=self._residents.drained or self._residents.stopping,
            stopping=self._residents.stopping,
            balloond_error=self._memory.away,
            starting=[step for pool in self._pools.values() for step in pool.starting],
            engines_error="; ".join(pool.error for pool in self._pools.values() if pool.error),
            engine_limit=self._config.engines.limit,
            engines_given_up=any(pool.given_up for pool in self._pools.values()),
        )

    def _progress(self, resident: Resident) -> common_pb2.Progress | None:
        """Progress of the activation under way; while it waits for an engine that starts, also what that one does."""
        if not resident.waking_s:
            return None
        starting = [step for pool in self._pools.values() for step in pool.starting]
        if resident.engine is not None or not starting:
            return resident.progress
        return common_pb2.Progress(step=f"{resident.progress.step}: {starting[0]}", total=1, unit="steps")

    def _lacking(self, model: str) -> int:
        """KV bytes that the model's requests lack on each device; 0 if limits are fixed, because then no other model's
        memory helps."""
        return self._dispatcher.lacking_bytes(model) if self._config.elastic_kv else 0

    def _resident(self, resident: Resident) -> gpu_scheduler_pb2.Resident:
        name = resident.spec.name
        waiting, running, late = self._dispatcher.count(name)
        model = self._dispatcher.model(name)
        devices = count(resident.spec)  # engines count the bytes of one device
        return gpu_scheduler_pb2.Resident(
            model=name,
            residency=resident.residency,
            reason=resident.reason,
            waiting=waiting,
            running=running,
            late=late,
            weights_bytes=devices * resident.measured.weights_bytes,
            kv_bytes_per_token=devices * resident.measured.kv_bytes_per_token,
            kv_kinds=kv_messages.kinds(kv_messages.layout(resident.measured).times(devices)),
            private_bytes=devices * resident.measured.private_bytes,
            graph_bytes=devices * resident.measured.graph_bytes,
            quota_bytes=devices * resident.measured.quota_bytes,
            kept_bytes=devices * resident.kept_bytes,
            kv_held_bytes=devices * resident.stats.kv_held_bytes,
            kv_used_bytes=devices * resident.stats.kv_used_bytes,
            kv_cached_bytes=devices * resident.stats.kv_cached_bytes,
            kv_lacking_bytes=devices * self._lacking(name),
            kv_limit_bytes=self._memory.limit_bytes(name),
            idle_s=self._dispatcher.idle_s(name),
            prefill_tokens=resident.total("prefill_tokens"),
            decode_tokens=resident.total("decode_tokens"),
            decode_steps=resident.total("decode_steps"),
            urgent_steps=resident.total("urgent_steps"),
            stood_still_s=resident.total("stood_still_s"),
            decode_step_s=resident.stats.decode_step_s,
            prefill_tokens_per_s=resident.measured.prefill_tokens_per_s,
            wake_s=resident.wake_s,
            cold_s=resident.cold_s,
            ttft_met=model.ttft_met,
            ttft_missed=model.ttft_missed,
            tpot_missed=model.tpot_missed,
            returns=model.returns,
            arrived=model.arrived,
            ttft_target_ms=1e3 * model.ttft_s or resident.spec.default_slo.ttft_ms,
            tpot_target_ms=round(1e3 * model.tpot_s) or resident.spec.default_slo.tpot_ms,
            retractions=resident.total("retractions"),
            evicted_tokens=resident.total("evicted_tokens"),
            hibernations=resident.total("hibernations"),
            engine_pid=resident.engine.pid if resident.engine is not None else 0,
            step_s=resident.step_seconds(),
            active_s=resident.active_s,
            came_s=resident.came_s,
            weights_from=resident.weights_from,
            compiling=resident.compiling,
            kernels_compiled=resident.kernels_compiled,
            progress=self._progress(resident),
            waking_s=resident.waking_s,
            retry_s=resident.retry_s if resident.residency == common_pb2.ERROR else 0.0,
            no_image=self._why_no_image(resident) if resident.engine is not None else "",
            outdated=self._residents.is_outdated(resident),
        )
