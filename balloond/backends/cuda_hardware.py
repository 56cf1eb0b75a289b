"""Hardware of this machine's GPUs: sizes, drivers, MIG, processes. Reading it takes no memory of a GPU: CUDA is called
without a context, the rest is NVML's."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pynvml
from cuda.bindings import driver as cu

from balloond.backends.cuda import allocation, call
from balloond.policy.capacity import DeviceHardware

_PCI_ID_BYTES = 32
_CAN_MAP = cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
_CAN_EXPORT = cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED


def count() -> int:
    """Number of devices that CUDA shows this process. Raises OSError without a driver."""
    call(cu.cuInit, 0)
    return int(call(cu.cuDeviceGetCount))


def look(index: int) -> DeviceHardware:
    """Hardware of the GPU with this index. Raises OSError without a driver or without such a GPU."""
    call(cu.cuInit, 0)
    device = call(cu.cuDeviceGet, index)
    can_map, can_export = (bool(call(cu.cuDeviceGetAttribute, what, device)) for what in (_CAN_MAP, _CAN_EXPORT))
    with _nvml(device) as handle:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        return DeviceHardware(
            model=pynvml.nvmlDeviceGetName(handle),
            driver=pynvml.nvmlSystemGetDriverVersion(),
            total_bytes=memory.total,
            free_bytes=memory.free,
            page_bytes=_page_bytes(index) if can_map else 0,
            shares_memory=can_map and can_export,
            partitioned=_partitioned(handle),
            processes=tuple(_processes(handle)),
        )


def architecture() -> tuple[int, int]:
    """Compute capability of the first GPU that NVML shows, (9, 0) for instance; CUDA is not started. Raises OSError
    without a driver or a GPU."""
    try:
        pynvml.nvmlInit()
        try:
            major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(pynvml.nvmlDeviceGetHandleByIndex(0))
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        raise OSError(errno.ENODEV, f"NVML: {error}") from None
    return int(major), int(minor)


def busy(index: int) -> float:
    """Fraction of time, 0 to 1, that the device has worked for any process lately (over a fraction of a second). Raises
    OSError without a driver or such a device."""
    call(cu.cuInit, 0)
    with _nvml(call(cu.cuDeviceGet, index)) as handle:
        _keep_nvml()
        return float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu) / 100


@cache
def _keep_nvml() -> None:
    """Keeps NVML open for as long as this process lives: each of many calls would wait 10 ms and more for it to
    begin."""
    pynvml.nvmlInit()


@contextmanager
def _nvml(device: Any) -> Iterator[Any]:
    """NVML's handle of the device with the same PCI address: NVML numbers devices in an order of its own."""
    address = call(cu.cuDeviceGetPCIBusId, _PCI_ID_BYTES, device).rstrip(b"\0")
    try:
        pynvml.nvmlInit()
        try:
            yield pynvml.nvmlDeviceGetHandleByPciBusId(address)
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        raise OSError(errno.ENODEV, f"NVML: {error}") from None


def _page_bytes(index: int) -> int:
    smallest = cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    return int(call(cu.cuMemGetAllocationGranularity, allocation(index), smallest))


def _partitioned(handle: Any) -> bool:
    try:
        now, _ = pynvml.nvmlDeviceGetMigMode(handle)
    except pynvml.NVMLError_NotSupported:
        return False
    return bool(now == pynvml.NVML_DEVICE_MIG_ENABLE)


def _processes(handle: Any) -> Iterator[tuple[int, int]]:
    """(pid, bytes) of processes that hold memory of the device. A container may see none of them, or not what they
    hold; some drivers report none."""
    try:
        running = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except pynvml.NVMLError:
        return
    for process in running:
        yield process.pid, process.usedGpuMemory or 0
