"""SGLang's paged allocator over the elastic range: a KV block (envelope) is a page of SGLang's. Imports SGLang: only
the engine process may import this.

The host chooses pages by lengths that it knows; SGLang's own kernel computes the slots in them. SGLang frees slots from
the start of a page on, so each page is known by its first slot, and nothing has to be sorted or read on the device.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.allocator.paged import (
    PagedTokenToKVPoolAllocator,
    alloc_decode_kernel,
    alloc_decode_naive,
    alloc_extend_kernel,
    alloc_extend_naive,
)
from typing_extensions import override

from gpu_scheduler.engines.sglang.base.kernels import batch_constant
from gpu_scheduler.engines.sglang.kv.elastic_kv import ElasticKv
from gpu_scheduler.engines.sglang.kv.pools.allocator import GrowingAllocator, OneKindAllocator


class StepAllocator(GrowingAllocator):
    """An allocator that gives a step whole pages. Methods override SGLang's, with its shapes and types."""

    def _take(self, count: int) -> torch.Tensor | None:
        """Numbers of the lowest `count` free pages, on the device, for `place_prompts` and `place_decode`; None when
        there are fewer."""
        raise NotImplementedError

    def place_prompts(
        self, pages: torch.Tensor, before: torch.Tensor, after: torch.Tensor, last: torch.Tensor, tokens: int
    ) -> torch.Tensor:
        """Slots of the `tokens` that a step computes of prompts, (tokens,). `pages`: numbers of the new pages.
        `before`, `after`: tokens of each prompt before and after the step, (prompts,). `last`: slot of the last token
        of each prompt before the step, (prompts,); -1: it has none."""
        raise NotImplementedError

    def place_decode(self, pages: torch.Tensor, after: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        """Slots of the tokens of a decode step, (requests,). `pages`: numbers of the new pages. `after`: tokens of each
        request after the step. `last`: slot of the last token of each request before the step."""
        raise NotImplementedError

    @override
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
        return None if pages is None else self.place_prompts(pages, prefix_lens, seq_lens, last_loc, extend_num_tokens)

    @override
    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        size = self.page_size
        # `seq_lens` counts the new token: the one that is first on its page needs a page.
        pages = self._take(int(np.count_nonzero(seq_lens_cpu.numpy() % size == 1)) if size > 1 else len(seq_lens))
        return None if pages is None else self.place_decode(pages, seq_lens, last_loc)


class ElasticPagedAllocator(StepAllocator, OneKindAllocator, PagedTokenToKVPoolAllocator):  # type: ignore[misc]
    """A paged allocator whose page 0 is the dummy. Methods override SGLang's, with its shapes and types."""

    def __init__(
        self, size: int, page_size: int, *, dtype: torch.dtype, device: str, kvcache: Any, kv: ElasticKv
    ) -> None:
        self.kv = kv
        self._on_host = torch.device(device).type == "cpu"
        super().__init__(size, page_size, dtype, device, kvcache, need_sort=False)
        self._within_page = torch.arange(page_size, device=device)

    def _take(self, count: int) -> torch.Tensor | None:
        """The lowest `count` free pages, (count,) int64; None when there are fewer."""
        pages = self.kv.envelopes.take(count)
        return None if pages is None else self.kv.ids.send(pages)

    @override
    def alloc(self, need_size: int) -> torch.Tensor | None:
        pages = self._take(need_size // self.page_size)
        if pages is None or self.page_size == 1:
            return pages
        return (pages[:, None] * self.page_size + self._within_page).reshape(-1)

    def place_prompts(
        self, pages: torch.Tensor, before: torch.Tensor, after: torch.Tensor, last: torch.Tensor, tokens: int
    ) -> torch.Tensor:
        out = torch.empty(tokens, dtype=torch.int64, device=self.device)
        if self._on_host:
            alloc_extend_naive(before, after, last, pages, out, self.page_size, self.device)
        else:
            batch = len(after)
            alloc_extend_kernel[(batch,)](before, after, last, pages, out, batch_constant(batch), self.page_size)
        return out

    def place_decode(self, pages: torch.Tensor, after: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        batch = len(after)
        out = torch.empty(batch, dtype=torch.int64, device=self.device)
        if self._on_host:
            alloc_decode_naive(after, last, pages, out, self.page_size, len(pages))
        else:
            alloc_decode_kernel[(batch,)](after, last, pages, out, batch_constant(batch), self.page_size)
        return out

    @override
    def free(self, free_index: torch.Tensor) -> None:
        # SGLang would search the slots for distinct pages; but they always begin with a page, and lie in whole pages.
        self.free_segment(free_index, start_pos=0)

    @override
    def free_segment(self, free_index: torch.Tensor, *, start_pos: int) -> None:
        assert start_pos % self.page_size == 0, f"what is freed begins in the middle of a page, at {start_pos}"
        if self.evicted is not None:
            self.note_evicted(free_index)
            return
        # Computed at once: the index may be a view of a row that is written again before a group ends.
        self.free_page_ids(free_index[:: self.page_size] // self.page_size)

    @override
    def free_page_ids(self, page_ids: torch.Tensor) -> None:
        if page_ids.numel() == 0:
            return
        if self.free_group is None:
            self.kv.free(page_ids)
        else:
            self.free_group.append(page_ids)

    @override
    def free_group_begin(self) -> None:
        assert self.free_group is None, "groups are not nested"
        self.free_group = []

    @override
    def free_group_end(self) -> None:
        group, self.free_group = self.free_group, None
        if group:
            self.kv.free(torch.cat(group))
