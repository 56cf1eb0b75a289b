"""The adapters (LoRA) of one model, over SGLang's own manager: read by a thread with the first request that names one,
kept in host memory, and copied into buffers on the device as batches need them.

The buffers lie in a range of the model's lease and leave while it sleeps; batches after it has woken fill them again.

Imports SGLang: only the engine process may import this.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Container
from typing import Any

import torch
from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.lora.mem_pool import EMPTY_SLOT
from sglang.srt.lora.utils import get_normalized_target_modules
from torch.overrides import TorchFunctionMode

from gpu_scheduler.engines.sglang.base.errors import BrokenModel, CommandError, HostFault, NotNow
from gpu_scheduler.engines.sglang.base.options import one_line
from gpu_scheduler.engines.sglang.memory.model_memory import ModelMemory
from gpu_scheduler.engines.sglang.weights import adapter_files
from gpu_scheduler.policy.adapter_room import adapter_key
from protos import common_pb2
from services.telemetry import log

_log = log.get(__name__)
_ALIGN_BYTES = 256
_KEPT = 2
"""Adapters in host memory for each that a batch may have. Others are read again when a request names them."""


class _Read:
    """The files of one adapter, read and checked by a thread."""

    def __init__(self, read: Callable[[], adapter_files.AdapterFiles]) -> None:
        self._files: adapter_files.AdapterFiles | None = None
        self._error: CommandError = HostFault("its files were not read")
        self._thread = threading.Thread(target=self._run, args=(read,), name="read an adapter", daemon=True)
        self._thread.start()

    def _run(self, read: Callable[[], adapter_files.AdapterFiles]) -> None:
        try:
            self._files = read()
        except CommandError as error:
            self._error = error
        except Exception as error:  # also of files that no one has thought of
            self._error = HostFault(f"its files cannot be read: {one_line(error)}")

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def files(self) -> adapter_files.AdapterFiles:
        """The files, once they are read. Raises CommandError."""
        self._thread.join()
        if self._files is None:
            raise self._error
        return self._files


class Adapters:
    """The adapters of a model that was loaded with room for some."""

    def __init__(self, memory: ModelMemory) -> None:
        self._memory = memory
        self._manager: Any = None
        self._kept: dict[str, None] = {}
        """Adapters in host memory, the one used longest ago first."""
        self._reads: dict[str, _Read] = {}
        """Adapters that are being read, or were read for requests that wait for them."""
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

    def empty(self) -> None:
        """Notes that the buffers hold nothing any more: they are about to be unmapped, and come back as zeros."""
        pool = self._manager.memory_pool
        for key in pool.uid_to_buffer_id:
            pool.eviction_policy.remove(key)
        pool.uid_to_buffer_id.clear()
        pool.buffer_id_to_uid = [EMPTY_SLOT] * pool.max_loras_per_batch

    # --- adapters

    def ready(self, adapter: common_pb2.Adapter) -> bool:
        """Whether `need` does not wait for files. If it would, a thread begins to read them."""
        key = adapter_key(adapter.name, adapter.generation)
        if key in self._kept:
            return True
        if key not in self._reads:
            manager = self._manager
            config = manager.base_hf_config
            layers, dtype, path = config.num_hidden_layers, manager.dtype, adapter.path
            self._reads[key] = _Read(lambda: adapter_files.read(path, dtype, layers, adapter_files.shapes(config)))
        return self._reads[key].ended

    def settle(self) -> None:
        """Forgets what was read for requests, of which none waits any more."""
        self._reads = {key: read for key, read in self._reads.items() if not read.ended}

    def need(self, adapter: common_pb2.Adapter, used: Container[str]) -> str:
        """SGLang's id of an adapter, which is read if it is not here; then others may have to leave host memory, but
        none of those in `used`. Raises HostFault if its files cannot be read, BrokenModel if they do not fit the model,
        NotNow if there is no room for its like."""
        key = adapter_key(adapter.name, adapter.generation)
        self._leaving.discard(key)
        if key not in self._kept:
            self._read(key, adapter)
        self._kept.pop(key, None)
        self._kept[key] = None  # behind all others
        idle = [each for each in self._kept if each != key and each not in used]
        for other in idle[: max(0, len(self._kept) - _KEPT * self._manager.max_loras_per_batch)]:
            self._unload(other)
        return key

    def _read(self, key: str, adapter: common_pb2.Adapter) -> None:
        manager, pool, began = self._manager, self._manager.memory_pool, time.monotonic()
        self.ready(adapter)
        try:
            files = self._reads.pop(key).files()
        except CommandError as error:
            raise type(error)(f"adapter {adapter.name}: {error}") from None
        if files.rank > pool.max_lora_rank or not get_normalized_target_modules(files.modules) <= pool.target_modules:
            raise NotNow(f"the model was loaded without room for adapter {adapter.name}")
        ref = LoRARef(lora_id=key, lora_name=key, lora_path=adapter.path, pinned=False)
        told = {
            "peft_type": "LORA",
            "r": files.rank,
            "lora_alpha": files.scaling * files.rank,
            "target_modules": list(files.modules),
        }
        result = manager.load_lora_adapter_from_tensors(ref, files.tensors, told)
        if not result.success:
            manager.configs.pop(key, None)
            raise BrokenModel(f"adapter {adapter.name}: {' '.join(result.error_message.split())}")
        seconds = round(time.monotonic() - began, 3)
        _log.info("adapter read", adapter=adapter.name, rank=files.rank, seconds=seconds)

    def forget(self, key: str, used: Container[str]) -> None:
        """Lets go of an adapter, at once or when no request of `used` has it any more."""
        self._leaving.add(key)
        self.tidy(used)

    def tidy(self, used: Container[str]) -> None:
        """Lets go of adapters that have left the catalogue, except for those in `used`."""
        for key in [key for key in self._leaving if key not in used]:
            self._leaving.discard(key)
            if key in self._kept:
                self._unload(key)

    def _unload(self, key: str) -> None:
        del self._kept[key]
        self._manager.unload_lora_adapter(self._manager.lora_refs[key])
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
