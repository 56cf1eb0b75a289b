"""SGLang's pool of latent rows (multi-head latent attention, MLA) as views over the elastic range. Imports SGLang: only
the engine process may import this.

A token has one row in each layer: the latent vector of which all heads' keys and values are made, and behind it the
part of the key that is rotated by position. Rows are the same on every rank of a tensor-parallel group. The kernels
that read and store rows take the distance from token to token from the views: FlashAttention 3, FlashMLA, Triton's
attention and SGLang's kernel that stores a row.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod
from typing_extensions import override

from gpu_scheduler.engines.sglang.kv.elastic_kv import ElasticKv
from gpu_scheduler.engines.sglang.kv.pools.kv_views import KvShape, kv_views
from gpu_scheduler.engines.sglang.kv.pools.pool import open_range


class ElasticLatentPool(MLATokenToKVPool):  # type: ignore[misc]
    """The KV pool of models with multi-head latent attention. Created by SGLang with its own arguments. Methods
    override SGLang's."""

    kv: ElasticKv

    @override
    def _create_buffers(self) -> None:
        """Reserves the range. Raises NoMemory if its first page cannot be mapped."""
        shape = KvShape(
            layers=self.layer_num,
            heads=1,
            k_dim=self.kv_cache_dim,
            v_dim=0,  # attention reads values out of the latent part of the same row
            page_size=self.page_size,
            pages=self.size // self.page_size + 1,
            dtype=self.store_dtype,
        )
        if torch.device(self.device).type == "cpu":
            attend_by_torch()
        self.kv, raw = open_range(shape, self.device, divided=False)
        self.kv_buffer, _ = kv_views(raw, shape)


def attend_by_torch() -> None:
    """Lets torch's own attention, which engines on CPUs have, compute models with latent rows."""
    AttentionBackendRegistry.register("torch_native", _over_rows)


def _over_rows(_attention: Any, _forward_batch: Any) -> AttnForwardMethod:
    """The method by which a step attends with torch's own attention, which engines on CPUs have: over latent rows
    always. SGLang knows no way for it and would take Triton's, which attends over keys and values of all heads where no
    prompt of a step has a cached prefix; torch's attention reads keys and values from the pool, where there are none of
    heads."""
    return AttnForwardMethod.MLA
