"""The adapters (LoRA) of one model, over SGLang's own manager: read with the first request that names one, kept in host
memory, and copied into buffers on the device as batches need them.

The buffers lie in a range of the model's lease and leave while it sleeps; batches after it has woken fill them again.

Imports SGLang: only the engine process may import this.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container
from typing import Any

import torch
from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.lora.mem_pool import EMPTY_SLOT
from sglang.srt.lora.utils import get_normalized_target_modules
from torch.overrides import TorchFunctionMode

from gpu_scheduler.engines.sglang.base.errors import BrokenModel, NotNow
from gpu_scheduler.engines.sglang.memory.model_memory import ModelMemory
from gpu_scheduler.engines.sglang.weights import adapter_files
from gpu_scheduler.policy.adapters import adapter_key
from protos import common_pb2
from services.telemetry import log

_log = log.get(__name__)
_ALIGN_BYTES = 256


class Adapters:
    """The adapters of a model that was loaded with room for some."""

    def __init__(self, memory: ModelMemory) -> None:
        self._memory = memory
        self._manager: Any = None
        self._leaving: set[str] = set()
        """Adapters that the catalogue does not have any more, while requests use them."""

    # --- buffers

    def build_pool(self, build: Callable[[], None]) -> None:
        """Has SGLang make its buffers, in memory of the lease instead of torch's. Raises NoMemory."""
        with _Placed() as counted:
            build()
        with _Placed(self._memory.open_adapters(counted.end)):
            build()

    def managed_by(self, manager: Any) -> None:
        """`manager`: SGLang's, whose buffers are there."""
        self._manager = manager

    def leave(self) -> None:
        """Unmaps the buffers, with all that they hold. The device must be done with them."""
        pool = self._manager.memory_pool
        for key in pool.uid_to_buffer_id:
            pool.eviction_policy.remove(key)
        pool.uid_to_buffer_id.clear()
        pool.buffer_id_to_uid = [EMPTY_SLOT] * pool.max_loras_per_batch
        self._memory.unmap_adapters()

    # --- adapters

    def need(self, adapter: common_pb2.Adapter) -> str:
        """SGLang's id of an adapter, which is read if it is not here. Raises HostFault if its files cannot be read,
        BrokenModel if they do not fit the model, NotNow if there is no room for its like."""
        key = adapter_key(adapter.name, adapter.generation)
        self._leaving.discard(key)
        if key not in self._manager.loras:
            self._read(key, adapter)
        return key

    def _read(self, key: str, adapter: common_pb2.Adapter) -> None:
        manager, began = self._manager, time.monotonic()
        files = adapter_files.read(adapter.path, manager.dtype, self._widths())
        room = manager.memory_pool.max_lora_rank
        joined = get_normalized_target_modules(files.config["target_modules"])
        if files.config["r"] > room or not joined <= manager.memory_pool.target_modules:
            raise NotNow(f"the model was loaded without room for adapter {adapter.name}")
        ref = LoRARef(lora_id=key, lora_name=key, lora_path=adapter.path, pinned=False)
        told = manager.load_lora_adapter_from_tensors(ref, files.tensors, files.config)
        if told.success and (problem := self._unfit(key)):
            manager.unload_lora_adapter(ref)
            raise BrokenModel(f"adapter {adapter.name} is for another model: {problem}")
        if not told.success:
            vars(manager)["configs"].pop(key, None)
            raise BrokenModel(f"adapter {adapter.name}: {' '.join(told.error_message.split())}")
        seconds = round(time.monotonic() - began, 3)
        _log.info("adapter read", adapter=adapter.name, rank=files.config["r"], seconds=seconds)

    def _unfit(self, key: str) -> str:
        """Why an adapter's tensors do not fit the buffers, which SGLang asserts in the middle of a step; empty: they
        do."""
        pool, lora = self._manager.memory_pool, self._manager.loras[key]
        for layer, held in enumerate(lora.layers):
            for name, tensor in held.weights.items():
                module = next((each for each in pool.A_buffer if f".{each}." in name), None)
                if module is None:
                    return f"it has {name}"
                is_a = ".lora_A." in name
                buffer = (pool.A_buffer if is_a else pool.B_buffer)[module][layer][0]
                rank = lora.config.r
                wanted = (buffer.shape[0] // pool.max_lora_rank * rank, buffer.shape[1])
                if not is_a:
                    wanted = (buffer.shape[0], rank)
                if tuple(tensor.shape) != wanted:
                    return f"{name} is {list(tensor.shape)}, the model needs {list(wanted)}"
        return ""

    def _widths(self) -> dict[str, int]:
        """Rows of the layers that SGLang joins, by the last part of their names."""
        config = self._manager.base_hf_config
        heads = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        key_value = config.num_key_value_heads * heads
        return {
            "q_proj": config.num_attention_heads * heads,
            "k_proj": key_value,
            "v_proj": key_value,
            "gate_proj": config.intermediate_size,
            "up_proj": config.intermediate_size,
        }

    def forget(self, key: str, used: Container[str]) -> None:
        """Lets go of an adapter, at once or when no request of `used` has it any more."""
        self._leaving.add(key)
        self.tidy(used)

    def tidy(self, used: Container[str]) -> None:
        """Lets go of adapters that have left the catalogue, except for those in `used`."""
        for key in [key for key in self._leaving if key not in used]:
            self._leaving.discard(key)
            if (ref := self._manager.lora_refs.get(key)) is not None:
                self._manager.unload_lora_adapter(ref)
                _log.info("adapter forgotten", adapter=key)


class _Placed(TorchFunctionMode):
    """Context in which `torch.zeros` takes its memory from `memory`, bytes that are mapped and zero, in a row. Without
    `memory` it makes tensors that have none, and counts their bytes."""

    def __init__(self, memory: torch.Tensor | None = None) -> None:
        super().__init__()
        self._memory = memory
        self.end = 0
        """Bytes up to the end of the last tensor."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch.zeros:
            return func(*args, **kwargs)
        made = func(*args, **{**kwargs, "device": "meta"})
        start, nbytes = self.end, made.numel() * made.element_size()
        self.end += -(-nbytes // _ALIGN_BYTES) * _ALIGN_BYTES
        if self._memory is None:
            return made
        return self._memory[start : start + nbytes].view(made.dtype).view(made.shape)


class Unpinned(TorchFunctionMode):
    """Context in which torch pins no host memory, which it cannot without a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.pin_memory:
            return args[0]
        kwargs = dict(kwargs or {})
        kwargs.pop("pin_memory", None)
        return func(*args, **kwargs)
