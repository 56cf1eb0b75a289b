"""The interface of the echo engine's memory, and an implementation without any (for a group without a balloond)."""

from __future__ import annotations

from typing import Protocol

from kv_kinds import messages
from kv_kinds.layout import KvLayout
from protos import engine_pb2


class EchoMemory(Protocol):
    """The memory operations that the echo engine needs."""

    lease_id: str
    weights_bytes: int
    kv: KvLayout
    context_tokens: int

    @property
    def wake_fd(self) -> int | None: ...

    def map_weights(self, fill: bool) -> tuple[bytes, str]:
        """Maps the weights range, filled with the model's pattern or empty. Returns (manifest, checksum). Raises
        OutOfMemory."""

    def verify(self) -> None:
        """Checks the content of the weights range. Raises WrongPattern."""

    def start_kv(self) -> None: ...

    def fit(self, request_id: str, tokens: int) -> bool:
        """Makes the request hold KV for `tokens` tokens. False if that cannot be had now."""

    def free(self, request_id: str) -> None: ...

    def attend(self, idle: bool) -> None:
        """Carries out the driver's requests, between two steps."""

    def describe(self, stats: engine_pb2.EngineStats) -> None: ...

    def leave(self) -> None:
        """Gives back everything except the lease and the addresses."""

    def close(self) -> None: ...


def open_memory(load: engine_pb2.Load) -> EchoMemory:
    """Memory leased from balloond, or none at all for a group without a balloond."""
    if not load.balloond_socket:
        return UnaccountedMemory(load)
    from gpu_scheduler.engines.echo.leased import LeasedMemory

    return LeasedMemory(load)


class UnaccountedMemory:
    """Memory of a group without a balloond: holds nothing, and everything fits."""

    lease_id = ""
    weights_bytes = 0
    wake_fd = None

    def __init__(self, load: engine_pb2.Load) -> None:
        self.kv = messages.layout(load.model)
        self.context_tokens = load.model.context_tokens

    def map_weights(self, fill: bool) -> tuple[bytes, str]:
        return b"", ""

    def verify(self) -> None: ...

    def start_kv(self) -> None: ...

    def fit(self, request_id: str, tokens: int) -> bool:
        return True

    def free(self, request_id: str) -> None: ...

    def attend(self, idle: bool) -> None: ...

    def describe(self, stats: engine_pb2.EngineStats) -> None: ...

    def leave(self) -> None: ...

    def close(self) -> None: ...
