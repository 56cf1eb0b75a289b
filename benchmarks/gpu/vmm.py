"""The few CUDA driver calls that the GPU benchmarks need, checked, and a torch tensor over any device address.

Stands alone on purpose: these programs measure what a backend may rely on, so they must not depend on one.
Sizes are bytes. A failed call raises `DriverError` with the call's result.
"""

from __future__ import annotations

import ctypes
from typing import Any

from cuda.bindings import driver as cu

MIB = 1 << 20
FD_HANDLE = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


class DriverError(RuntimeError):
    """A driver call returned something other than success."""


def check(result: tuple[Any, ...]) -> Any:
    """Return what the call produced, or raise."""
    error, *values = result
    if error != cu.CUresult.CUDA_SUCCESS:
        raise DriverError(str(error))
    return values[0] if len(values) == 1 else values


def make_current(device: int) -> None:
    """Give the calling thread the device's primary context."""
    check(cu.cuInit(0))
    check(cu.cuCtxSetCurrent(check(cu.cuDevicePrimaryCtxRetain(check(cu.cuDeviceGet(device))))))


class Extents:
    """Creates, exports, imports, maps extents of one device. Creating and exporting need `cuInit`, no context."""

    def __init__(self, device: int = 0) -> None:
        check(cu.cuInit(0))
        self._properties = cu.CUmemAllocationProp()
        self._properties.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._properties.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._properties.location.id = device
        self._properties.requestedHandleTypes = FD_HANDLE
        access = cu.CUmemAccessDesc()
        access.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = device
        access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._access = [access]

    def create(self, nbytes: int) -> Any:
        return check(cu.cuMemCreate(nbytes, self._properties, 0))

    def export(self, handle: Any) -> int:
        return int(check(cu.cuMemExportToShareableHandle(handle, FD_HANDLE, 0)))

    def import_descriptor(self, descriptor: int) -> Any:
        return check(cu.cuMemImportFromShareableHandle(descriptor, FD_HANDLE))

    def release(self, handle: Any) -> None:
        check(cu.cuMemRelease(handle))

    def map(self, address: int, nbytes: int, handle: Any) -> None:
        check(cu.cuMemMap(address, nbytes, 0, handle, 0))

    def allow(self, address: int, nbytes: int) -> None:
        """Make `nbytes` of mapped extents readable and writable: the call that costs the most, per extent."""
        check(cu.cuMemSetAccess(address, nbytes, self._access, 1))

    def unmap(self, address: int, nbytes: int) -> None:
        check(cu.cuMemUnmap(address, nbytes))


def reserve(nbytes: int) -> int:
    """Reserve addresses; nothing is mapped there."""
    return int(check(cu.cuMemAddressReserve(nbytes, 0, 0, 0)))


def free_bytes() -> int:
    """Free memory of the current context's device."""
    return int(check(cu.cuMemGetInfo())[0])


class _DLDevice(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int32), ("index", ctypes.c_int32)]


class _DLType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _DLDevice),
        ("ndim", ctypes.c_int32),
        ("dtype", _DLType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _DLManaged(ctypes.Structure):
    pass


_DELETER = ctypes.CFUNCTYPE(None, ctypes.POINTER(_DLManaged))
_DLManaged._fields_ = [("tensor", _DLTensor), ("context", ctypes.c_void_p), ("deleter", _DELETER)]
_alive: list[tuple[Any, ...]] = []  # DLPack's structures must outlive the tensors; a benchmark makes a handful


def bytes_at(address: int, nbytes: int, device: int = 0) -> Any:
    """A flat uint8 torch tensor over device addresses, whether or not anything is mapped there."""
    import torch

    shape = (ctypes.c_int64 * 1)(nbytes)
    managed = _DLManaged()
    managed.tensor.data = address
    managed.tensor.device = _DLDevice(2, device)
    managed.tensor.ndim = 1
    managed.tensor.dtype = _DLType(1, 8, 1)
    managed.tensor.shape = shape
    managed.deleter = _DELETER(lambda _: None)
    _alive.append((managed, shape))
    new_capsule = ctypes.pythonapi.PyCapsule_New
    new_capsule.restype = ctypes.py_object
    new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return torch.utils.dlpack.from_dlpack(new_capsule(ctypes.addressof(managed), b"dltensor", None))
