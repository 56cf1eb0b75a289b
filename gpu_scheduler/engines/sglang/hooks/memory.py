"""Hooks on SGLang's memory: the size it believes in, its pool and allocator, and its check for leaks.

Imports SGLang: only the engine process may import this.

Target in SGLang                      Why                                        Without it
------------------------------------  -----------------------------------------  ---------------------------------------
KVCacheConfigurator                   The pool is as large as its addresses      the pool cannot grow beyond the memory
._profile_available_bytes                                                        that is free now
KVCacheConfigurator                   The pool, of keys and values or of latent   KV memory cannot grow, shrink or leave
._resolve_kv_pool_class               rows, lies over the elastic range; models
                                      with another kind of KV cache are refused
HybridSWAPoolConfigurator             Layers with a window have half of the      layers without one have few addresses:
.calculate_pool_sizes                 addresses at most                          Gemma 4 31B too few for its context
KVCacheConfigurator                   The pools of layers with and without a     each pool has memory of its own
._build_hybrid_swa_kv_pool            window lie over one range
model_config.get_hybrid_layer_ids     Layers that use the KV of others have no   SGLang keeps room for KV that is never
                                      place in a pool                            written
KVCacheConfigurator                   Slots come from mapped KV blocks only      SGLang hands out slots without memory
._build_token_to_kv_pool_allocator
cuda_graph_buffer_registry            Buffers fit the largest possible step      SGLang makes them for the whole pool,
.build_eager_registry                                                            which is more than the device has
SchedulerPoolStatsObserver            SGLang's check for leaks counts slots      it reports leaks that are none
.session_held_tokens,                 without memory, and imports, as held
.session_held_swa_tokens,
.session_held_mamba_slots
HybridReqToTokenPool._init_mamba_pool States lie over the elastic range          all of them are allocated at the start
MambaComponent                        A state is cached when its request ends,   each step of a prompt needs another
.prepare_for_caching_req              and where a prompt parts from a cached     state, and SGLang dies if it has none
                                      prefix, if there is memory
mamba_hook.validate_mamba_no_buffer   Steps overlap beside states as well        SGLang refuses; devices wait for their
                                                                                 hosts in each step
GDNAttnBackend.__init__               Kernels of linear attention read and       each layer copies the states of prompts
                                      write the states of prompts in their       out of the pool and back, in four more
                                      slots, on a GPU                            launches
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from gpu_scheduler.engines.sglang.base.environment import has_gpu
from gpu_scheduler.engines.sglang.base.errors import BrokenModel
from gpu_scheduler.engines.sglang.hooks.hook import Hook
from gpu_scheduler.engines.sglang.step import current


def profiled_bytes(_configurator: Any, _pre_model_load_memory: Any) -> int:
    """Bytes of KV for which SGLang makes its pool: as many as there are addresses, not as many as are free now."""
    return current.model().kv_span_bytes


def pool_class(original: Callable[..., type], configurator: Any, *, kind: str, default: type) -> type:
    """The class of a KV pool: ours for keys and values, with a window or without, and for latent rows. For other kinds
    it is SGLang's, since SGLang asks for the class of every kind before it makes the pool of one. Raises BrokenModel
    for models that need a cache of another kind."""
    from sglang.srt.configs.model_config import is_deepseek_dsa
    from sglang.srt.configs.nemotron_h import NemotronHConfig

    from gpu_scheduler.engines.sglang.kv.pools.latent_pool import ElasticLatentPool
    from gpu_scheduler.engines.sglang.kv.pools.pool import ElasticPool

    others = {
        "an index of sparse attention": is_deepseek_dsa(configurator.model_config.hf_config),
        "latent rows in windows": configurator.use_mla_backend and configurator.is_hybrid_swa,
        "states of another kind than those of gated delta nets and of Nemotron's Mamba layers": (
            configurator.mambaish_config is not None
            and configurator.hybrid_gdn_config is None
            and not isinstance(configurator.mambaish_config, NemotronHConfig)
        ),
        "states beside windows or latent rows": configurator.mambaish_config is not None
        and (configurator.use_mla_backend or configurator.is_hybrid_swa),
    }
    for other, present in others.items():
        if present:
            architecture = configurator.model_config.hf_config.architectures[0]
            raise BrokenModel(f"{architecture} needs a cache for {other}, which is not elastic here yet")
    ours = {"mha": ElasticPool, "mla": ElasticLatentPool}
    return ours[kind] if kind in ours else original(configurator, kind=kind, default=default)


def layers_with_kv(
    result: tuple[list[int] | None, list[int] | None], _architectures: list[str], text: Any
) -> tuple[list[int] | None, list[int] | None]:
    """(layers with a window, layers without one) that have KV of their own. In some models the last layers use the KV
    of others."""
    own = text.num_hidden_layers - (getattr(text, "num_kv_shared_layers", None) or 0)
    with_window, without = ([each for each in ids if each < own] if ids is not None else None for ids in result)
    return with_window, without


def divided_addresses(original: Callable[..., Any], configurator: Any, available_bytes: int, page_size: int) -> Any:
    """Sizes of the pools of layers with and without a window, by the addresses for each. SGLang would have both pools
    for the same number of tokens. A window keeps few tokens of a request, so its layers get no more than half of the
    addresses here."""
    if not configurator._full_layers_num:
        return original(configurator, available_bytes, page_size)
    every, in_window = configurator._full_cell_bytes(), configurator._swa_cell_bytes()
    tokens = max(available_bytes // (every + in_window), available_bytes // 2 // every)
    tokens_in_window = min(tokens, available_bytes // 2 // in_window)
    return configurator._make_pool_config(*(each // page_size * page_size for each in (tokens, tokens_in_window)))


def window_pools(original: Callable[..., Any], configurator: Any, **arguments: Any) -> Any:
    """Has SGLang make the pools of layers with and without a window, after it has reserved a stretch for each in one
    range."""
    from gpu_scheduler.engines.sglang.kv.pools.kv_views import KvShape
    from gpu_scheduler.engines.sglang.kv.pools.pool import open_stretches

    config, size = configurator.model_config, configurator.pool_page_size
    ranks = configurator.server_args.tp_size
    heads, dims = config.get_num_kv_heads(ranks), (config.head_dim, config.head_dim)
    in_window = heads, dims
    if configurator.is_hybrid_swa_compress:
        dims = config.head_dim, config.v_head_dim
        in_window = config.get_swa_num_kv_heads(ranks), (config.swa_head_dim, config.swa_v_head_dim)
    layers = configurator.layer_info
    kinds = (
        (layers.full_attention_layer_ids, arguments["full_max_total_num_tokens"], (heads, dims)),
        (layers.swa_attention_layer_ids, arguments["swa_max_total_num_tokens"], in_window),
    )
    open_stretches(
        [
            KvShape(len(ids), heads, *dims, page_size=size, pages=tokens // size + 1, dtype=configurator.kv_cache_dtype)
            for ids, tokens, (heads, dims) in kinds
        ]
    )
    return original(configurator, **arguments)


def allocator(configurator: Any, *, sizes: Any, token_to_kv_pool: Any, **_arguments: Any) -> Any:
    """Builds the allocator over the elastic range."""
    from gpu_scheduler.engines.sglang.kv.pools.allocator import ElasticAllocator
    from gpu_scheduler.engines.sglang.kv.pools.paged_allocator import ElasticPagedAllocator

    size, page_size = sizes.max_total_num_tokens, configurator.page_size
    common = {
        "dtype": configurator.kv_cache_dtype,
        "device": configurator.device,
        "kvcache": token_to_kv_pool,
    }
    if configurator.is_hybrid_swa:
        from gpu_scheduler.engines.sglang.kv.pools.window_allocator import ElasticWindowAllocator

        tokens = sizes.full_max_total_num_tokens, sizes.swa_max_total_num_tokens
        return ElasticWindowAllocator(*tokens, page_size, **common)
    # The pool of a model with states is a wrapper of SGLang's around that of its tokens.
    common["kv"] = getattr(token_to_kv_pool, "full_kv_pool", token_to_kv_pool).kv
    if configurator.device == "cpu" and page_size == 1:
        return ElasticAllocator(size, **common)
    return ElasticPagedAllocator(size, page_size, **common)


def state_pool(original: Callable[..., Any], pool: Any, *, mamba_size: int, device: str, **arguments: Any) -> Any:
    """Makes the pool of states over the elastic range, and its allocator."""
    from gpu_scheduler.engines.sglang.kv.pools.states import ElasticStateAllocator, ElasticStatePool

    pool.mamba_pool_cls = ElasticStatePool
    original(pool, mamba_size=mamba_size, device=device, **arguments)
    pool.mamba_allocator = ElasticStateAllocator(mamba_size, device, pool.mamba_pool.kv)


def cached_states(
    original: Callable[..., Any], component: Any, req: Any, insert_params: Any, token_ids_len: int, is_finished: bool
) -> Any:
    """Number of a request's tokens that the prefix cache may keep now, with a state. SGLang would cache a copy of the
    state behind each step of a prompt, and dies where there is no memory for one.

    When the request ends, the cache gets its state. The state has the tokens of all steps that were launched
    (`kv_committed_len`), among them one beyond the last result if steps overlap: the last token that was sampled, which
    SGLang caches as well then. A state that has other tokens than those that SGLang would cache is not kept, nor are
    the tokens, as no request could go on from them.

    While the request runs, the cache gets a copy of its state where it parts from a cached prefix, if a slot is free
    (`StateProvisioning.until_shared`). The cached state that it began from is unlocked: the request has a copy."""
    if is_finished:
        is_whole = req.kv.kv_committed_len == token_ids_len
        return original(component, req, insert_params, token_ids_len, is_finished) if is_whole else 0
    _unlock_first_state(component, req.lock)
    states = current.model().kv.states
    if token_ids_len != req.mamba_branching_seqlen or states is None or not states.available:
        return 0
    pool = component.cache.req_to_token_pool
    insert_params.mamba_value = pool.mamba_allocator.alloc(1)
    _copy_behind_steps(pool.mamba_pool, req.kv.mamba_pool_idx.unsqueeze(0), insert_params.mamba_value)
    return token_ids_len


def _copy_behind_steps(states: Any, source: torch.Tensor, target: torch.Tensor) -> None:
    """Copies a state between two slots, numbers (1,) on the device, as it is behind the steps that were launched. On a
    GPU the steps' own stream does that: before the next step, and in memory that it has for such copies."""
    scheduler = current.model().scheduler
    if not scheduler.enable_overlap or source.device.type != "cuda":
        states.copy_from(source, target)
        return
    stream = scheduler.forward_stream
    stream.wait_stream(torch.cuda.current_stream())  # which has sent the slots' numbers
    with torch.cuda.stream(stream):
        states.copy_from(source, target)
    for numbers in (source, target):
        numbers.record_stream(stream)


def overlap_beside_states(view: Any, model_arch: str) -> None:
    """Checks SGLang's arguments for a model with states, as SGLang does for `no_buffer`, but lets steps overlap: states
    are cached with the tokens that are in them (`cached_states`). Raises BrokenModel."""
    if view.page_size not in (1, None) or view.attention_backend == "trtllm_mha":
        raise BrokenModel(f"{model_arch} has states, which need pages of one token and another attention backend")


def _unlock_first_state(component: Any, lock: Any) -> None:
    """Unlocks the cached state that a running request began from; the cached tokens stay locked."""
    kind, cache = component.component_type, component.cache
    if lock is None or kind in lock.receipt.skipped_lock_components:
        return
    others = tuple(each for each in cache.tree_components if each != kind)
    cache.dec_lock_ref(lock.node, replace(lock.receipt, skipped_lock_components=others))
    lock.receipt.skipped_lock_components += (kind,)


def eager_buffers(original: Callable[..., Any], *, max_bs: int, max_num_token: int, **arguments: Any) -> Any:
    """Builds SGLang's buffers for the largest step that its limits on prompt tokens allow. SGLang would build them for
    a step that fills the whole pool, which is larger than the memory of any device."""
    from sglang.srt.runtime_context import get_schedule, max_prefill_buffer_tokens

    largest = max(max_bs, get_schedule().max_prefill_tokens, max_prefill_buffer_tokens())
    return original(max_bs=max_bs, max_num_token=min(max_num_token, largest), **arguments)


def held_elsewhere(result: int, _observer: Any) -> int:
    """Tokens that SGLang's check for leaks counts as held: those of SGLang's own `result`, slots without memory, and KV
    that is coming from another engine."""
    from gpu_scheduler.engines.sglang.kv.engine_kv import EVERY

    model = current.model()
    return result + int(model.kv.kinds[EVERY].unbacked + model.kv_transfer.held_tokens)


def held_in_window(result: int, _observer: Any) -> int:
    """Tokens of windows that SGLang's check for leaks counts as held, slots without memory among them."""
    from gpu_scheduler.engines.sglang.kv.engine_kv import WINDOW

    kinds: Any = current.model().kv.kinds
    return result + (int(kinds[WINDOW].unbacked) if len(kinds) > WINDOW else 0)


def states_elsewhere(result: int, _observer: Any) -> int:
    """States that SGLang's check for leaks counts as held, slots without memory among them."""
    states = current.model().kv.states
    return result + (0 if states is None else states.unbacked)


def states_in_slots(_result: None, backend: Any, _model_runner: Any) -> None:
    """Has prompts' kernels of linear attention work on states where they lie. Triton's kernel of the convolution takes
    any distance between slots. Triton's kernel of the states takes the distance from the first axis; its caller would
    copy a pool that is not contiguous. Where slots are no whole number of heads apart, SGLang copies the states of each
    step."""
    from sglang.srt.layers.attention.linear.kernels.gdn_triton import TritonGDNKernel

    from gpu_scheduler.engines.sglang.kv.pools.states import PromptsInSlots

    kernel = backend.kernel_dispatcher.extend_kernel
    assert isinstance(kernel, TritonGDNKernel), "`kernels_with_states` chooses it"
    try:
        in_slots = PromptsInSlots(kernel.extend, backend)
    except ValueError:
        return
    backend.requires_contiguous_prefill_state = False
    kernel.extend = in_slots


_CONFIGURATOR = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"
_SIZES = "sglang.srt.model_executor.pool_configurator.HybridSWAPoolConfigurator"
_OBSERVER = "sglang.srt.managers.scheduler_components.pool_stats_observer.SchedulerPoolStatsObserver"
_COMPONENTS = "sglang.srt.mem_cache.unified_cache.components"
_LINEAR_ATTENTION = "sglang.srt.layers.attention.linear.gdn_backend"
HOOKS = [
    Hook(f"{_CONFIGURATOR}._profile_available_bytes", profiled_bytes, "REPLACE"),
    Hook(f"{_CONFIGURATOR}._resolve_kv_pool_class", pool_class, "AROUND"),
    Hook("sglang.srt.configs.model_config.get_hybrid_layer_ids", layers_with_kv, "AFTER"),
    Hook(f"{_SIZES}.calculate_pool_sizes", divided_addresses, "AROUND"),
    Hook(f"{_CONFIGURATOR}._build_hybrid_swa_kv_pool", window_pools, "AROUND"),
    Hook(f"{_CONFIGURATOR}._build_token_to_kv_pool_allocator", allocator, "REPLACE"),
    Hook("sglang.srt.model_executor.cuda_graph_buffer_registry.build_eager_registry", eager_buffers, "AROUND"),
    Hook(f"{_OBSERVER}.session_held_tokens", held_elsewhere, "AFTER"),
    Hook(f"{_OBSERVER}.session_held_swa_tokens", held_in_window, "AFTER"),
    Hook(f"{_OBSERVER}.session_held_mamba_slots", states_elsewhere, "AFTER"),
    Hook("sglang.srt.mem_cache.memory_pool.HybridReqToTokenPool._init_mamba_pool", state_pool, "AROUND"),
    Hook(f"{_COMPONENTS}.mamba.MambaComponent.prepare_for_caching_req", cached_states, "AROUND"),
    Hook("sglang.srt.arg_groups.mamba_hook.validate_mamba_no_buffer", overlap_beside_states, "REPLACE"),
]
if has_gpu():
    HOOKS.append(Hook(f"{_LINEAR_ATTENTION}.GDNAttnBackend.__init__", states_in_slots, "AFTER"))
