"""The models whose images a call has pinned; the keeper has them, for the successors of this process."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from balloond.keeper.client import KeeperClient, Kept
from loader.keeping import OWNER
from protos import keeper_pb2

KIND = "pin"


class Pins:
    """Pinned models by name. The listing's own `pinned` is not looked at here. `on_change` is called after each
    change."""

    def __init__(self, keeper: KeeperClient, on_change: Callable[[], None]) -> None:
        self._keeper = keeper
        self._on_change = on_change
        self._models: set[str] = set()

    def __contains__(self, model: str) -> bool:
        return model in self._models

    async def add(self, model: str) -> None:
        """Pins a model; returns once the keeper knows."""
        self._models.add(model)
        self._on_change()
        await self._keeper.keep([_kept(model)])

    def remove(self, model: str) -> None:
        """Takes a model's pin back, if it has one."""
        if model in self._models:
            self._models.remove(model)
            self._keeper.forget_soon([_record_id(model)])
            self._on_change()

    def keep_only(self, models: Iterable[str]) -> None:
        """Takes back the pins of models that left the catalogue."""
        for model in self._models.difference(models):
            self.remove(model)

    def restore(self, records: Iterable[keeper_pb2.Record]) -> None:
        """Takes over the pins that a predecessor kept."""
        self._models |= {record.id.removeprefix(_record_id("")) for record in records}
        self._on_change()

    def everything(self) -> Iterable[Kept]:
        """All records of pins, for a keeper that came back empty."""
        return [_kept(model) for model in self._models]


def _record_id(model: str) -> str:
    return f"{KIND}/{model}"


def _kept(model: str) -> Kept:
    return keeper_pb2.Record(id=_record_id(model), owner=OWNER, kind=KIND), None
