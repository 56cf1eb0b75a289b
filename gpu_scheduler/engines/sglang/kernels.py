"""Kernels that Triton compiles when they are first launched, which takes half a second in the middle of a step.

It compiles each anew for every kind of whole number that it is given (one, a multiple of 16, any other), and for every
value of what it takes for a constant; the first of its kind on a host whoever serves waits for. So those of SGLang's
that are given numbers which change from step to step are made to take all of them alike. What is compiled all the same
is in the log.

Imports Triton and SGLang: only the engine process may import this.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from services import log

_log = log.get(__name__)
NUMBERS = {
    ("sglang.kernels.ops.attention.metadata", "_fused_metadata_kernel_general"): ("B", "max_seq_pages"),
    ("sglang.kernels.ops.memory.common", "get_last_loc_kernel"): ("num_tokens",),
}
"""Of (module, kernel), the parameters that change."""
BATCHES = 256
"""For kernels that take the next power of two of a batch for a constant: shorter ones are filled up to this. So many
numbers they look at all at once."""


def batch_constant(batch: int) -> int:
    """A power of two, not less than `batch`, and one for nearly all."""
    return max(BATCHES, 1 << max(0, batch - 1).bit_length())


def take_all_numbers() -> None:
    """To be called before any kernel is launched."""
    import triton

    for (path, name), numbers in NUMBERS.items():
        module = import_module(path)
        setattr(module, name, triton.jit(getattr(module, name).fn, do_not_specialize=numbers))


def say_compiled() -> None:
    """From now on every kernel that is compiled, because the disk has none like it, is in the log (info)."""
    from triton import knobs

    knobs.compilation.listener = _compiled


def _compiled(*, src: Any, times: Any, cache_hit: bool, **_: Any) -> None:
    if not cache_hit:
        _log.info("kernel compiled", kernel=getattr(src, "name", "?"), ms=round(times.total / 1e3, 1))
