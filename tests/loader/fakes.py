"""Stand-ins around the copies: a keeper that remembers, extents of no balloond, a transfer that waits for the test."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncIterator, Iterable, Sequence

from loader.transfers.base import Borrowed
from loader.transfers.cpu import CpuTransfer
from protos import engine_pb2, keeper_pb2
from services.errors import NotFound
from testing.patience import PATIENCE_S


def manifest(total_bytes: int, name: str = "weights") -> bytes:
    tensor = engine_pb2.Manifest.Tensor(name=name, shape=[total_bytes], stride=[1], dtype="uint8")
    return engine_pb2.Manifest(tensors=[tensor], total_bytes=total_bytes).SerializeToString()


class FakeKeeper:
    """The owner's end of a keeper, with nothing behind it. While `away` it does not answer."""

    def __init__(self) -> None:
        self.records: dict[str, keeper_pb2.Record] = {}
        self.there = asyncio.Event()
        self.there.set()

    async def keep(self, kept: Sequence[tuple[keeper_pb2.Record, int | None]]) -> None:
        await self.there.wait()
        self.keep_soon(kept)

    def keep_soon(self, kept: Iterable[tuple[keeper_pb2.Record, int | None]]) -> None:
        for record, fd in kept:
            if fd is not None:
                os.fstat(fd)
            self.records[record.id] = record

    def forget_soon(self, ids: Sequence[str]) -> None:
        for id in ids:
            self.records.pop(id, None)


class FakeHandoff:
    """Leases with extents, and how many times each is borrowed now."""

    def __init__(self) -> None:
        self.leases: dict[str, list[Borrowed]] = {}
        self.lent: dict[str, int] = {}

    def lease(self, lease_id: str, content: bytes, extent_bytes: int = 65536) -> None:
        extents = []
        for start in range(0, len(content), extent_bytes):
            fd = os.memfd_create("extent")
            os.ftruncate(fd, extent_bytes)
            os.pwrite(fd, content[start : start + extent_bytes], 0)
            extents.append(Borrowed(start, extent_bytes, fd, "cpu:0"))
        self.leases[lease_id] = extents

    def content(self, lease_id: str) -> bytes:
        return b"".join(os.pread(extent.fd, extent.nbytes, 0) for extent in self.leases[lease_id])

    @contextlib.asynccontextmanager
    async def borrowed(self, lease_id: str) -> AsyncIterator[Sequence[Borrowed]]:
        if lease_id not in self.leases:
            raise NotFound(f"no lease {lease_id}")
        self.lent[lease_id] = self.lent.get(lease_id, 0) + 1
        try:
            yield self.leases[lease_id]
        finally:
            self.lent[lease_id] -= 1

    def close(self) -> None:
        for extents in self.leases.values():
            for extent in extents:
                os.close(extent.fd)


class GatedTransfer(CpuTransfer):
    """Stops before its second chunk until the test opens the gate, and in tidying up while the test keeps it from that;
    counts how many copies have come that far."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.arrived = threading.Semaphore(0)
        self.may_tidy = threading.Event()
        self.may_tidy.set()
        self.tidying = threading.Semaphore(0)
        self.tidied = 0
        self.tidy_error: OSError | None = None

    def out_of(self, extents, image, plan, done):  # type: ignore[no-untyped-def]
        return self._tidy(super().out_of(extents, image, plan, self._gated(done)))

    def into(self, extents, image, plan, done):  # type: ignore[no-untyped-def]
        return self._tidy(super().into(extents, image, plan, self._gated(done)))

    def between(self, sources, targets, plan, done):  # type: ignore[no-untyped-def]
        return self._tidy(super().between(sources, targets, plan, self._gated(done)))

    def _tidy(self, tidy):  # type: ignore[no-untyped-def]
        def gated() -> None:
            self.tidying.release()
            assert self.may_tidy.wait(PATIENCE_S), "the test never let it tidy up"
            tidy()
            self.tidied += 1
            if self.tidy_error is not None:
                raise self.tidy_error

        return gated

    def _gated(self, done):  # type: ignore[no-untyped-def]
        first = True

        def step(chunk) -> None:  # type: ignore[no-untyped-def]
            nonlocal first
            done(chunk)
            if first:
                first = False
                self.arrived.release()
                assert self.gate.wait(PATIENCE_S), "the test never opened the gate"

        return step

    async def reached(self, copies: int = 1) -> None:
        """Returns when so many more copies have done their first chunk."""
        for _ in range(copies):
            assert await asyncio.to_thread(self.arrived.acquire, timeout=PATIENCE_S)

    async def begun_to_tidy(self) -> None:
        """Returns when one more copy has."""
        assert await asyncio.to_thread(self.tidying.acquire, timeout=PATIENCE_S)
