"""SGLang's paged allocator over the elastic range: a KV block (envelope) is a page of SGLang's. Imports SGLang: only
the engine process may import this.

Pages are chosen on the host from lengths that are known there; SGLang's own kernel computes the slots in them. Whatever
SGLang frees begins at the start of a page, so a page is known by its first slot and nothing has to be sorted or read on
the device.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.allocator.paged import (
    PagedTokenToKVPoolAllocator,
    alloc_decode_kernel,
    alloc_extend_kernel,
    alloc_extend_naive,
)

from gpu_scheduler.engines.sglang.base.kernels import batch_constant
from gpu_scheduler.engines.sglang.kv.elastic_kv import ElasticKv


class ElasticPagedAllocator(PagedTokenToKVPoolAllocator):  # type: ignore[misc]
    """A paged allocator whose page 0 is the dummy. Methods override SGLang's, with its shapes and types."""

    def __init__(
        self, size: int, page_size: int, *, dtype: torch.dtype, device: str, kvcache: Any, kv: ElasticKv
    ) -> None:
        self.kv = kv
        self._on_host = torch.device(device).type == "cpu"
        super().__init__(size, page_size, dtype, device, kvcache, need_sort=False)
        self._within_page = torch.arange(page_size, device=device)

    def clear(self) -> None:
        self.is_not_in_free_group = True
        self.free_group: list[torch.Tensor] = []
        # Read only by SGLang's debug output.
        self.free_pages = self.release_pages = torch.empty(0, dtype=torch.int64, device=self.device)
        self.kv.free_all()

    def available_size(self) -> int:
        return self.kv.available

    def _take(self, count: int) -> torch.Tensor | None:
        """The lowest `count` free pages, (count,) int64 on the device; None when there are fewer."""
        pages = self.kv.envelopes.take(count)
        return None if pages is None else self.kv.ids.send(pages)

    def alloc(self, need_size: int) -> torch.Tensor | None:
        pages = self._take(need_size // self.page_size)
        return None if pages is None else (pages[:, None] * self.page_size + self._within_page).reshape(-1)

    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
        num_new_pages: int | None = None,
    ) -> torch.Tensor | None:
        size = self.page_size
        before, after = prefix_lens_cpu.numpy(), seq_lens_cpu.numpy()
        pages = self._take(int(((after + size - 1) // size - (before + size - 1) // size).sum()))
        if pages is None:
            return None
        out = torch.empty(extend_num_tokens, dtype=torch.int64, device=self.device)
        if self._on_host:
            alloc_extend_naive(prefix_lens, seq_lens, last_loc, pages, out, size, self.device)
        else:
            batch = len(seq_lens)
            alloc_extend_kernel[(batch,)](prefix_lens, seq_lens, last_loc, pages, out, batch_constant(batch), size)
        return out

    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        size, batch = self.page_size, len(seq_lens)
        # `seq_lens` counts the new token: the one that is first on its page needs a page.
        pages = self._take(int(np.count_nonzero(seq_lens_cpu.numpy() % size == 1)) if size > 1 else batch)
        if pages is None:
            return None
        out = torch.empty(batch, dtype=torch.int64, device=self.device)
        if self._on_host:
            alloc_extend_naive(seq_lens - 1, seq_lens, last_loc, pages, out, size, self.device)
        else:
            alloc_decode_kernel[(batch,)](seq_lens, last_loc, pages, out, batch_constant(batch), size)
        return out

    def free(self, free_index: torch.Tensor) -> None:
        if free_index.numel() == 0:
            return
        # Computed at once: the index may be a view of a row that is written again before a group ends.
        pages = free_index[:: self.page_size] // self.page_size
        if self.is_not_in_free_group:
            self.kv.free(pages)
        else:
            self.free_group.append(pages)

    def free_group_end(self) -> None:
        self.is_not_in_free_group = True
        group, self.free_group = self.free_group, []
        if group:
            self.kv.free(torch.cat(group))
