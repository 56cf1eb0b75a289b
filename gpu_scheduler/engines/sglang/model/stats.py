"""Counters and statistics of an engine, and the progress of its prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gpu_scheduler.engines.sglang.base.request_table import RequestTable
from gpu_scheduler.engines.sglang.kv.engine_kv import EngineKv
from protos import engine_pb2

EVERY_S = 0.1
"""Least seconds between two statistics while requests run."""


@dataclass
class EngineCounters:
    """Counts since the model was loaded, with the names they have in EngineStats."""

    retractions: int = 0
    evicted_tokens: int = 0
    moved_tokens: int = 0
    evicting_s: float = 0.0
    hibernations: int = 0
    forward_steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    decode_steps: int = 0
    urgent_steps: int = 0
    """Decode steps that began when some request had less than a step's time left to meet its target."""
    stood_still_s: float = 0.0
    """Seconds that decodes waited for steps of other engines."""


def running(scheduler: Any) -> int:
    """Number of requests that hold memory and have not finished."""
    batches = {id(batch): batch for batch in (scheduler.running_batch, scheduler.last_batch) if batch is not None}
    requests = {id(r) for batch in batches.values() for r in batch.reqs if not r.finished() and not r.is_retracted}
    if scheduler.chunked_req is not None:
        requests.add(id(scheduler.chunked_req))
    return len(requests)


def prefilled(requests: Sequence[Any], request_table: RequestTable) -> list[engine_pb2.Prefilled.Prompt]:
    """Cached and computed tokens of the prompts that SGLang is about to compute more of; those that begin are left
    out."""
    prompts = []
    for request in requests:
        entry, done = request_table.by_rid(request.rid), request.prefix_len
        # A request retracted after its first token computes its prompt again, and the shared queue does not count that
        # prompt any more.
        if entry is not None and not entry.told and done:
            cached = min(request.cached_tokens, done)
            prompts.append(
                engine_pb2.Prefilled.Prompt(
                    request_id=entry.request_id, cached_tokens=cached, computed_tokens=done - cached
                )
            )
    return prompts


def engine_stats(
    scheduler: Any, kv: EngineKv, limit_bytes: int, counters: EngineCounters, decode_step_s: float
) -> engine_pb2.EngineStats:
    """Statistics for the gpu_scheduler. `decode_step_s`: seconds of a decode step of the running requests alone on the
    device."""
    mapped = kv.memory.mapped_bytes
    cached = kv.cached_bytes(scheduler.tree_cache)
    return engine_pb2.EngineStats(
        running=running(scheduler),
        waiting=len(scheduler.waiting_queue),
        kv_held_bytes=mapped,
        kv_used_bytes=kv.used_bytes - cached,
        kv_cached_bytes=cached,
        kv_reserve_bytes=mapped - kv.held_bytes,
        kv_limit_bytes=limit_bytes,
        decode_step_s=decode_step_s,
        **vars(counters),
    )
