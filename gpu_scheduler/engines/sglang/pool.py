"""SGLang's KV pool as views over the elastic range. Imports SGLang: only the engine process may import this.

Token-major: all layers' K and V of one slot lie back to back, so that few extents hold many whole tokens. Each
layer's buffer is a strided view (slots, heads, dim) of the one range; attention on the CPU gathers rows of it and
does not care.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from gpu_scheduler.engines.sglang import current
from gpu_scheduler.engines.sglang.kv import ElasticKv

if TYPE_CHECKING:
    from gpu_scheduler.engines.sglang.memory import Memory

_MAP_DUMMY_WAIT_S = 5.0


class ElasticPool(MHATokenToKVPool):  # type: ignore[misc]
    """Created by SGLang with its own arguments; makes the range, and maps the dummy slot before anything can run."""

    kv: ElasticKv

    def _create_buffers(self) -> None:
        self.k_scale_buffer = self.v_scale_buffer = self.dq_k_buffer = self.dq_v_buffer = None
        memory: Memory = current.instance().memory
        rows = self.size + self.page_size
        row_of_k = self.head_num * self.head_dim
        row_of_v = self.head_num * self.v_head_dim
        slot = self.layer_num * (row_of_k + row_of_v)
        envelope_bytes = slot * self.store_dtype.itemsize
        self.kv = ElasticKv(memory.open_kv(rows * envelope_bytes), envelope_bytes, rows)
        self.kv.hold_dummy(_MAP_DUMMY_WAIT_S)
        flat = memory.kv_tensor().view(self.store_dtype)
        self.k_buffer: list[torch.Tensor] = []
        self.v_buffer: list[torch.Tensor] = []
        for layer in range(self.layer_num):
            start = layer * (row_of_k + row_of_v)
            k_shape, v_shape = (rows, self.head_num, self.head_dim), (rows, self.head_num, self.v_head_dim)
            self.k_buffer.append(flat.as_strided(k_shape, (slot, self.head_dim, 1), start))
            self.v_buffer.append(flat.as_strided(v_shape, (slot, self.v_head_dim, 1), start + row_of_k))
        self._kv_buffer_descs: list[object] = []
        self._init_data_ptrs_and_strides()
