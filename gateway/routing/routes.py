"""The table of routes: which models there are and where requests for them may be sent.

Placement streams it; a request only looks here. While placement is away the last table is used.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass

from gateway.errors import ModelFaulty, UnknownModel
from protos import common_pb2, placement_pb2
from services.errors import Unavailable
from services.telemetry import log
from services.wording.paths import without_folders

_log = log.get(__name__)


@dataclass(frozen=True, slots=True)
class RoutePlace:
    """A group where requests for a model may be sent."""

    group: str
    address: str
    residency: common_pb2.Residency
    compiling: bool = False
    """Whether the model is coming up there and kernels are being compiled for it."""

    @property
    def active(self) -> bool:
        return self.residency == common_pb2.ACTIVE


@dataclass(frozen=True, slots=True)
class Route:
    """The route of one model, as placement last sent it."""

    model: common_pb2.ModelSpec
    residency: common_pb2.Residency
    places: tuple[RoutePlace, ...]
    error: str
    measured_weights_bytes: int
    measured_private_bytes: int
    image_pinned: bool = False
    """Whether its image gives way to no other's."""
    retry_s: float = 0.0
    """Seconds within which a model with a passing error is tried again."""

    @property
    def faulty(self) -> bool:
        """Whether the model is in state error and served nowhere."""
        return self.residency == common_pb2.ERROR and not self.places

    @property
    def fault(self) -> ModelFaulty:
        """The error for requests to a faulty model."""
        return ModelFaulty(f"model '{self.model.name}' is in state error: {self.error}", self.retry_s)


def decode_place(place: placement_pb2.Place) -> RoutePlace:
    return RoutePlace(place.group, place.address, place.residency, place.compiling)


def decode(route: placement_pb2.Route) -> Route:
    return Route(
        model=route.model,
        residency=route.residency,
        places=tuple(map(decode_place, route.places)),
        error=without_folders(route.error),
        measured_weights_bytes=route.measured_weights_bytes,
        measured_private_bytes=route.measured_private_bytes,
        image_pinned=route.image_pinned,
        retry_s=route.retry_s,
    )


class RouteTable:
    """All routes, by model."""

    def __init__(self) -> None:
        self._routes: dict[str, Route] = {}
        self._aliases: dict[str, str] = {}
        """Alias -> name of its model."""
        self._disputed: set[tuple[str, str, str]] = set()
        """(alias, model that has it, model that it leads to) where these are two."""
        self._listeners: list[Callable[[Mapping[str, Route]], None]] = []
        self._changed = asyncio.Event()
        """Set, and replaced, at each change."""
        self.known = False
        """Whether placement has ever sent the routes."""
        self.fresh = False
        """Whether placement is reachable, so that the table is what it says now."""

    def on_change(self, listener: Callable[[Mapping[str, Route]], None]) -> None:
        """`listener` is called with the new table after each change, in the loop."""
        self._listeners.append(listener)

    def set(self, routes: Iterable[Route]) -> None:
        self._routes = {route.model.name: route for route in routes}
        self._aliases = self._resolved()
        self.known = self.fresh = True
        for listener in self._listeners:
            listener(self._routes)
        self._changed.set()
        self._changed = asyncio.Event()

    async def until(self, ready: Callable[[], bool]) -> None:
        """Returns once `ready` does so with True, which is looked at after each change."""
        while not ready():
            await self._changed.wait()

    def _resolved(self) -> dict[str, str]:
        """Alias -> name of its model. A loader lets no alias be another's name, but two nodes' catalogues may: then
        names go first, and of several models the one that sorts first, so that all gateways do the same."""
        found: dict[str, str] = {}
        disputed = set()
        for name in sorted(name for name, route in self._routes.items() if route.model.aliases):
            for alias in self._routes[name].model.aliases:
                owner = alias if alias in self._routes else found.setdefault(alias, name)
                if owner != name:
                    disputed.add((alias, name, owner))
        for alias, name, owner in sorted(disputed - self._disputed):
            _log.warning("alias is another model's on another node", alias=alias, model=name, leads_to=owner)
        self._disputed = disputed
        return found

    def lost(self) -> None:
        """Notes that placement is away."""
        if self.fresh:
            _log.warning("placement is away: serving by the routes last known", models=len(self._routes))
        self.fresh = False

    def all(self) -> list[Route]:
        return sorted(self._routes.values(), key=lambda route: route.model.name)

    def aliases(self, model: str) -> list[str]:
        """Aliases that lead to the model."""
        route = self._routes.get(model)
        names = route.model.aliases if route is not None else ()
        return [alias for alias in names if self._aliases.get(alias) == model]

    def name(self, asked: str) -> str:
        """Name of the model that has this alias; else `asked` itself."""
        return self._aliases.get(asked, asked)

    def get(self, model: str) -> Route:
        """The route of the model of this name, no alias. Raises UnknownModel; Unavailable as long as no routes were
        received at all."""
        route = self._routes.get(model)
        if route is None:
            if not self.known:
                raise Unavailable("placement has not answered the gateway yet")
            raise UnknownModel(model)
        return route

    def has(self, model: str) -> bool:
        return model in self._routes

    def residency(self, model: str, address: str) -> common_pb2.Residency:
        """Residency of a model on the group at `address`; unspecified if the routes do not say."""
        route = self._routes.get(model)
        places = route.places if route is not None else ()
        return next((place.residency for place in places if place.address == address), common_pb2.RESIDENCY_UNSPECIFIED)

    def compiles(self, model: str) -> bool:
        """Whether the model is active nowhere, and is coming up on a group where kernels are being compiled for it."""
        route = self._routes.get(model)
        places = route.places if route is not None else ()
        return any(place.compiling for place in places) and not any(place.active for place in places)

    async def follow(self, messages: AsyncIterator[placement_pb2.Routes | None]) -> None:
        """Keeps the table up to date; `messages` yields None when the stream was lost."""
        async for message in messages:
            if message is None:
                self.lost()
            else:
                self.set(map(decode, message.routes))
