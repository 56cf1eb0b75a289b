"""A process that takes extents of KV through the driver alone, without a model, and says when it had them.

It is a process of its own so that its mapping does not hold up whoever measures others meanwhile. Times are of
`time.monotonic`, which all processes of a machine share.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Taken:
    """One request for memory. Seconds."""

    asked_s: float
    mapped_s: float
    extents: int
    attempts: int
    """How often the driver was asked: more than once where it was refused in between."""

    @property
    def seconds(self) -> float:
        return self.mapped_s - self.asked_s


class Taker:
    """The parent's side."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def take(self, extents: int) -> Taken:
        """Raises RuntimeError if they do not come in time."""
        taken = Taken(**await self._ask("take", extents))
        if taken.extents < extents:
            raise RuntimeError(f"{taken.extents} of {extents} extents came within {TIMEOUT_S} s")
        return taken

    async def may_hold(self, nbytes: int) -> None:
        """Returns when the driver has heard that its limit is at least `nbytes`."""
        await self._ask("may_hold", nbytes)

    async def give_back(self) -> float:
        """Everything; seconds until all is unmapped."""
        return float((await self._ask("give_back", 0))["seconds"])

    async def _ask(self, command: str, number: int) -> dict[str, float]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{command} {number}\n".encode())
        async with asyncio.timeout(2 * TIMEOUT_S):
            line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError("the taker died")
        return dict(json.loads(line))


@contextlib.asynccontextmanager
async def taker(handoff: str, device: str, model: str, extent_bytes: int, span_bytes: int) -> AsyncIterator[Taker]:
    """`model` must be booked."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "benchmarks.gpu.taker", handoff, device, model, str(extent_bytes), str(span_bytes)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    it = Taker(process)
    try:
        await it._ask("give_back", 0)  # it is there
        yield it
    finally:
        process.kill()
        await process.wait()


def main() -> None:
    from balloond import backends
    from balloond.driver.connection.lease import Lease
    from balloond.driver.kv.range import ElasticRange

    handoff, device, model, extent_bytes, span_bytes = sys.argv[1:]
    lease = Lease.attach(handoff, device, model, timeout_s=TIMEOUT_S)
    sizes = {"span_bytes": int(span_bytes), "extent_bytes": int(extent_bytes)}
    kv = ElasticRange(lease, backends.mapper(device), **sizes, low=0, high=0)
    mine: list[int] = []

    def take(extents: int) -> dict[str, float]:
        asked = time.monotonic()
        came: list[int] = []
        attempts = 0
        while len(came) < extents and time.monotonic() < asked + TIMEOUT_S:
            attempts += 1
            came += kv.acquire(extents - len(came), timeout_s=TIMEOUT_S)
        mapped = time.monotonic()
        mine.extend(came)
        return {"asked_s": asked, "mapped_s": mapped, "extents": len(came), "attempts": attempts}

    def may_hold(nbytes: int) -> dict[str, float]:
        begun = time.monotonic()
        while lease.limit.bytes < nbytes and time.monotonic() < begun + TIMEOUT_S:
            time.sleep(0.0002)
        return {"seconds": time.monotonic() - begun}

    def give_back(_: int) -> dict[str, float]:
        begun = time.monotonic()
        kv.release(mine)
        mine.clear()
        kv.empty()
        return {"seconds": time.monotonic() - begun}

    commands = {"take": take, "may_hold": may_hold, "give_back": give_back}
    for line in sys.stdin:
        name, number = line.split()
        print(json.dumps(commands[name](int(number))), flush=True)


if __name__ == "__main__":
    main()
