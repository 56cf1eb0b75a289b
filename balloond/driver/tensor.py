"""Torch tensors over addresses that may have no memory behind them, by DLPack from pure Python.

Nothing is read or written when a tensor is made, so a range may be mapped and unmapped under it at will; views and
CUDA graphs over it stay valid.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch.utils import dlpack

_KINDS = {"cpu": 1, "cuda": 2}
_UINT = 1


class _Device(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int32), ("index", ctypes.c_int32)]


class _Type(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _Type),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Managed(ctypes.Structure):
    pass


_Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(_Managed))
_Managed._fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _Deleter)]
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_alive: dict[int, tuple[object, ...]] = {}
"""Objects behind DLPack structures that torch still points to, by the address of the structure."""


@_Deleter  # type: ignore[untyped-decorator]
def _release(managed: Any) -> None:
    _alive.pop(ctypes.addressof(managed.contents), None)


def tensor_over(address: int, nbytes: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """A uint8 tensor of `nbytes` at `address`. The addresses must stay reserved as long as the tensor lives. To torch
    all devices "cpu:N" are one."""
    where = torch.device(device)
    shape = (ctypes.c_int64 * 1)(nbytes)
    managed = _Managed()
    managed.tensor.data = address
    managed.tensor.device = _Device(_KINDS[where.type], (where.index or 0) if where.type == "cuda" else 0)
    managed.tensor.ndim = 1
    managed.tensor.dtype = _Type(_UINT, 8, 1)
    managed.tensor.shape = shape
    managed.tensor.strides = None
    managed.tensor.byte_offset = 0
    managed.deleter = _release
    _alive[ctypes.addressof(managed)] = (managed, shape)
    return dlpack.from_dlpack(_new_capsule(ctypes.addressof(managed), b"dltensor", None))
