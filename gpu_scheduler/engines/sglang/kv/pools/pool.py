"""SGLang's KV pool as views over the elastic range. Imports SGLang: only the engine process may import this.

Only the range and the places of KV in it (`kv_views.py`) are ours; SGLang's own code reads and writes through the
views.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from typing_extensions import override

from gpu_scheduler.engines.sglang.base import current
from gpu_scheduler.engines.sglang.kv.elastic_kv import MAP_DUMMY_WAIT_S, ElasticKv
from gpu_scheduler.engines.sglang.kv.engine_kv import EVERY, WINDOW
from gpu_scheduler.engines.sglang.kv.pools.kv_views import KvShape, kv_views
from gpu_scheduler.engines.sglang.kv.slot_transfer import ids_of
from gpu_scheduler.engines.sglang.memory.kv_stretch import KvStretch

if TYPE_CHECKING:
    from gpu_scheduler.engines.sglang.memory.model_memory import ModelMemory

_LABEL_OF_WINDOWS = "SWA"
"""SGLang's label of the pool of layers with a window, where there are two."""


def open_stretches(shapes: Sequence[KvShape]) -> None:
    """Reserves the range of the model that is being loaded: a stretch for the KV of each of these shapes."""
    memory: ModelMemory = current.model().memory
    memory.open_kv([shape.pages * shape.page_bytes for shape in shapes])


def open_range(
    shape: KvShape, device: str, *, divided: bool = True, kind: int = EVERY
) -> tuple[ElasticKv, torch.Tensor]:
    """The stretch for one kind of KV in the range of the model that is being loaded, for KV of this shape: (its KV
    blocks, its bytes). If no stretches are reserved yet, the stretch is the only one. Only the dummy page is mapped,
    before anything can run. `divided`: whether each rank has the KV of some heads. Raises NoMemory if the page cannot
    be mapped."""
    model = current.model()
    memory: ModelMemory = model.memory
    if memory.kv is None:
        open_stretches([shape])
    assert memory.kv is not None
    nbytes = shape.pages * shape.page_bytes
    raw = memory.kv_tensor(kind)[:nbytes]
    assert len(raw) == nbytes, "the pool is larger than the stretch that is reserved for it"
    kv = ElasticKv(
        KvStretch(memory.kv, kind),
        shape.page_bytes,
        shape.pages,
        model.ranks.now,
        page_size=shape.page_size,
        ids=ids_of(torch.device(device)),
        divided=divided,
        # Tokens that have left a window are at slot 0. FlashAttention reads them together with tokens within the
        # window, and multiplies their values by 0: NaN would remain NaN.
        dummy_is_read=kind == WINDOW,
    )
    kv.rows = raw.view(shape.pages, shape.page_bytes)
    kv.hold_dummy(MAP_DUMMY_WAIT_S)
    return kv, raw


class ElasticPool(MHATokenToKVPool):  # type: ignore[misc]
    """The KV pool of models with keys and values of every token. Created by SGLang with its own arguments. Methods
    override SGLang's."""

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
        self.k_buffer, self.v_buffer = kv_views(raw, shape)
        # SGLang's own pool has these beside its views; no KV is quantised in blocks here.
        self.native_k_scale_buffer = self.native_v_scale_buffer = None
        self.dq_k_buffer = self.dq_v_buffer = None
        self._kv_buffer_descs: list[object] = []
        self._init_data_ptrs_and_strides()
