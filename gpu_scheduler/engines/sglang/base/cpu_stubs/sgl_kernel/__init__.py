"""Stand-in for sgl_kernel on machines without a GPU: importable, never callable.

With SGLANG_USE_CPU_ENGINE=1 SGLang imports names ending in `_cpu` when its modules load; they serve speculative
decoding and linear attention, which this engine does not run. As nothing gets registered under
torch.ops.sgl_kernel, SGLang finds no AMX kernels and every layer takes its plain torch path.
"""

from __future__ import annotations

from typing import Any, NoReturn


def __getattr__(name: str) -> Any:
    if not name.endswith("_cpu"):
        raise AttributeError(f"the stand-in for sgl_kernel has no {name}")

    def missing(*_args: object, **_kwargs: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} was called, but sgl_kernel is not installed on this machine")

    return missing
