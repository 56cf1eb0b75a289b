"""SGLang's token allocator over an elastic range in host memory. Imports SGLang: only the engine process may import
this.

`available_size` is exact at this moment; growth happens before SGLang asks (`admission`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator

from gpu_scheduler.engines.sglang.kv.elastic_kv import ElasticKv


class ElasticAllocator(TokenToKVPoolAllocator):  # type: ignore[misc]
    """A slot is a KV block (envelope) of one token; slot 0 is the dummy. Methods override SGLang's, with its shapes and
    types."""

    def __init__(self, size: int, *, dtype: torch.dtype, device: str, kvcache: Any, kv: ElasticKv) -> None:
        self.kv = kv
        super().__init__(size, dtype, device, kvcache, need_sort=False)

    def clear(self) -> None:
        self.is_not_in_free_group = True
        self.free_group: list[torch.Tensor] = []
        # Read only by SGLang's debug output.
        self.free_pages = self.release_pages = torch.empty(0, dtype=torch.int64, device=self.device)
        self.kv.free_all()

    def available_size(self) -> int:
        return self.kv.envelopes.available

    def alloc(self, need_size: int) -> torch.Tensor | None:
        taken = self.kv.envelopes.take(need_size)
        return None if taken is None else torch.from_numpy(taken)

    def free(self, free_index: torch.Tensor) -> None:
        if free_index.numel() == 0:
            return
        if not self.is_not_in_free_group:
            # The index may be a view of a row that is written again before the group ends.
            self.free_group.append(free_index.clone())
            return
        self.kv.envelopes.give(free_index.numpy().astype(np.int64, copy=False))
