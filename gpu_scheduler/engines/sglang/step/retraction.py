"""Retracts running requests: takes them out of the batch and back into SGLang's waiting queue, in the ways SGLang
itself does it when its pool is full.

Works on SGLang's Scheduler between two steps. Imports SGLang: only the engine process may import this.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.schedule_batch import release_req


def retract_one(scheduler: Any, batch: Any) -> Any:
    """Retracts the running request that SGLang would retract first (fewest tokens generated), and returns it; its
    tokens are computed again later, unless it was about to end: then it ends now. `batch` is the one about to decode.
    None when nothing runs."""
    batch.filter_batch()
    if batch.is_empty():
        return None
    keep = batch._get_decode_retraction_order(batch.reqs)
    index = keep.pop()
    request = batch.reqs[index]
    # 0 remaining: with more, SGLang would evict ahead for the next steps; here memory leaves.
    batch.release_req(index, 0)
    batch.filter_batch(keep_indices=sorted(keep))
    batch.batch_is_full = False
    if request.to_finish is None:
        scheduler._add_request_to_queue(request, is_retracted=True)
    else:
        # The prompt would be computed again first, once there is memory for it, and a drain would wait for that.
        reason = request.to_finish.to_json()
        scheduler.send_abort_output(AbortReq(rid=request.rid, finished_reason=reason), request)
    return request


def retract_chunked(scheduler: Any) -> Any:
    """Retracts the request whose prompt is half computed, and returns it. None when there is none, or when its last
    chunk is still in the last batch."""
    request = scheduler.chunked_req
    if request is None or request.inflight_middle_chunks > 0:
        return None
    scheduler.chunked_req = None
    release_req(
        req=request,
        remaing_req_count=0,
        req_to_token_pool=scheduler.req_to_token_pool,
        token_to_kv_pool_allocator=scheduler.token_to_kv_pool_allocator,
        tree_cache=scheduler.tree_cache,
        hisparse_coordinator=scheduler.hisparse_coordinator,
        offload_kv=False,
    )
    scheduler._add_request_to_queue(request, is_retracted=True)
    return request
