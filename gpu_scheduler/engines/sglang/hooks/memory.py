"""Hooks on SGLang's memory: the size it believes in, its pool and allocator, eviction, and its check for leaks.

Imports SGLang: only the engine process may import this.

Target in SGLang                      Why                                        Without it
------------------------------------  -----------------------------------------  ---------------------------------------
KVCacheConfigurator                   The pool is as large as its addresses      the pool cannot grow beyond the memory
._profile_available_bytes                                                        that is free now
KVCacheConfigurator                   Models with another kind of KV cache are   loading fails later: their pools are
._build_token_to_kv_pool              refused                                    not elastic, and SGLang allocates all
                                                                                 of them
KVCacheConfigurator                   The pool lies over the elastic range       KV memory cannot grow, shrink or leave
._build_mha_kv_pool
KVCacheConfigurator                   Slots come from mapped KV blocks only      SGLang hands out slots without memory
._build_token_to_kv_pool_allocator
ServerArgs                            FlashAttention 3 may use the page-major    SGLang refuses: it allows Triton's
._handle_page_major_kv_layout         layout                                     attention only
utils.enable_fused_set_kv_buffer      Keys and values are stored by the pool     a fused kernel stores them, which knows
                                                                                 flat pools only
cuda_graph_buffer_registry            Buffers fit the largest possible step      SGLang makes them for the whole pool,
.build_eager_registry                                                            which is more than the device has
common.evict_from_tree_cache          Memory grows before prefixes are evicted   a full pool evicts although memory
                                                                                 could grow
RadixCache.evict                      Evicted tokens are counted                 they are missing in the statistics
SchedulerPoolStatsObserver            SGLang's check for leaks counts slots      it reports leaks that are none
.session_held_tokens                  without memory, and imports, as held
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpu_scheduler.engines.sglang.base.errors import BrokenModel
from gpu_scheduler.engines.sglang.hooks.hook import Hook
from gpu_scheduler.engines.sglang.step import current


def profiled_bytes(_configurator: Any, _pre_model_load_memory: Any) -> int:
    """Bytes of the KV pool in SGLang's view: as large as its addresses, not as what is free now."""
    model = current.model()
    return max(model.options.kv_span_bytes, min(model.ranks.gather(model.memory.limit_bytes)))


def kv_pool(original: Callable[..., Any], configurator: Any, **arguments: Any) -> Any:
    """Builds the KV pool. Raises BrokenModel for models whose cache is of another kind than keys and values of every
    token."""
    kinds = {
        "multi-head latent attention": configurator.use_mla_backend,
        "hybrid sliding windows": configurator.is_hybrid_swa,
        "states of a recurrent model": configurator.mambaish_config is not None,
    }
    for kind, present in kinds.items():
        if present:
            architecture = configurator.model_config.hf_config.architectures[0]
            raise BrokenModel(f"{architecture} needs a cache for {kind}, which is not elastic here yet")
    return original(configurator, **arguments)


def mha_pool(original: Callable[..., Any], configurator: Any, **arguments: Any) -> Any:
    """Builds the KV pool over the elastic range."""
    from gpu_scheduler.engines.sglang.kv.pool import ElasticPageMajorPool, ElasticPool

    pool = ElasticPool if configurator.device == "cpu" else ElasticPageMajorPool
    return original(configurator, **{**arguments, "mha_pool_class": pool})


def allocator(configurator: Any, *, sizes: Any, token_to_kv_pool: Any, **_arguments: Any) -> Any:
    """Builds the allocator over the elastic range."""
    from gpu_scheduler.engines.sglang.kv.allocator import ElasticAllocator
    from gpu_scheduler.engines.sglang.kv.paged_allocator import ElasticPagedAllocator

    size, page_size = sizes.max_total_num_tokens, configurator.server_args.page_size
    common = {
        "dtype": configurator.kv_cache_dtype,
        "device": configurator.device,
        "kvcache": token_to_kv_pool,
        "kv": token_to_kv_pool.kv,
    }
    if configurator.device == "cpu" and page_size == 1:
        return ElasticAllocator(size, **common)
    return ElasticPagedAllocator(size, page_size, **common)


def page_major_with_any_backend(_arguments: Any) -> None:
    """Checks nothing. SGLang allows the page-major layout with Triton's attention only; FlashAttention 3 reads it as
    well, bit for bit (docs/lab/measurements.md)."""


def no_fused_store(_forward_batch: Any) -> bool:
    """False: the kernel that stores keys and values inside the rotary embedding knows flat pools only."""
    return False


def provide(tree_cache: Any, num_tokens: int) -> None:
    """Makes room for `num_tokens` free slots. SGLang's own function would evict; here memory grows, and only what
    cannot be grown is evicted."""
    if tree_cache is not None and not tree_cache.is_chunk_cache():
        current.model().provisioning.before_allocation(tree_cache, num_tokens)


def count_evicted(result: Any, _tree: Any, _params: Any) -> Any:
    """Counts evicted tokens."""
    current.model().counters.evicted_tokens += result.num_tokens_evicted
    return result


def eager_buffers(original: Callable[..., Any], *, max_bs: int, max_num_token: int, **arguments: Any) -> Any:
    """Builds SGLang's buffers for the largest step that is possible, by its limits on prompt tokens. SGLang would make
    them for a step that fills the whole pool, whose addresses are more than any device has memory."""
    from sglang.srt.runtime_context import get_server_args

    limits = get_server_args()
    largest = max(max_bs, limits.max_prefill_tokens, limits.max_prefill_buffer_tokens())
    return original(max_bs=max_bs, max_num_token=min(max_num_token, largest), **arguments)


def held_elsewhere(result: int, _observer: Any) -> int:
    """Tokens that SGLang's check for leaks counts as held. They include slots without memory, KV that is coming from
    another engine, and the page that a half computed prompt has begun: SGLang expects such a prompt in the last batch,
    and here it may have to wait."""
    model = current.model()
    held = model.kv.balloon + model.kv_transfer.held_tokens
    return result + held + _begun_by_a_waiting_chunk(model.scheduler, model.kv.page_size)


def _begun_by_a_waiting_chunk(scheduler: Any, page_size: int) -> int:
    """Tokens of pages of a half computed prompt that is in no batch and that the cache does not protect."""
    request = scheduler.chunked_req
    if request is None or request.kv is None:
        return 0
    for batch in (scheduler.last_batch, scheduler.running_batch):
        if batch is not None and any(each is request for each in batch.reqs):
            return 0
    allocated: int = -(-request.kv.kv_allocated_len // page_size) * page_size
    return allocated - int(request.cache_protected_len)


_CONFIGURATOR = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"
_OBSERVER = "sglang.srt.managers.scheduler_components.pool_stats_observer.SchedulerPoolStatsObserver"
HOOKS = [
    Hook(f"{_CONFIGURATOR}._profile_available_bytes", profiled_bytes, "REPLACE"),
    Hook(f"{_CONFIGURATOR}._build_token_to_kv_pool", kv_pool, "AROUND"),
    Hook(f"{_CONFIGURATOR}._build_mha_kv_pool", mha_pool, "AROUND"),
    Hook(f"{_CONFIGURATOR}._build_token_to_kv_pool_allocator", allocator, "REPLACE"),
    Hook("sglang.srt.server_args.ServerArgs._handle_page_major_kv_layout", page_major_with_any_backend, "REPLACE"),
    Hook("sglang.srt.models.utils.enable_fused_set_kv_buffer", no_fused_store, "REPLACE"),
    Hook("sglang.srt.model_executor.cuda_graph_buffer_registry.build_eager_registry", eager_buffers, "AROUND"),
    Hook("sglang.srt.mem_cache.common.evict_from_tree_cache", provide, "REPLACE"),
    Hook("sglang.srt.mem_cache.radix_cache.RadixCache.evict", count_evicted, "AFTER"),
    Hook(f"{_OBSERVER}.session_held_tokens", held_elsewhere, "AFTER"),
]
