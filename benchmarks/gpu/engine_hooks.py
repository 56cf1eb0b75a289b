"""The engine comparison's plugin for SGLang 0.5.16: page-major with any backend, weights worth comparing, NaN KV.

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


def _allow_any_backend(server_args: Any) -> None:
    """In place of the check that page-major goes with Triton only (server_args.py, _handle_page_major_kv_layout)."""
    _evidence(hook="assertion", page_major=server_args.enable_page_major_kv_layout)


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

    page_major = hasattr(pool, "_raw")
    for view in [*pool.k_buffer, *pool.v_buffer]:
        view[1 if page_major else pool.page_size :].fill_(float("nan"))
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
    args = "sglang.srt.server_args.ServerArgs._handle_page_major_kv_layout"
    HookRegistry.register(args, _allow_any_backend, HookType.REPLACE)
    HookRegistry.register(
        "sglang.srt.model_loader.weight_utils.initialize_dummy_weights", _random_weights, HookType.REPLACE
    )
    for pool in ("MHATokenToKVPool", "PageMajorMHATokenToKVPool"):
        HookRegistry.register(f"{memory_pool}.{pool}._create_buffers", _poison, HookType.AFTER)
