"""Backends by device name, "cpu:N" or "cuda:N". They are imported lazily: a backend's libraries are needed only where
its devices are."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from balloond.backends import base
from balloond.backends.base import ExtentMaker, Mapper
from balloond.policy.capacity import DeviceHardware
from services.errors import Invalid


def parse(device: str) -> tuple[str, int]:
    """("cuda", 1) for "cuda:1". Raises Invalid for a device without a backend."""
    kind, _, number = device.partition(":")
    if kind not in base.PAGE_BYTES or not number.isdecimal():
        raise Invalid(f'device {device!r}: there is a backend for "cpu:N" and "cuda:N" only')
    return kind, int(number)


def page_bytes(device: str) -> int:
    """Bytes of a page of the device. Raises Invalid for a device without a backend."""
    return base.PAGE_BYTES[parse(device)[0]]


def look(device: str) -> DeviceHardware:
    """Hardware of a device by its name, "cuda:N". Raises Invalid for a device without a backend, OSError without its
    driver."""
    from balloond.backends import cuda_hardware

    return cuda_hardware.look(parse(device)[1])


def maker(device: str) -> ExtentMaker:
    """A maker of the device's extents. Raises Invalid for a device without a backend, OSError without its driver."""
    kind, index = parse(device)
    if kind == "cuda":
        from balloond.backends.cuda import CudaMaker

        return CudaMaker(index)
    from balloond.backends.cpu import CpuMaker

    return CpuMaker()


def mapper(device: str, streams: Callable[[], Sequence[int]] = lambda: (0,)) -> Mapper:
    """A mapper of the device's extents. `streams`: raw handles of the streams whose work may touch the memory, for
    fences; only devices with queues use it. Raises Invalid for a device without a backend."""
    kind, index = parse(device)
    if kind == "cuda":
        from balloond.backends.cuda import CudaMapper

        return CudaMapper(index, streams)
    from balloond.backends.cpu import CpuMapper

    return CpuMapper()
