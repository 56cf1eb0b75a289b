"""The engine comparison's plugin for SGLang: KV in a layout of ours, weights worth comparing, NaN KV.

Loaded through SGLang's own entry point in each of its processes. Each hook leaves a line in the file that
`PAGE_MAJOR_EVIDENCE` names, because SGLang only logs a hook that did not take.
"""

from __future__ import annotations

import json
import os
import zlib
from typing import Any


def _evidence(**facts: Any) -> None:
    with open(os.environ["PAGE_MAJOR_EVIDENCE"], "a") as file:
        file.write(json.dumps(facts) + "\n")


def _pool_class(original: Any, configurator: Any, *, kind: str, default: type) -> type:
    """The pool in the layout that `KV_LAYOUT` names, over one tensor; SGLang's own where it names none."""
    named = os.environ.get("KV_LAYOUT", "")
    if kind != "mha" or not named:
        found: type = original(configurator, kind=kind, default=default)
        return found
    import torch
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    from gpu_scheduler.engines.sglang.kv.pools.kv_layouts import KvShape, PageMajor, TokenMajor
    from gpu_scheduler.engines.sglang.kv.pools.pool import ElasticPool

    layout = {"page-major": PageMajor, "token-major": TokenMajor}[named]()

    class LaidOutPool(MHATokenToKVPool):  # type: ignore[misc]
        def _create_buffers(self) -> None:
            pages = self.size // self.page_size + 1
            shape = KvShape(
                self.layer_num, self.head_num, self.head_dim, self.v_head_dim, self.page_size, pages, self.store_dtype
            )
            raw = torch.zeros(pages * shape.page_bytes, dtype=torch.uint8, device=self.device)
            self.k_buffer, self.v_buffer = layout.views(raw, shape)
            self._rows = layout.rows(raw, shape)
            self.native_k_scale_buffer = self.native_v_scale_buffer = None
            self.dq_k_buffer = self.dq_v_buffer = None
            self._kv_buffer_descs: list[object] = []
            self._init_data_ptrs_and_strides()
            _poison(None, self)

        _store_kv_layer = ElasticPool._store_kv_layer

    return LaidOutPool


def _own_store(_forward_batch: Any) -> bool:
    """Keys and values are stored by the pool: the kernel that stores them with the rotary embedding knows flat pools
    only."""
    return False


def _random_weights(model: Any, *_: Any, **__: Any) -> None:
    """Normal weights that keep the activations' scale; attention is peaked, so that KV decides the tokens."""
    import torch

    for name, parameter in model.state_dict().items():
        if not torch.is_floating_point(parameter) or "cos_sin" in name or "inv_freq" in name:
            continue
        generator = torch.Generator(parameter.device).manual_seed(zlib.crc32(name.encode()))
        if parameter.ndim < 2:
            parameter.data.fill_(1.0)
        else:
            scale = 1.0 if "embed" in name else parameter.shape[-1] ** -0.5 * (1.7 if "qkv" in name else 1.0)
            parameter.data.normal_(0.0, scale, generator=generator)
    _evidence(hook="weights")


def _poison(result: Any, pool: Any, *_: Any, **__: Any) -> None:
    """Every slot but the dummy page's is NaN until it is written."""
    import torch

    for view in [*pool.k_buffer, *pool.v_buffer]:
        view[1 if view.dim() == 4 else pool.page_size :].fill_(float("nan"))
    view = pool.k_buffer[0]
    _evidence(
        hook="poison",
        pool=type(pool).__name__,
        shape=list(view.shape),
        stride=list(view.stride()),
        nan=int(torch.isnan(view[-1]).sum()),
    )


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    memory_pool = "sglang.srt.mem_cache.memory_pool"
    classes = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._resolve_kv_pool_class"
    HookRegistry.register(classes, _pool_class, HookType.AROUND)
    if os.environ.get("KV_LAYOUT"):
        HookRegistry.register("sglang.srt.models.utils.enable_fused_set_kv_buffer", _own_store, HookType.REPLACE)
    HookRegistry.register(
        "sglang.srt.model_loader.weight_utils.initialize_dummy_weights", _random_weights, HookType.REPLACE
    )
    HookRegistry.register(f"{memory_pool}.MHATokenToKVPool._create_buffers", _poison, HookType.AFTER)
