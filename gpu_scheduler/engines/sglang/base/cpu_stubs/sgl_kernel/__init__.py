"""Stand-in for sgl_kernel on machines without a GPU. Only the operators of linear attention (`linear_attention.py`) and
of state-space layers (`state_space.py`) do anything; all others are importable, and never callable.

With SGLANG_USE_CPU_ENGINE=1 SGLang imports names ending in `_cpu` when its modules load, and looks for some in
torch.ops.sgl_kernel. Only the names that `OPERATORS` lists are there, so SGLang finds no AMX kernels, and every layer
that has a plain torch path takes it.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from sgl_kernel import linear_attention, state_space

for _operator in (*linear_attention.OPERATORS, *state_space.OPERATORS):
    setattr(torch.ops.sgl_kernel, _operator.__name__, _operator)


def __getattr__(name: str) -> Any:
    if not name.endswith("_cpu"):
        raise AttributeError(f"the stand-in for sgl_kernel has no {name}")

    def missing(*_args: object, **_kwargs: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} was called, but sgl_kernel is not installed on this machine")

    return missing
