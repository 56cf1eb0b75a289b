"""Kinds of KV in messages of the services: those of a ModelSpec, of an engine's Measured and of a Resident.

Processes of versions before 1.4 know `kv_bytes_per_token` alone. Until they are gone, senders write that number beside
the kinds, and `layout` reads it where a message has no kinds.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

from kv_kinds.layout import KvKind, KvLayout, of_tokens
from protos import common_pb2


class HasKv(Protocol):
    """A message that has the kinds of a model, as ModelSpec, Measured and Resident do."""

    @property
    def kv_bytes_per_token(self) -> int: ...
    @property
    def kv_kinds(self) -> Sequence[common_pb2.KvKind]: ...


def layout(message: HasKv) -> KvLayout:
    """The layout that a message describes; it has no kinds if the message says nothing of KV. Raises ValueError for
    values that no kind has."""
    if not message.kv_kinds:
        return of_tokens(message.kv_bytes_per_token)
    return _layout(tuple(map(_numbers, message.kv_kinds)))


def kinds(layout: KvLayout) -> list[common_pb2.KvKind]:
    """The messages of a layout's kinds."""
    return [
        common_pb2.KvKind(
            name=kind.name,
            bytes_per_token=kind.bytes_per_token,
            window_tokens=kind.window_tokens,
            beyond_window_tokens=kind.beyond_window_tokens,
            bytes_per_state=kind.bytes_per_state,
            states=kind.states,
            undivided=not kind.divided,
        )
        for kind in layout.kinds
    ]


_Numbers = tuple[str, int, int, int, int, int, bool]


def _numbers(message: common_pb2.KvKind) -> _Numbers:
    return (
        message.name,
        message.bytes_per_token,
        message.window_tokens,
        message.beyond_window_tokens,
        message.bytes_per_state,
        message.states,
        not message.undivided,
    )


@lru_cache(maxsize=1 << 12)
def _layout(kinds: tuple[_Numbers, ...]) -> KvLayout:
    """The layout of these kinds. Layouts are cached, because placement counts the demand of every model again and
    again."""
    return KvLayout(tuple(KvKind(*numbers) for numbers in kinds))
