"""A process that holds memory, for tests: reads commands from its standard input, answers each with one line."""

import ctypes
import select
import sys
import threading
import time

from balloond.backends.cpu import CpuMapper
from balloond.driver.lease import KV, GrowRefused, Lease, LeaseRefused
from balloond.driver.range import ElasticRange
from balloond.driver.weights import WeightsRange
from services import log

EXTENT = 256 << 10


class Child:
    def __init__(self, socket: str, device: str, model: str, low: int = 0, high: int = 0) -> None:
        self.lease = Lease.attach(socket, device, model, timeout_s=10)
        self.mapper = CpuMapper()
        self.marks = {"low": int(low), "high": int(high)}
        self.range = self.new_range()
        self.weights = WeightsRange(self.lease, self.mapper, span_bytes=16 << 20, extent_bytes=1 << 20)
        self.held: list[int] = []

    def new_range(self) -> ElasticRange:
        return ElasticRange(
            self.lease, self.mapper, span_bytes=64 << 20, extent_bytes=EXTENT, poison=True, **self.marks
        )

    def reopen(self) -> str:
        self.range.close()
        self.held.clear()
        # What comes between two ranges is the lease's own to answer.
        self.lease.loop.call(lambda: self.lease.on_limit())
        self.range = self.new_range()
        return "ok"

    def at(self, index: int) -> int:
        return self.range.address + index * EXTENT

    def lease_id(self) -> str:
        return self.lease.lease_id

    def acquire(self, count: str, timeout_s: str = "10") -> int:
        got = self.range.acquire(int(count), timeout_s=float(timeout_s))
        self.held += got
        return len(got)

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
            ctypes.memmove(self.at(index), f"{text}{index}".encode(), len(f"{text}{index}"))
        return "ok"

    def read(self, text: str) -> str:
        wrong = [i for i in self.held if ctypes.string_at(self.at(i), len(f"{text}{i}")) != f"{text}{i}".encode()]
        return "same" if not wrong else f"other at {wrong}"

    def touch(self, index: str) -> int:
        return ctypes.string_at(self.at(int(index)), 1)[0]

    def free_index(self) -> int:
        return next(i for i in range(self.range.n_extents) if i not in self.range._ids)

    def grow_weights(self, nbytes: str) -> int:
        self.weights.grow(int(nbytes), timeout_s=10)
        return self.weights.mapped_bytes

    def fill_weights(self, byte: str) -> str:
        ctypes.memset(self.weights.address, int(byte), self.weights.mapped_bytes)
        return "ok"

    def weights_byte(self) -> int:
        return ctypes.string_at(self.weights.address, 1)[0]

    def leave_weights(self) -> str:
        self.weights.leave()
        return "ok"

    def raw_grow(self, count: str) -> str:
        """Extents that nobody maps."""
        return " ".join(str(e.id) for e in self.lease.grow(KV, EXTENT, int(count), timeout_s=10))

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


def main() -> None:
    log.configure("child")
    try:
        child = Child(*sys.argv[1:])
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
