"""Backends by device name. Imported lazily: a backend's libraries are needed only where its devices are."""

from __future__ import annotations

from balloond.backends.base import ExtentMaker, Mapper
from services.errors import Invalid


def _kind(device: str) -> str:
    kind, _, number = device.partition(":")
    if kind != "cpu" or not number.isdecimal():
        raise Invalid(f'device {device!r}: there is a backend for "cpu:N" only')
    return kind


def maker(device: str) -> ExtentMaker:
    """Raises Invalid for a device without a backend."""
    _kind(device)
    from balloond.backends.cpu import CpuMaker

    return CpuMaker()


def mapper(device: str) -> Mapper:
    """Raises Invalid for a device without a backend."""
    _kind(device)
    from balloond.backends.cpu import CpuMapper

    return CpuMapper()
