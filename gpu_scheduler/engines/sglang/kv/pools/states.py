"""The states of a recurrent model's requests (of layers with linear attention, or of Mamba layers) as a kind of KV:
their memory, SGLang's pool and allocator over it, and its kernel of prompts. Imports SGLang: only the engine process
may import this.

A state has the same size for a request of any length, and is large: tens of MiB. States have whole extents to
themselves, so a state is never moved, and a slot that is freed leaves as it is. A request that runs has one, and the
prefix cache has one for each prefix that it can continue from. Slot 0, which padded tokens write to, is mapped while
the model is active.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.allocator.mamba import MambaSlotAllocator
from sglang.srt.mem_cache.memory_pool import MambaPool
from typing_extensions import override

from gpu_scheduler.engines.sglang.base import current
from gpu_scheduler.engines.sglang.kv.elastic_kv import MAP_DUMMY_WAIT_S, ElasticKv
from gpu_scheduler.engines.sglang.kv.pools.kv_views import heads_of_states, state_views
from gpu_scheduler.engines.sglang.kv.slot_transfer import ids_of
from gpu_scheduler.engines.sglang.memory.kv_stretch import KvStretch

if TYPE_CHECKING:
    from gpu_scheduler.engines.sglang.memory.model_memory import ModelMemory

STATES = 1
"""Number of the stretch of the KV range that states lie over."""
_BEHIND_TOKENS_BYTES = 64 << 20
"""Bytes of addresses for tokens beyond those that SGLang is told of: its pool has a page more, the dummy."""


def state_bytes(cache_params: Any, layers: int) -> int:
    """Bytes of one state, in so many layers."""
    shape, dtype = cache_params.shape, cache_params.dtype
    conv = sum(dim * width for dim, width in shape.conv) * dtype.conv.itemsize
    temporal = torch.Size(shape.temporal).numel() * dtype.temporal.itemsize
    return layers * (conv + temporal)


class ElasticStatePool(MambaPool):  # type: ignore[misc]
    """SGLang's pool of states over the elastic range, with SGLang's arguments. SGLang's constructor would allocate all
    slots, so this one sets all other attributes too; methods of SGLang's that are not overridden work on the views."""

    def __init__(
        self, *, size: int, cache_params: Any, mamba_layer_ids: list[int], device: str, **_arguments: Any
    ) -> None:
        """Reserves the addresses of the model's tokens and states, and maps slot 0. Raises NoMemory."""
        model = current.model()
        memory: ModelMemory = model.memory
        layers = len(mamba_layer_ids)
        extent = model.load.kv_extent_bytes
        stride = -(-state_bytes(cache_params, layers) // extent) * extent
        slots = size + 1
        memory.open_kv([model.kv_span_bytes + _BEHIND_TOKENS_BYTES, slots * stride])
        assert memory.kv is not None
        # An envelope is one state, in whole extents, so numbers of tokens in `ElasticKv` are numbers of states. The
        # empty places of a batch read slot 0.
        self.kv = ElasticKv(
            KvStretch(memory.kv, STATES),
            stride,
            slots,
            model.ranks.now,
            ids=ids_of(torch.device(device)),
            dummy_is_read=True,
        )
        raw = memory.kv_tensor(STATES)[: slots * stride]
        self.kv.rows = raw.view(slots, stride)
        self.kv.hold_dummy(MAP_DUMMY_WAIT_S)
        shape, dtype = cache_params.shape, cache_params.dtype
        parts = [*((each, dtype.conv) for each in shape.conv), (shape.temporal, dtype.temporal)]
        *conv, temporal = state_views(raw, layers, stride, parts)
        self.mamba_cache = self.State(conv=conv, temporal=temporal)
        self.size, self.device = size, device
        self.mamba_layer_ids, self.num_mamba_layers = list(mamba_layer_ids), layers
        self.mem_usage = 0.0  # read by SGLang's log only
        self.conv_shard_groups = getattr(cache_params.shape, "conv_shard_groups", None)
        self.conv_slice_axis = getattr(cache_params.shape, "conv_slice_axis", 0)
        self.debug_memory_pool = False
        self.enable_custom_mem_pool, self.custom_mem_pool = False, None
        # Several tokens at once are not predicted here, so nothing is kept for taking back some of them.
        self.enable_linear_replayssm = self.enable_linear_replayssm_spec = False
        self.replayssm_is_kda = self.replayssm_spec_fold = False
        self.replayssm_write_pos = self.replayssm_spec_write_pos = None
        self.replayssm_cache_base = self.replayssm_is_flush = None

    @override
    def copy_from(self, src_indices: torch.Tensor, dst_indices: torch.Tensor) -> None:
        """Copies one state after the other, through memory for one: for the requests of a step that continue cached
        prefixes SGLang would take as much as all their states have, which no quota has room for."""
        for source, target in zip(src_indices.split(1), dst_indices.split(1), strict=True):
            super().copy_from(source, target)

    @override
    def get_kv_size_bytes(self) -> int:
        return 0  # read by SGLang's log only


class ElasticStateAllocator(MambaSlotAllocator):  # type: ignore[misc]
    """SGLang's allocator of slots of states. SGLang dies where it gets none, so memory comes before it asks
    (`provisioning`). Methods override SGLang's."""

    def __init__(self, size: int, device: str, kv: ElasticKv) -> None:
        self.kv = kv
        super().__init__(size, device)

    @property
    def free_slots(self) -> torch.Tensor:
        """Slots that have memory and are free; only SGLang's debug output reads them."""
        return torch.from_numpy(self.kv.envelopes.all_available())

    @override
    def available_size(self) -> int:
        return self.kv.available

    @override
    def alloc_group_begin(self, num_reqs: int) -> None:
        """Takes no slots ahead: each is as large as thousands of tokens."""
        self._alloc_iter = None

    @override
    def _do_alloc(self, need_size: int) -> torch.Tensor | None:
        taken = self.kv.envelopes.take(need_size)
        return None if taken is None else self.kv.ids.send(taken)

    @override
    def free(self, free_index: torch.Tensor) -> None:
        if free_index.numel() > 0:
            self.kv.free(free_index.to(torch.int64))

    @override
    def clear(self) -> None:
        self.kv.free_all()


class PromptsInSlots:
    """SGLang's kernel of a step's prompts over states that lie in their slots, in place of the kernel `original`. It is
    called once for each layer of a step, so that the host's time counts: views of all layers are made once, and the
    prompts' places once for each step."""

    def __init__(self, original: Callable[..., Any], backend: Any) -> None:
        """`backend`: SGLang's backend of linear attention, which has the pool and tells one step from another. Raises
        ValueError if slots are no whole number of heads apart."""
        self._original = original
        self._backend = backend
        layers = backend.req_to_token_pool.mamba_pool.mamba_cache.temporal
        self._heads = {layer.storage_offset(): heads_of_states(layer) for layer in layers}
        """(heads, distance of slots in heads) of each layer, by where the layer's states begin."""
        self._of: tuple[Any, torch.Tensor] | None = None
        """The step whose `_places` are known, and its prompts' slots."""
        self._places: torch.Tensor
        """First heads of the states of the step's prompts, (prompts,)."""

    def __call__(self, *args: Any, ssm_states: torch.Tensor, cache_indices: torch.Tensor, **kwargs: Any) -> Any:
        """Computes linear attention of a step's prompts over `ssm_states`, (slots, heads, rows, columns), of which the
        prompts have those at `cache_indices`."""
        heads, distance = self._heads[ssm_states.storage_offset()]
        step = self._backend.forward_metadata
        if self._of is None or self._of[0] is not step or self._of[1] is not cache_indices:
            self._of, self._places = (step, cache_indices), cache_indices * distance
        return self._original(*args, ssm_states=heads, cache_indices=self._places, **kwargs)
