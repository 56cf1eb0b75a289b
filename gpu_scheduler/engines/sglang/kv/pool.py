"""SGLang's KV pools as views over the elastic range. Imports SGLang: only the engine process may import this.

On the host the layout is token-major: all layers' K and V of one slot lie back to back, and each layer's buffer is a
strided view (slots, heads, dim) of the one range; attention there gathers rows of it, so strides do not matter. On a
GPU it is page-major: a page holds each layer's K, then V, as in SGLang's own pool of that layout. Either way a page is
one KV block (envelope), and envelopes are packed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.jit_kernel.kvcache import can_use_store_cache, store_cache
from sglang.srt.mem_cache.layout.page_major import build_page_major_mha_views
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, PageMajorMHATokenToKVPool

from gpu_scheduler.engines.sglang.base import current
from gpu_scheduler.engines.sglang.kv.elastic_kv import ElasticKv
from gpu_scheduler.engines.sglang.kv.kv_rows import Rows
from gpu_scheduler.engines.sglang.kv.slot_transfer import CudaIds, HostIds

if TYPE_CHECKING:
    from gpu_scheduler.engines.sglang.memory.model_memory import ModelMemory

_MAP_DUMMY_WAIT_S = 5.0


def _open(pool: Any) -> tuple[ElasticKv, torch.Tensor]:
    """The range of a pool and its bytes. Only the dummy page is mapped, before anything can run. Raises NoMemory if it
    cannot be."""
    model = current.model()
    memory: ModelMemory = model.memory
    slot = pool.layer_num * pool.head_num * (pool.head_dim + pool.v_head_dim) * pool.store_dtype.itemsize
    envelope_bytes, count = slot * pool.page_size, pool.size // pool.page_size + 1
    on_host = torch.device(pool.device).type == "cpu"
    kv = ElasticKv(
        memory.open_kv(count * envelope_bytes),
        envelope_bytes,
        count,
        model.ranks.now,
        page_size=pool.page_size,
        ids=HostIds() if on_host else CudaIds(torch.device(pool.device)),
    )
    kv.hold_dummy(_MAP_DUMMY_WAIT_S)
    raw = memory.kv_tensor()[: count * envelope_bytes]
    kv.rows = raw.view(count, envelope_bytes)
    return kv, raw


class ElasticPool(MHATokenToKVPool):  # type: ignore[misc]
    """The KV pool on the host, token-major. Created by SGLang with its own arguments."""

    kv: ElasticKv

    def _create_buffers(self) -> None:
        self.k_scale_buffer = self.v_scale_buffer = self.dq_k_buffer = self.dq_v_buffer = None
        self.kv, raw = _open(self)
        flat = raw.view(self.store_dtype)
        rows = self.size + self.page_size
        row_of_k, row_of_v = self.head_num * self.head_dim, self.head_num * self.v_head_dim
        slot = self.layer_num * (row_of_k + row_of_v)
        self.k_buffer: list[torch.Tensor] = []
        self.v_buffer: list[torch.Tensor] = []
        for layer in range(self.layer_num):
            start = layer * (row_of_k + row_of_v)
            k_shape, v_shape = (rows, self.head_num, self.head_dim), (rows, self.head_num, self.v_head_dim)
            self.k_buffer.append(flat.as_strided(k_shape, (slot, self.head_dim, 1), start))
            self.v_buffer.append(flat.as_strided(v_shape, (slot, self.v_head_dim, 1), start + row_of_k))
        self._kv_buffer_descs: list[object] = []
        self._init_data_ptrs_and_strides()


class ElasticPageMajorPool(PageMajorMHATokenToKVPool):  # type: ignore[misc]
    """The KV pool on a GPU, page-major. Created by SGLang with its own arguments.

    SGLang's kernel for storing into views of this layout takes two to six times as long as the one for ordinary pools,
    and is launched through Triton, for every layer. Where K and V are of one size the whole range is also an ordinary
    pool of rows: so the ordinary kernel stores here too, and a token's row is computed once a step.
    """

    kv: ElasticKv

    def _create_buffers(self) -> None:
        self.kv, self._raw = _open(self)
        num_pages = self.size // self.page_size + 1
        self.k_buffer, self.v_buffer = build_page_major_mha_views(
            self._raw,
            layer_num=self.layer_num,
            head_num=self.head_num,
            head_dim=self.head_dim,
            v_head_dim=self.v_head_dim,
            store_dtype=self.store_dtype,
            page_size=self.page_size,
            num_pages=num_pages,
        )
        # SGLang's own pool has these beside its views.
        views = [*self.k_buffer, *self.v_buffer]
        self.data_ptrs = torch.tensor([view.data_ptr() for view in views], dtype=torch.uint64, device=self.device)
        self.k_data_ptrs, self.v_data_ptrs = self.data_ptrs.split(self.layer_num)
        self.data_strides = torch.tensor([view.stride(0) * view.dtype.itemsize for view in views], device=self.device)
        self._rows: Rows | None = None
        row = self.head_num * self.head_dim
        if self.head_dim == self.v_head_dim and can_use_store_cache(row * self.store_dtype.itemsize):
            self._rows = Rows(self._raw.view(self.store_dtype), self.layer_num, self.page_size, row)

    def _store_kv_layer(self, layer: int, loc: torch.Tensor, cache_k: torch.Tensor, cache_v: torch.Tensor) -> None:
        if self._rows is None:
            super()._store_kv_layer(layer, loc, cache_k, cache_v)
            return
        k_rows, v_rows = self._rows.of_layer(layer)
        row = k_rows.shape[1]
        store_cache(
            cache_k.view(-1, row),
            cache_v.view(-1, row),
            k_rows,
            v_rows,
            self._rows.of_step(layer, loc),
            row_bytes=row * k_rows.itemsize,
            size_limit=len(k_rows),
        )
