"""Models woken, put to sleep, moved, pinned, added and removed over HTTP.

Placement does all of it, as for prismctl. What takes long goes on if the client leaves or has waited long enough: then
the answer is 202, and `Location` says where the model's state can be seen.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any, TypeVar
from urllib.parse import quote

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.access.access import Caller
from gateway.admin.bodies import (
    LONGEST_WAIT_S,
    ModelEntry,
    MoveParameters,
    RemovalParameters,
    ReplicaParameters,
    SleepParameters,
    WaitParameters,
    query,
)
from gateway.errors import BadField, Denied, NotPossible, UnknownModel
from gateway.http import messages
from gateway.openai import bodies
from gateway.routing.routes import Route as ModelRoute
from gateway.serving import Serving
from placement.client import PlacementClient
from protos import common_pb2
from services.errors import Conflict, Unmet
from services.runtime import tasks
from services.telemetry import log

_log = log.get(__name__)
_HEARD_S = 2.0
"""Seconds that an answer waits for this gateway's routes to have what placement has done."""
_AGAIN_S = 0.1
T = TypeVar("T")
Card = Callable[[ModelRoute, str, Caller], dict[str, Any]]
"""Makes the card of a model under a name, as `GET /v1/models/NAME` has it."""


class AdminEndpoints:
    """The endpoints for admins."""

    def __init__(self, serving: Serving, placement: PlacementClient, bodies: messages.Bodies, card: Card) -> None:
        self._serving = serving
        self._placement = placement
        self._bodies = bodies
        self._card = card

    def routes(self) -> list[Route]:
        one = "/v1/models/{model:path}"
        return [
            Route("/v1/models", self.add, methods=["POST"]),
            Route(f"{one}/wake", self.wake, methods=["POST"]),
            Route(f"{one}/sleep", self.sleep, methods=["POST"]),
            Route(f"{one}/move", self.move, methods=["POST"]),
            Route(f"{one}/replicate", self.replicate, methods=["POST"]),
            Route(f"{one}/pin", self.pin, methods=["POST"]),
            Route(f"{one}/unpin", self.unpin, methods=["POST"]),
            Route(one, self.remove, methods=["DELETE"]),
        ]

    async def wake(self, request: Request) -> Response:
        """Brings a model up; nothing is done if it is up."""
        caller, route = self._model(request)
        wait = query(WaitParameters, request.query_params)
        name = route.model.name
        if route.faulty:
            raise route.fault

        async def wake() -> None:
            await self._placement.activate(name)
            await self._placement.until_active(name)
            await self._heard(lambda: self._is(name, common_pb2.ACTIVE))

        if self._is(name, common_pb2.ACTIVE):
            return self._state(name, caller)
        return await self._answer(request, caller, "wake", name, wake(), wait.wait_s)

    async def sleep(self, request: Request) -> Response:
        """Brings a model down; nothing is done if it is down as far as that."""
        caller, route = self._model(request)
        asked = query(SleepParameters, request.query_params)
        name = route.model.name

        async def sleep() -> str:
            try:
                evict = partial(self._placement.eviction, name, asked.target, asked.group)
                reached = await _in_turn(evict)
            except Unmet:
                if self._is(name, *asked.below) or (asked.group and asked.group not in self._groups(name)):
                    return ""
                raise
            if asked.group:
                await self._heard(lambda: asked.group not in self._groups(name))
            else:
                await self._heard(lambda: self._is(name, reached.residency))
            return reached.reason

        return await self._answer(request, caller, "sleep", name, sleep(), asked.wait_s)

    async def move(self, request: Request) -> Response:
        """Moves a model that is up to another group, and it serves all the while; nothing is done if it is there. Of a
        model that several groups serve, the one with the fewest of its requests is left."""
        caller, route = self._model(request)
        asked = query(MoveParameters, request.query_params)
        name, before = route.model.name, len(route.places)

        def there() -> bool:
            """While it moves, the group that it leaves is one more."""
            groups = self._groups(name)
            return asked.to in groups and len(groups) <= before and self._is(name, common_pb2.ACTIVE)

        if there():
            return self._state(name, caller)

        async def move() -> None:
            await self._placement.migrate(name, asked.to)
            await self._heard(there)

        return await self._answer(request, caller, "move", name, move(), asked.wait_s)

    async def replicate(self, request: Request) -> Response:
        """Brings an active model up on one group more, and it stays on all of them; a model that is on the named group
        already is not brought up."""
        caller, route = self._model(request)
        asked = query(ReplicaParameters, request.query_params)
        name = route.model.name

        async def replicate() -> None:
            try:
                group, _ = await _in_turn(partial(self._placement.replicate, name, asked.to))
            except Unmet:
                if asked.to and asked.to in self._groups(name):
                    return
                raise
            await self._heard(lambda: group in self._groups(name))

        return await self._answer(request, caller, "replicate", name, replicate(), asked.wait_s)

    async def pin(self, request: Request) -> Response:
        """Keeps a model's image in host memory, whatever others need."""
        return await self._pin(request, True)

    async def unpin(self, request: Request) -> Response:
        """Lets a model's image give way to others' again."""
        return await self._pin(request, False)

    async def _pin(self, request: Request, pinned: bool) -> Response:
        caller, route = self._model(request)
        wait = query(WaitParameters, request.query_params)
        name = route.model.name

        async def pin() -> None:
            await self._placement.pin(name, pinned)
            await self._heard(lambda: self._serving.routes.get(name).image_pinned == pinned)

        return await self._answer(request, caller, "pin" if pinned else "unpin", name, pin(), wait.wait_s)

    async def add(self, request: Request) -> Response:
        """Adds a model to the catalogue, or reads its files afresh."""
        caller = self._admin(request)
        entry = bodies.parse(ModelEntry, await self._bodies.read(request.receive))
        # Also aliases: keys that list one are answered by the model that has it. An adapter answers much as its base.
        for name in filter(None, (entry.name, *entry.aliases, entry.base)):
            if not caller.may_use(name, name):
                raise Denied(f"The key '{caller.name}' is not for models of the name '{name}'.")

        async def add() -> None:
            spec, routes = await self._placement.add_model(entry.listing()), self._serving.routes
            await self._heard(lambda: routes.has(spec.name) and routes.get(spec.name).model == spec)

        return await self._answer(request, caller, "add", entry.name, add(), LONGEST_WAIT_S)

    async def remove(self, request: Request) -> Response:
        """Takes a model, with its aliases, out of the system."""
        caller, route = self._model(request)
        name = route.model.name
        if name != request.path_params["model"]:
            raise BadField(f"'{request.path_params['model']}' is an alias: remove '{name}' by its name.", "model")
        asked = query(RemovalParameters, request.query_params)

        async def remove() -> None:
            await _in_turn(partial(self._placement.remove_model, name, asked.force))
            await self._heard(lambda: not self._serving.routes.has(name))

        return await self._answer(request, caller, "remove", name, remove(), asked.wait_s)

    # --- the parts that they have in common

    def _admin(self, request: Request) -> Caller:
        """The caller. Raises Denied unless it has an admin's key."""
        caller = request.scope[messages.CALLER]
        assert isinstance(caller, Caller)
        caller.check_steers()
        return caller

    def _model(self, request: Request) -> tuple[Caller, ModelRoute]:
        """The caller, and the route of the model that the path names. Raises Denied, UnknownModel."""
        caller = self._admin(request)
        route = self._serving.route(request.path_params["model"], caller)
        messages.count_of(request.scope).model = route.model.name
        return caller, route

    def _groups(self, name: str) -> list[str]:
        """Groups where requests for the model may be sent."""
        return [place.group for place in self._serving.routes.get(name).places]

    def _is(self, name: str, *residencies: common_pb2.Residency) -> bool:
        return self._serving.routes.has(name) and self._serving.routes.get(name).residency in residencies

    async def _heard(self, told: Callable[[], bool]) -> None:
        """Waits until this gateway's routes have what was done: what its client asks next would be told otherwise."""
        with contextlib.suppress(TimeoutError, UnknownModel):
            async with asyncio.timeout(_HEARD_S):
                await self._serving.routes.until(told)

    async def _answer(
        self,
        request: Request,
        caller: Caller,
        action: str,
        name: str,
        work: Coroutine[Any, Any, str | None],
        wait_s: float,
    ) -> Response:
        """The answer once `work` is done, or that it is under way. `work` may return why it did not come as far as was
        asked. Raises what it raises, NotPossible for Unmet, and ClientGone."""
        _log.info("model steered", action=action, model=name, **caller.log_fields)
        working = tasks.spawn(work, f"{action} {name}")
        async with messages.WhileConnected(request.receive):
            done, _ = await asyncio.wait({working}, timeout=wait_s)
            if not done:
                return self._state(name, caller, 202)
            try:
                reason = working.result()
            except Unmet as error:
                raise NotPossible(str(error)) from None
            if action == "remove":
                return _json({"id": name, "object": "model", "deleted": True})
            return self._state(name, caller, reason=reason)
        raise messages.ClientGone

    def _state(self, name: str, caller: Caller, status: int = 200, reason: str | None = None) -> Response:
        """The model as it is now; only its name where this gateway's routes do not have it."""
        routes = self._serving.routes
        card = self._card(routes.get(name), name, caller) if routes.has(name) else {"id": name, "object": "model"}
        where = {"location": f"/v1/models/{quote(name)}"} if status == 202 else None
        return _json({**card, "reason": reason or None}, status, where)


async def _in_turn(call: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """What the call returns, which is made again for LONGEST_WAIT_S while another change of the model is under way: one
    that has come up takes requests before its group has ended that change. Raises Conflict, and what the call
    raises."""
    until = time.monotonic() + LONGEST_WAIT_S
    while True:
        try:
            return await call()
        except Conflict:
            if time.monotonic() >= until:
                raise
        await asyncio.sleep(_AGAIN_S)


def _json(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(orjson.dumps(value), status, headers, media_type="application/json")
