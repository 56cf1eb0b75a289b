"""The echo engine's memory under a balloond: a lease, weights and KV held through the driver like a real engine's,
without tensors.

KV is held in whole extents, and no two requests share one. Nothing is cached: a finished request's extents go back to
the reserve.
"""

from __future__ import annotations

import ctypes
import zlib

from balloond.backends.cpu import CpuMapper
from balloond.driver.connection.lease import GrowRefused, Lease, LeaseRefused
from balloond.driver.kv.range import ElasticRange
from balloond.driver.weights import WeightsRange
from gpu_scheduler.engines.echo.errors import OutOfMemory, WrongPattern
from kv_kinds import messages
from kv_kinds.layout import of_tokens
from protos import engine_pb2
from services.runtime.checksum import checksum

_ATTACH_S = 10.0
_GROW_S = 10.0
_PATTERN = 1 << 16


class LeasedMemory:
    """Weights and KV in extents of balloond."""

    def __init__(self, load: engine_pb2.Load) -> None:
        model = load.model
        self._name = model.name
        self.weights_bytes = model.weights_bytes
        self.kv = messages.layout(model) or of_tokens(1)
        self.context_tokens = model.context_tokens
        self._extent_bytes = load.kv_extent_bytes
        self._weights_extent_bytes = load.weights_extent_bytes
        self._poison = load.poison_fresh_pages
        self._mapper = CpuMapper()
        self._held: dict[str, list[int]] = {}
        self._tokens: dict[str, int] = {}
        self._kv: ElasticRange | None = None
        try:
            self._lease = Lease.attach(load.balloond_socket, load.device, model.name, timeout_s=_ATTACH_S)
        except LeaseRefused as error:
            raise OutOfMemory(str(error)) from None
        self.lease_id = self._lease.lease_id
        self._weights = WeightsRange(
            self._lease,
            self._mapper,
            span_bytes=-(-self.weights_bytes // self._weights_extent_bytes) * self._weights_extent_bytes,
            extent_bytes=self._weights_extent_bytes,
        )

    @property
    def wake_fd(self) -> int | None:
        return self._kv.wake_fd if self._kv is not None else None

    def _pattern(self) -> bytes:
        """The model's "weights", which depend on its name and size alone."""
        seed = zlib.crc32(self._name.encode()) or 1
        block = bytearray(_PATTERN)
        for i in range(0, _PATTERN, 4):
            seed = (seed * 1664525 + 1013904223) & 0xFFFFFFFF
            block[i : i + 4] = seed.to_bytes(4, "little")
        times = -(-self.weights_bytes // _PATTERN)
        return bytes(block * times)[: self.weights_bytes]

    def map_weights(self, fill: bool) -> tuple[bytes, str]:
        try:
            self._weights.grow(self.weights_bytes, timeout_s=_GROW_S)
        except GrowRefused as error:
            raise OutOfMemory(str(error)) from None
        manifest = engine_pb2.Manifest(total_bytes=self.weights_bytes)
        manifest.tensors.add(name=self._name, shape=[self.weights_bytes], stride=[1], dtype="uint8")
        content = self._pattern()
        if fill:
            ctypes.memmove(self._weights.address, content, len(content))
        return manifest.SerializeToString(deterministic=True), checksum(content)

    def verify(self) -> None:
        held = ctypes.string_at(self._weights.address, self.weights_bytes)
        if held != self._pattern():
            self.leave()
            raise WrongPattern(f"weights of {self._name} are {checksum(held)}, not {checksum(self._pattern())}")

    def start_kv(self) -> None:
        if self._kv is None:
            span = max(1, 64 * self._extents_of(self.context_tokens))
            self._kv = ElasticRange(
                self._lease,
                self._mapper,
                span_bytes=span * self._extent_bytes,
                extent_bytes=self._extent_bytes,
                low=1,
                high=4,
                poison=self._poison,
            )

    def fit(self, request_id: str, tokens: int) -> bool:
        assert self._kv is not None
        held = self._held.setdefault(request_id, [])
        need = self._extents_of(tokens) - len(held)
        if need > 0:
            got = self._kv.acquire(need, timeout_s=0.2)
            if len(got) < need:
                self._kv.release(got)
                return False
            held += got
            self._tell()
        return True

    def _extents_of(self, tokens: int) -> int:
        """Extents of a request of so many tokens; each kind of KV has its own."""
        return sum(-(-kind.bytes_of(tokens) // self._extent_bytes) for kind in self.kv.kinds)

    def free(self, request_id: str) -> None:
        held = self._held.pop(request_id, [])
        if held and self._kv is not None:
            self._kv.release(held)
            self._tell()

    def _tell(self) -> None:
        assert self._kv is not None
        self._kv.usage(sum(map(len, self._held.values())) * self._extent_bytes, [])

    def attend(self, idle: bool) -> None:
        if self._kv is not None and self._kv.take_reclaims():
            self._kv.reclaimed()

    def describe(self, stats: engine_pb2.EngineStats) -> None:
        if self._kv is None:
            return
        used = sum(map(len, self._held.values())) * self._extent_bytes
        stats.kv_used_bytes = used
        stats.kv_held_bytes = self._kv.mapped_bytes
        stats.kv_reserve_bytes = max(0, self._kv.mapped_bytes - used)
        stats.kv_limit_bytes = self._lease.limit.bytes

    def leave(self) -> None:
        for request_id in list(self._held):
            self.free(request_id)
        if self._kv is not None:
            self._kv.empty()
        self._weights.leave()

    def close(self) -> None:
        if self._kv is not None:
            for request_id in list(self._held):
                self.free(request_id)
            self._kv.close()
        self._weights.close()
        self._lease.detach()
