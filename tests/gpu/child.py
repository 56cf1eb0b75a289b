"""`tests.balloond.child` on a GPU: extents as large as there, memory of the device, a stream that tests can hold up."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from balloond.backends import mapper
from balloond.backends.base import Mapper
from tests.balloond.child import Child, main
from tests.gpu.device import Gate, Gpu

MIB = 1 << 20


class GpuChild(Child):
    extent = 8 * MIB
    span = 4096 * MIB
    weights_extent = 64 * MIB
    weights_span = 1024 * MIB
    poison = False

    def new_mapper(self, device: str) -> Mapper:
        index = int(device.partition(":")[2])
        self.gpu = Gpu(index)
        self.gate = Gate(self.gpu)
        return mapper(device, lambda: [self.gate.stream])

    def put(self, address: int, content: bytes) -> None:
        self.gpu.put(address, content)

    def get(self, address: int, nbytes: int) -> bytes:
        return self.gpu.get(address, nbytes)

    def fill(self, address: int, byte: int, nbytes: int) -> None:
        self.gpu.fill(address, byte, nbytes)

    def poisoned(self) -> str:
        """From now on what comes or is released is filled with NaN."""
        self.range.close()
        self.held.clear()
        self.poison = True
        self.range = self.new_range()
        return "ok"

    def fill_held(self, byte: str) -> str:
        for index in self.held:
            self.fill(self.at(index), int(byte), self.extent)
        return "ok"

    def bytes_held(self) -> str:
        """Which bytes occur in the extents held."""
        return self.occurring((self.at(index), self.extent) for index in self.held)

    def bytes_of_weights(self) -> str:
        return self.occurring([(self.weights.address, self.weights.mapped_bytes)])

    def occurring(self, parts: Iterable[tuple[int, int]]) -> str:
        counts = sum(np.bincount(np.frombuffer(self.get(*part), np.uint8), minlength=256) for part in parts)
        return " ".join(map(str, np.flatnonzero(counts)))

    def hold_up(self) -> str:
        """The stream's work ends when `go_on` is asked for."""
        self.gate.close()
        return "ok"

    def go_on(self) -> str:
        self.gate.open()
        return "ok"


if __name__ == "__main__":
    main(GpuChild)
