"""A process that holds memory, for tests: reads commands from its standard input, answers each with one line."""

import ctypes
import select
import sys
import threading
import time

from balloond.backends.base import Mapper
from balloond.backends.cpu import CpuMapper
from balloond.driver.connection.lease import KV, GrowRefused, Lease, LeaseRefused
from balloond.driver.kv.range import ElasticRange
from balloond.driver.weights import WeightsRange
from services.telemetry import log
from testing.patience import PATIENCE_S

EXTENT = 256 << 10


class Child:
    extent = EXTENT
    span = 64 << 20
    weights_extent = 1 << 20
    weights_span = 16 << 20
    poison = True

    def __init__(self, socket: str, device: str, model: str, low: int = 0, high: int = 0, large: int = 1) -> None:
        self.lease = Lease.attach(socket, device, model, timeout_s=PATIENCE_S)
        self.mapper = self.new_mapper(device)
        self.marks = {"low": int(low), "high": int(high), "large": int(large)}
        self.range = self.new_range()
        self.weights = WeightsRange(
            self.lease, self.mapper, span_bytes=self.weights_span, extent_bytes=self.weights_extent
        )
        self.held: list[int] = []

    def new_mapper(self, device: str) -> Mapper:
        return CpuMapper()

    def put(self, address: int, content: bytes) -> None:
        ctypes.memmove(address, content, len(content))

    def get(self, address: int, nbytes: int) -> bytes:
        return ctypes.string_at(address, nbytes)

    def fill(self, address: int, byte: int, nbytes: int) -> None:
        ctypes.memset(address, byte, nbytes)

    def new_range(self) -> ElasticRange:
        return ElasticRange(
            self.lease,
            self.mapper,
            span_bytes=self.span,
            extent_bytes=self.extent,
            poison=self.poison,
            **self.marks,
        )

    def reopen(self) -> str:
        self.range.close()
        self.held.clear()
        # What comes between two ranges is the lease's own to answer.
        self.lease.loop.call(lambda: self.lease.on_limit())
        self.range = self.new_range()
        return "ok"

    def at(self, index: int) -> int:
        return self.range.address + index * self.extent

    def lease_id(self) -> str:
        return self.lease.lease_id

    def acquire(self, count: str, timeout_s: str = "60") -> int:
        got = self.range.acquire(int(count), timeout_s=float(timeout_s))
        self.held += got
        return len(got)

    def kv_ids(self) -> str:
        return " ".join(str(id) for id, _ in self.range.located(self.held))

    def release(self, count: str) -> str:
        self.range.release([self.held.pop() for _ in range(int(count))])
        return "ok"

    def usage(self, used: str, *cached: str) -> str:
        """cached: age:bytes ..."""
        pairs = [tuple(map(float, word.split(":"))) for word in cached]
        self.range.usage(int(used), [(age, int(nbytes)) for age, nbytes in pairs])
        return "ok"

    def write(self, text: str) -> str:
        for index in self.held:
            self.put(self.at(index), f"{text}{index}".encode())
        return "ok"

    def read(self, text: str) -> str:
        wrong = [i for i in self.held if self.get(self.at(i), len(f"{text}{i}")) != f"{text}{i}".encode()]
        return "same" if not wrong else f"other at {wrong}"

    def touch(self, index: str) -> int:
        return self.get(self.at(int(index)), 1)[0]

    def free_index(self) -> int:
        return self.range._stretches[0].addresses.free(1)[0]

    def grow_weights(self, nbytes: str) -> int:
        self.weights.grow(int(nbytes), timeout_s=PATIENCE_S)
        return self.weights.mapped_bytes

    def fill_weights(self, byte: str) -> str:
        self.fill(self.weights.address, int(byte), self.weights.mapped_bytes)
        return "ok"

    def weights_byte(self) -> int:
        return self.get(self.weights.address, 1)[0]

    def weights_are(self, byte: str) -> bool:
        mapped = self.weights.mapped_bytes
        return self.get(self.weights.address, mapped) == bytes([int(byte)]) * mapped

    def leave_weights(self) -> str:
        self.weights.leave()
        return "ok"

    def raw_grow(self, count: str) -> str:
        """Extents that nobody maps."""
        return " ".join(str(e.id) for e in self.lease.grow(KV, self.extent, int(count), timeout_s=PATIENCE_S))

    def wait_wake(self) -> str:
        select.select([self.range.wake_fd], [], [], 20)
        return f"reclaim {self.range.take_reclaims()} overage {self.range.overage_bytes()}"

    def reclaimed(self) -> str:
        self.range.reclaimed()
        return "ok"

    def limit(self) -> int:
        return self.lease.limit.bytes

    def mapped(self) -> int:
        self.range.check()
        return self.range.mapped_bytes

    def block(self) -> str:
        """Stays in C, without the interpreter's lock, until a line comes; the lease's thread runs on."""
        print("blocked", flush=True)
        fd = sys.stdin.fileno()
        ctypes.CDLL(None).poll((ctypes.c_ushort * 4)(fd, 0, select.POLLIN, 0), 1, -1)
        return "unblocked " + sys.stdin.readline().strip()

    def empty(self) -> str:
        self.range.empty()
        return "ok"

    def threads(self) -> int:
        return threading.active_count()

    def settle(self) -> str:
        """Waits until nothing is due on the lease's thread any more."""
        loop, settled = self.lease.loop, threading.Event()

        def look() -> None:
            last = max((at for at, *_ in loop._timers), default=None)
            if last is None:
                settled.set()
            else:
                loop.later(last - time.monotonic(), look)

        loop.call(look)
        settled.wait()
        return "ok"

    def detach(self) -> str:
        self.range.close()
        self.weights.close()
        self.lease.detach()
        return "ok"


def main(kind: type[Child] = Child) -> None:
    log.configure("child")
    try:
        child = kind(*sys.argv[1:])
    except LeaseRefused as error:
        print(f"refused {error}", flush=True)
        return
    print("ready", flush=True)
    while line := sys.stdin.readline():
        command, *arguments = line.split()
        try:
            answer = getattr(child, command)(*arguments)
        except GrowRefused as error:
            answer = f"refused {error}"
        except ValueError as error:
            answer = f"wrong {error}"
        print(answer, flush=True)


if __name__ == "__main__":
    main()
