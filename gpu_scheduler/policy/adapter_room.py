"""Adapters (LoRA) of a group's models: their names in engines, and which of them an engine has room for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class PoolShape:
    """Room for adapters that an engine was, or would be, loaded with (`protos/common.proto`, AdapterPool)."""

    slots: int = 0
    rank: int = 0
    modules: frozenset[str] = frozenset()

    @classmethod
    def of(cls, slots: int, rank: int, modules: Iterable[str]) -> PoolShape:
        return cls(slots, rank, frozenset(modules))

    def covers(self, other: PoolShape) -> bool:
        """Whether an engine with this room can serve what would be loaded with `other`, no slower."""
        return other.slots <= self.slots and other.rank <= self.rank and other.modules <= self.modules


def adapter_key(name: str, generation: int) -> str:
    """The name of one generation of an adapter in an engine, and what separates its prefixes in the cache from those of
    others: no model's name has a space. Empty without a name: no adapter."""
    return f"{name} {generation}" if name else ""
