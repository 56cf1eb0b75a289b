"""Memory of one kind of device, in two halves: one makes extents (balloond), the other maps them (engines and loader).

A backend is chosen by the device's name: "cpu:0" has the CPU's, "cuda:0" CUDA's.
"""

from __future__ import annotations

from typing import Protocol

PAGE_BYTES = {"cpu": 64 << 10, "cuda": 2 << 20}
"""Bytes of a page, the unit of accounting, by backend. It is small on the CPU, so that small models balloon too; on
CUDA it is the least that can be mapped."""


class ExtentMaker(Protocol):
    """The half that balloond has. The ledger has booked the bytes before `create` is called."""

    page_bytes: int

    def create(self, nbytes: int) -> int:
        """Makes a new extent of zeros and returns its descriptor. A process that holds the descriptor, or a mapping,
        holds the memory. Raises OSError."""
        ...


class Fence(Protocol):
    """A point in the device's work. What was released before it is no longer touched once it is done."""

    def done(self) -> bool: ...


class Mapper(Protocol):
    """The half of the processes that use the memory. Addresses and sizes are whole pages. Methods raise OSError."""

    page_bytes: int

    def reserve(self, span: int) -> int:
        """Reserves `span` bytes of addresses with nothing behind them: touching them is a fault. Returns the first."""
        ...

    def release(self, address: int, span: int) -> None:
        """Gives reserved addresses up, with whatever is mapped there."""
        ...

    def map(self, address: int, fd: int, nbytes: int) -> None:
        """Puts the whole extent of `fd` at `address`. The descriptor may be closed afterwards."""
        ...

    def unmap(self, address: int, nbytes: int) -> None:
        """Takes away the whole extents that are mapped there, back to back; the addresses stay reserved. It waits for
        no work of the device: none may touch them any more."""
        ...

    def poison(self, address: int, nbytes: int) -> None:
        """Fills mapped memory with a pattern that is not a number in any float type, and waits until it is there."""
        ...

    def fence(self) -> Fence:
        """A fence behind all work that the device has been given so far."""
        ...
