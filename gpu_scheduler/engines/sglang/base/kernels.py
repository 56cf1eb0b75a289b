"""Kernels that are compiled at run time, and reports of each compilation to the gpu_scheduler.

Triton compiles a kernel at its first launch, which takes half a second in the middle of a step. It compiles each anew
for every kind of whole number among its arguments (one, a multiple of 16, any other) and for every value of a constant
argument; the request that causes the first compilation on a host waits for it. So SGLang's kernels whose arguments
change from step to step are made to treat all numbers alike.

SGLang has other kernels compiled by nvcc (its JIT modules), which takes 7 to 25 s each, one after another. Every
compilation by either compiler, which happens where no cache on the disk has the kernel, is reported to the
gpu_scheduler: requests wait longer meanwhile.

Imports Triton and SGLang: only the engine process may import this.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Any

from protos import engine_pb2
from services.telemetry import log

_log = log.get(__name__)
NVCC, TRITON = "nvcc", "triton"
NUMBERS = {
    ("sglang.kernels.ops.attention.metadata", "_fused_decode_metadata_kernel"): ("B", "max_seq_pages"),
    ("sglang.kernels.ops.memory.common", "get_last_loc_kernel"): ("num_tokens",),
    ("sglang.kernels.ops.mamba.causal_conv1d_triton", "_causal_conv1d_fwd_kernel"): ("seqlen", "num_cache_lines"),
    ("sglang.kernels.ops.mamba.causal_conv1d_triton", "_causal_conv1d_update_kernel"): ("batch",),
    ("sglang.kernels.ops.mamba.mamba_state_indices_triton", "_fused_replay_state_indices_kernel"): (
        "valid_bs",
        "total_bs",
    ),
}
"""Names of the parameters that change from step to step, by (module, kernel). Parameters that SGLang declares constant
become plain arguments: prompts of linear attention are convolved over copies of their states, whose number would be a
constant (`num_cache_lines`), and compiling takes seconds."""
BATCHES = 256
"""Least value of the constant for kernels that take the next power of two of a batch as a constant argument, so that
nearly all batches share one compilation. These kernels look at so many numbers at once."""


def batch_constant(batch: int) -> int:
    """The constant that such a kernel gets for `batch` requests: a power of two, at least `batch` and `BATCHES`."""
    return max(BATCHES, 1 << max(0, batch - 1).bit_length())


def take_all_numbers() -> None:
    """Stops Triton from specialising the kernels in `NUMBERS` on the values of those parameters. Call it before any
    kernel is launched."""
    import triton

    for (path, name), numbers in NUMBERS.items():
        module = import_module(path)
        function = getattr(module, name).fn
        for number in numbers:
            if function.__annotations__.get(number) is triton.language.constexpr:
                del function.__annotations__[number]
        setattr(module, name, triton.jit(function, do_not_specialize=numbers))


def called(module: str) -> str:
    """Readable name of a JIT module of SGLang's: without the prefix that all share."""
    return module.removeprefix("sgl_kernel_jit_")


class Compilations:
    """Reports every kernel that this process has to compile. `send` is called only in the thread that made this object;
    a compilation in another thread is reported together with the next one in that thread."""

    def __init__(self, send: Callable[[engine_pb2.Compiling], None]) -> None:
        self._send = send
        self._thread = threading.get_ident()
        self._untold: deque[engine_pb2.Compiling] = deque()

    def watch(self) -> None:
        """Starts reporting. A kernel that a cache on the disk has calls neither compiler and is not reported."""
        from triton import knobs

        knobs.compilation.listener = self._heard_triton
        from sglang.kernels.jit.utils.compile import ninja

        # SGLang looks `build` up in the module at each use.
        ninja.build = self._watched(ninja.build)

    def _watched(self, build: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(build)
        def watched(*, spec: Any, **more: Any) -> Any:
            kernel, began = called(spec.module_name), time.monotonic()
            self._tell(engine_pb2.Compiling(kernel=kernel, compiler=NVCC))
            try:
                return build(spec=spec, **more)
            finally:
                self._tell_done(kernel, NVCC, time.monotonic() - began)

        return watched

    def _heard_triton(self, *, src: Any, times: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            self._tell_done(str(getattr(src, "name", "?")), TRITON, times.total / 1e6)

    def _tell_done(self, kernel: str, compiler: str, seconds: float) -> None:
        self._tell(engine_pb2.Compiling(kernel=kernel, compiler=compiler, done=True, seconds=seconds))

    def _tell(self, message: engine_pb2.Compiling) -> None:
        if threading.get_ident() != self._thread:
            if message.done:
                self._untold.append(message)
            return
        while self._untold:
            self._send(self._untold.popleft())
        self._send(message)
