"""Repeated looks at models that could not be served: a volume that was away, a copy that was under way, or files that
were mended are noticed without a call."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from math import inf

from loader.catalogue.models import CatalogueModel, NodeModels
from loader.policy.looks import LookSchedule
from services.errors import NotFound
from services.rpc.watch import Watched
from services.runtime import tasks


class Relisting:
    """Looks at the models of a catalogue. `now` is in seconds on any clock; `on_change` is called when models are
    looked at less often, or more."""

    def __init__(self, models: NodeModels, now: Callable[[], float], on_change: Callable[[], None]) -> None:
        self._models = models
        self._now = now
        self._on_change = on_change
        self._looks = LookSchedule()
        self._known: dict[str, CatalogueModel] = {}
        """Models with an error, or with files that an engine refused, as they were at the last look, by name."""
        self._under_way: set[str] = set()
        self._news: Watched[None] = Watched(None)

    def retry_s(self, model: CatalogueModel) -> float:
        """Seconds within which a model is looked at again; 0: it has no error, or one that does not pass with the files
        that it has. Files that have changed are noticed in any case."""
        return self._looks.pause_s(model.listed.name) if model.error and model.may_pass else 0.0

    def catalogue_changed(self) -> None:
        """Takes note that models were read, or have left."""
        broken = {model.listed.name: model for model in self._models.all() if self._is_looked_at(model)}
        for name in self._known.keys() - broken.keys():
            self._looks.forget(name)
        for name, model in broken.items():
            before = self._known.get(name)
            if before is not model and name not in self._under_way:
                self._failed(before, model)
        self._known = broken
        self._news.set(None)

    def _is_looked_at(self, model: CatalogueModel) -> bool:
        return bool(model.error) or self._models.is_refused(model.listed.name)

    def _failed(self, before: CatalogueModel | None, now: CatalogueModel) -> None:
        anew = before is None or before.seen != now.seen or before.reading != now.reading
        self._looks.failed(now.listed.name, self._now(), anew)

    async def run(self) -> None:
        """Looks at models as they become due, for ever."""
        while True:
            seen = self._news.revision
            self.begin_due()
            wait_s = self._looks.next_at() - self._now()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if wait_s == inf else max(0.0, wait_s)):
                    await self._news.changed(seen)

    def begin_due(self) -> list[asyncio.Task[None]]:
        """Begins a look at each model whose time has come. One that takes long, because its file system hangs, holds up
        no other."""
        due = self._looks.take_due(self._now())
        return [tasks.spawn(self._look(name), f"look at {name} again") for name in due]

    async def _look(self, name: str) -> None:
        before = self._known.get(name)
        self._under_way.add(name)
        try:
            found = (await self._models.look(name)).model
        except NotFound:
            return
        finally:
            self._under_way.discard(name)
        if self._is_looked_at(found):
            self._failed(before, found)
            self._known[name] = found
            if found.error and found.may_pass:
                self._on_change()
        self._news.set(None)
