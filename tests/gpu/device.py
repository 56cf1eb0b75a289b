"""What tests do with device memory themselves: reading, writing, and work that does not end before they say so."""

from __future__ import annotations

import ctypes

from cuda.bindings import driver as cu

from balloond.backends.cuda import Context, call


class Gpu:
    """One device."""

    def __init__(self, index: int = 0) -> None:
        self.context = Context(index)
        self.context.enter()

    def put(self, address: int, content: bytes) -> None:
        self.context.enter()
        source = ctypes.create_string_buffer(content, len(content))
        call(cu.cuMemcpyHtoD, address, ctypes.addressof(source), len(content))

    def get(self, address: int, nbytes: int) -> bytes:
        self.context.enter()
        target = ctypes.create_string_buffer(nbytes)
        call(cu.cuMemcpyDtoH, ctypes.addressof(target), address, nbytes)
        return target.raw

    def fill(self, address: int, byte: int, nbytes: int) -> None:
        self.context.enter()
        call(cu.cuMemsetD8, address, byte, nbytes)
        call(cu.cuCtxSynchronize)

    def free_bytes(self) -> int:
        """As the driver says."""
        self.context.enter()
        return int(call(cu.cuMemGetInfo))


class Gate:
    """A stream whose work waits until it is opened."""

    def __init__(self, gpu: Gpu) -> None:
        gpu.context.enter()
        self.stream = int(call(cu.cuStreamCreate, cu.CUstream_flags.CU_STREAM_NON_BLOCKING))
        self._word = int(call(cu.cuMemHostAlloc, 4, cu.CU_MEMHOSTALLOC_DEVICEMAP))
        self._gpu = gpu
        ctypes.c_uint32.from_address(self._word).value = 1

    def close(self) -> None:
        self._gpu.context.enter()
        ctypes.c_uint32.from_address(self._word).value = 0
        equal = cu.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ
        call(cu.cuStreamWaitValue32, self.stream, self._word, 1, equal)

    def open(self) -> None:
        ctypes.c_uint32.from_address(self._word).value = 1
