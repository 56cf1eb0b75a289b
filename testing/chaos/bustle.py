"""What goes on beside the streams of a long run: models come, change, move, leave and are asked for; clients err; keys
change; engines die. Each kind of event has its period; all of them may fall together."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from protos import common_pb2
from services.errors import PrismError
from services.runtime import tasks
from testing.chaos.load import body, prompt
from testing.chaos.world import SPARE, Chaos, KeyFile, busiest_engine
from testing.patience import PATIENCE_S
from testing.systems.local import FOLDER, MODELS, catalogue

_NEVER = "no-such-model"
_SPARES: tuple[dict[str, Any] | None, ...] = (
    {"path": MODELS[1]},
    {"path": MODELS[1], "ttft_ms": 5000},
    {"path": MODELS[1], "context_tokens": 256},
    {"path": MODELS[2]},
    None,
)
"""What the catalogue's file says of the spare model, in turn; None: nothing."""
_ANSWER_TOKENS = 60


class Bustle:
    """Counts what it did, and what of it was refused or failed."""

    def __init__(self, it: Chaos, keys: KeyFile, models: dict[str, dict[str, Any]], seed: int = 0) -> None:
        """`models`: the catalogue's entries of those under load."""
        self._it = it
        self._keys = keys
        self._models = models
        self._random = random.Random(seed)
        self._spares = 0
        self._guests = 0
        self._texts: dict[str, str] = {}
        """What each folder's model says to the guests' prompt."""
        self.done: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        """By event and reason: a change under way already, no room. Tried again with the event's next turn."""
        self.failed: list[str] = []

    def events(self) -> dict[str, tuple[float, Callable[[], Awaitable[None]]]]:
        """Period in seconds, and what happens then."""
        return {
            "a stream's place goes to another model": (6.0, self._wander),
            "a client goes away": (11.0, self._abort),
            "bad requests": (17.0, self._err),
            "a guest comes by a call, is asked, leaves": (37.0, self._guest),
            "the catalogue's file changes": (53.0, self._relist),
            "the file of keys changes": (61.0, self._rekey),
            "an operator evicts a model": (71.0, self._evict),
            "an operator moves a model": (97.0, self._move),
            "an engine is killed": (181.0, self._kill),
        }

    async def names(self, count: int) -> None:
        """So many guests, one right after the other: fills what keeps a bounded number of names."""
        for _ in range(count):
            await self._once("a guest before", self._guest)

    @contextlib.asynccontextmanager
    async def going_on(self) -> AsyncIterator[None]:
        running = [tasks.spawn(self._every(name, *event), name) for name, event in self.events().items()]
        try:
            yield
        finally:
            await tasks.cancel(*running)

    async def _every(self, name: str, period_s: float, happen: Callable[[], Awaitable[None]]) -> None:
        while True:
            await asyncio.sleep(period_s)
            await self._once(name, happen)

    async def _once(self, name: str, happen: Callable[[], Awaitable[None]]) -> None:
        try:
            async with asyncio.timeout(PATIENCE_S):
                await happen()
        except PrismError as error:
            self.refused[f"{name}: {type(error).__name__}"] += 1
        except Exception as error:
            self.failed.append(f"{name}: {type(error).__name__}: {error}")
        else:
            self.done[name] += 1

    async def _wander(self) -> None:
        self._random.choice(self._it.load.slots).model = self._random.choice(self._it.models)

    async def _abort(self) -> None:
        """A stream is read a little, then its connection closed; sometimes before it said anything."""
        model, base = self._random.choice(self._it.models), self._random.choice(list(self._it.bases.values()))
        asked = {**body(model, 0, 900), "n": self._random.choice((1, 3))}
        with contextlib.suppress(TimeoutError):
            async with (
                asyncio.timeout(self._random.choice((0.05, 3.0))),
                self._it.http.post(base + "/v1/completions", json=asked) as answer,
            ):
                async for _ in answer.content:
                    pass
                raise AssertionError(f"an answer that was to be cut short ended: {answer.status}")

    async def _err(self) -> None:
        base = self._random.choice(list(self._it.bases.values()))
        right = body(MODELS[0], 0)
        stranger = {"authorization": "Bearer sk-prism-nobody"}
        wrong: list[tuple[int, dict[str, Any]]] = [
            (400, {"data": b"{"}),
            (400, {"json": {**right, "max_tokens": -1}}),
            (400, {"json": {**right, "prompt": [1 << 40]}}),
            (404, {"json": {**right, "model": _NEVER}}),
            (401, {"json": right, "headers": stranger}),
        ]
        for status, keys in wrong:
            async with self._it.http.post(base + "/v1/completions", **keys) as answer:
                await answer.read()
                if answer.status != status:
                    self.failed.append(f"a bad request got {answer.status} instead of {status}: {keys}")

    async def _guest(self) -> None:
        """Under a name that nobody had before."""
        folder = MODELS[self._guests % len(MODELS)]
        name = f"guest-{self._guests}"
        self._guests += 1
        await self._it.placement.add_model(common_pb2.ModelListing(name=name, path=str(FOLDER / folder), engine="echo"))
        try:
            await self._it.until(lambda: self._listed(name), f"{name} is not listed")
            await self._ask(name, folder)
        finally:
            await self._it.placement.remove_model(name, force=True)

    async def _listed(self, name: str) -> bool:
        return (await self._it.get(f"/v1/models/{name}"))[0] == 200

    async def _ask(self, model: str, folder: str) -> None:
        text = (await self._it.stream(model, prompt(0), _ANSWER_TOKENS))[0]
        if text != self._texts.setdefault(folder, text):
            self.failed.append(f"{model} said {text!r}")

    async def _relist(self) -> None:
        """The file names the spare model otherwise, or not at all; if it does, it is asked."""
        self._spares += 1
        spare = _SPARES[self._spares % len(_SPARES)]
        entry = {} if spare is None else {SPARE: {**spare, "path": str(FOLDER / spare["path"])}}
        catalogue(self._it.local.state, "echo", {**self._models, **entry})
        os.kill(self._it.system.running["loader"].pid, signal.SIGHUP)

        async def taken() -> bool:
            specs = {route.model.name: route.model for route in (await self._it.placement.routes()).routes}
            if spare is None:
                return SPARE not in specs
            told = specs.get(SPARE)
            return told is not None and told.path == entry[SPARE]["path"]

        await self._it.until(taken, "the catalogue is not taken up")
        if spare is not None:
            await self._it.until(lambda: self._listed(SPARE), "the spare model is not listed")
            await self._ask(SPARE, spare["path"])

    async def _rekey(self) -> None:
        self._keys.write(self._it.local.state / "keys.toml", more=self._random.randrange(20))

    async def _evict(self) -> None:
        target = self._random.choice((common_pb2.COLD, common_pb2.HIBERNATING))
        await self._it.placement.evict(self._random.choice(self._it.models), target)

    async def _move(self) -> None:
        groups = list(self._it.local.group_names)
        model = self._random.choice(self._it.models)
        at = await self._it.resident(model)
        if at is not None:
            await self._it.placement.migrate(model, next(group for group in groups if group != at[0]))

    async def _kill(self) -> None:
        os.kill(await busiest_engine(self._it), signal.SIGKILL)
