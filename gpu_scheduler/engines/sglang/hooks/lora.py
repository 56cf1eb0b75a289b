"""Hooks on SGLang's LoRA: its buffers lie in memory that leaves with the model, and it runs without a GPU.

Imports SGLang: only the engine process may import this.

Target in SGLang                      Why                                        Without it
------------------------------------  -----------------------------------------  ---------------------------------------
LoRAMemoryPool.init_buffers           Buffers of adapters lie in a range of the  a sleeping model keeps them on the
                                      lease                                      device
LoRAManager.init_state,               Without a GPU no host memory is pinned     torch raises an error
TorchNativeLoRABackend
.prepare_lora_batch (both on a CPU)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpu_scheduler.engines.sglang.base.environment import has_gpu
from gpu_scheduler.engines.sglang.hooks.hook import Hook
from gpu_scheduler.engines.sglang.model.adapters import Unpinned
from gpu_scheduler.engines.sglang.step import current


def buffers(original: Callable[..., None], pool: Any, base_model: Any) -> None:
    """Makes the buffers in the range of the model."""
    adapters = current.model().adapters
    assert adapters is not None, "SGLang has LoRA without adapters"
    adapters.build_pool(lambda: original(pool, base_model))


def unpinned(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls SGLang's function with ordinary memory where it wants pinned one."""
    with Unpinned():
        return original(*args, **kwargs)


_LORA = "sglang.srt.lora"
HOOKS = [Hook(f"{_LORA}.mem_pool.LoRAMemoryPool.init_buffers", buffers, "AROUND")]
if not has_gpu():
    HOOKS += [
        Hook(f"{_LORA}.lora_manager.LoRAManager.init_state", unpinned, "AROUND"),
        Hook(f"{_LORA}.backend.torch_backend.TorchNativeLoRABackend.prepare_lora_batch", unpinned, "AROUND"),
    ]
