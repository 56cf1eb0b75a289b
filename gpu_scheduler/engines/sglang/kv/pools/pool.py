"""SGLang's KV pool as views over the elastic range. Imports SGLang: only the engine process may import this.

How the KV lies in the range is a `RangeLayout`: token by token, or page by page. Only the range and the layout are
ours; what is read and written through the views is SGLang's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from sglang.kernels.ops.kvcache.kvcache import can_use_store_cache, store_cache
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.runtime_context import get_exec
from typing_extensions import override

from gpu_scheduler.engines.sglang.base import current
from gpu_scheduler.engines.sglang.kv.elastic_kv import ElasticKv
from gpu_scheduler.engines.sglang.kv.engine_kv import EVERY, WINDOW
from gpu_scheduler.engines.sglang.kv.pools.kv_layouts import KvShape, PageMajor, RangeLayout, TokenMajor
from gpu_scheduler.engines.sglang.kv.slot_transfer import CudaIds, HostIds
from gpu_scheduler.engines.sglang.memory.kv_stretch import KvStretch

if TYPE_CHECKING:
    from gpu_scheduler.engines.sglang.memory.model_memory import ModelMemory

_MAP_DUMMY_WAIT_S = 5.0
_LABEL_OF_WINDOWS = "SWA"
"""SGLang's label of the pool of layers with a window, where there are two."""


def layout_for(attention: str, token_major: bool) -> RangeLayout:
    """The layout for an attention backend of SGLang's. Page by page is faster where the backend reads it, which only
    FlashAttention does; `token_major` asks for the other one there too."""
    return PageMajor() if attention.startswith("fa") and not token_major else TokenMajor()


def open_stretches(shapes: Sequence[KvShape]) -> None:
    """Reserves the range of the model that is being loaded: a stretch for the KV of each of these shapes."""
    memory: ModelMemory = current.model().memory
    memory.open_kv([shape.pages * shape.page_bytes for shape in shapes])


def open_range(
    shape: KvShape, device: str, *, divided: bool = True, kind: int = EVERY
) -> tuple[ElasticKv, torch.Tensor]:
    """The stretch for one kind of KV in the range of the model that is being loaded, for KV of this shape: (its KV
    blocks, its bytes). Where no stretches are reserved yet, it is the only one. Only the dummy page is mapped, before
    anything can run. `divided`: whether each rank has the KV of some heads. Raises NoMemory if the page cannot be
    mapped."""
    model = current.model()
    memory: ModelMemory = model.memory
    if memory.kv is None:
        open_stretches([shape])
    assert memory.kv is not None
    nbytes = shape.pages * shape.page_bytes
    raw = memory.kv_tensor(kind)[:nbytes]
    assert len(raw) == nbytes, "the pool is larger than the stretch that is reserved for it"
    on_host = torch.device(device).type == "cpu"
    kv = ElasticKv(
        KvStretch(memory.kv, kind),
        shape.page_bytes,
        shape.pages,
        model.ranks.now,
        page_size=shape.page_size,
        ids=HostIds() if on_host else CudaIds(torch.device(device)),
        divided=divided,
    )
    kv.hold_dummy(_MAP_DUMMY_WAIT_S)
    kv.rows = raw.view(shape.pages, shape.page_bytes)
    return kv, raw


class ElasticPool(MHATokenToKVPool):  # type: ignore[misc]
    """The KV pool of models with keys and values of every token. Created by SGLang with its own arguments. Methods
    override SGLang's.

    SGLang stores K and V into an ordinary pool with one kernel for both. Where the layout is another one, the whole
    range is also an ordinary pool of rows (`Rows`), so that the same kernel stores here too, and a token's row is
    computed once a step.
    """

    kv: ElasticKv

    @override
    def _create_buffers(self) -> None:
        """Reserves the range. Raises NoMemory if its first page cannot be mapped."""
        shape = KvShape(
            layers=self.layer_num,
            heads=self.head_num,
            k_dim=self.head_dim,
            v_dim=self.v_head_dim,
            page_size=self.page_size,
            pages=self.size // self.page_size + 1,
            dtype=self.store_dtype,
        )
        kind = WINDOW if self.allocation_label == _LABEL_OF_WINDOWS else EVERY
        self.kv, raw = open_range(shape, self.device, kind=kind)
        layout = layout_for(get_exec().kernel.attention_backend, bool(current.model().options.token_major))
        self.k_buffer, self.v_buffer = layout.views(raw, shape)
        rows = layout.rows(raw, shape)
        row_bytes = self.head_num * self.head_dim * self.store_dtype.itemsize
        self._rows = rows if rows is not None and can_use_store_cache(row_bytes) else None
        # SGLang's own pool has these beside its views; no KV is quantised in blocks here.
        self.native_k_scale_buffer = self.native_v_scale_buffer = None
        self.dq_k_buffer = self.dq_v_buffer = None
        self._kv_buffer_descs: list[object] = []
        self._init_data_ptrs_and_strides()

    @override
    def _store_kv_layer(self, layer_idx: int, loc: torch.Tensor, cache_k: torch.Tensor, cache_v: torch.Tensor) -> None:
        if self.k_buffer[layer_idx].dim() == 3:
            super()._store_kv_layer(layer_idx, loc, cache_k, cache_v)
            return
        if self._rows is None:
            pages, within = loc // self.page_size, loc % self.page_size
            self.k_buffer[layer_idx][pages, :, within] = cache_k
            self.v_buffer[layer_idx][pages, :, within] = cache_v
            return
        k_rows, v_rows = self._rows.of_layer(layer_idx)
        row = k_rows.shape[1]
        store_cache(
            cache_k.view(-1, row),
            cache_v.view(-1, row),
            k_rows,
            v_rows,
            self._rows.of_step(layer_idx, loc),
            row_bytes=row * k_rows.itemsize,
            size_limit=len(k_rows),
        )
