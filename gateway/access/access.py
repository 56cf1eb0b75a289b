"""Who may use what. Every HTTP request and gRPC call is checked here, before any other code looks at it.

Without a file of keys any client may do everything, except see what `gateway/ui/access.py` keeps back. With a file only
health answers without a key. A request that runs when its key is taken away runs to its end.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable

from starlette.datastructures import Headers

from gateway import errors
from gateway.access.keys import Key, Keys
from gateway.access.quota_storage import QuotaStorage
from gateway.access.quotas import Charge, Quotas
from gateway.errors import Denied, NoKey, UnknownModel
from services.runtime.watched_files import Followed

_OPEN_PATH = "/health"
_OPEN_SERVICE = "/grpc.health.v1.Health/"
_PAGE = "/ui"
_MODELS = "/v1/"
_ANTHROPIC = "/v1/messages"
"""Beginning of the paths to which clients send their key as Anthropic's do, in `x-api-key`."""
_ABOUT_MODELS = ("/tokenize", "/detokenize", "/openapi.json")
"""Paths that any key may use, beside all below `_MODELS`. Every other path is for admins, also one that the router
would take for one of these although it is written differently, as "/metrics" with a newline behind it."""


class Caller:
    """The sender of a request, and what its key allows."""

    def __init__(self, key: Key | None, quotas: Quotas) -> None:
        """`key` None: everything is allowed."""
        self._key = key
        self._quota = None if key is None else quotas.of(key)

    @property
    def name(self) -> str:
        """Name of the key; empty: there are no keys."""
        return "" if self._key is None else self._key.name

    @property
    def log_fields(self) -> dict[str, str]:
        """Fields that the log lines of the request get."""
        return {} if self._key is None else {"key": self._key.name}

    def may_use(self, model: str, alias: str = "") -> bool:
        """Whether the caller may ask for a model: by its name, or by `alias`."""
        return self._key is None or self._key.may_use(model, alias)

    def check_model(self, model: str, alias: str = "") -> None:
        """Raises UnknownModel if the key may not use the model: such a client does not learn that the model exists."""
        if not self.may_use(model, alias):
            raise UnknownModel(alias or model)

    def check_admin(self) -> None:
        """Raises Denied if the key is not an admin's."""
        if self._key is not None and not self._key.admin:
            raise Denied(f"The key '{self._key.name}' is not an admin's.")

    def check_steers(self) -> None:
        """Raises Denied unless the caller has an admin's key. Without keys nobody has one: of a request that any page
        in a browser can send, nobody knows that an operator wanted it."""
        if self._key is None:
            raise Denied("Models are steered with an admin's key, and this gateway has no keys_file.")
        self.check_admin()

    def take_in_flight(self, count: int) -> None:
        """Counts `count` answers as being made. Raises TooMany."""
        if self._key is not None and self._quota is not None:
            self._quota.take_in_flight(self._key, count)

    def leave_in_flight(self, count: int) -> None:
        if self._quota is not None:
            self._quota.in_flight -= count

    async def take_request(self) -> None:
        """Counts a request. Raises OverLimit."""
        if self._key is not None and self._quota is not None:
            await self._quota.take_request(self._key)

    async def hold(self, prompt: int, answers: int, answers_said: bool) -> Charge:
        """Holds the tokens of a prompt, and the most that its answers may have if the client set that (`answers_said`).
        Raises OverLimit."""
        if self._key is None or self._quota is None:
            return Charge()
        return await self._quota.hold(self._key, prompt, answers, answers_said)

    async def headers(self) -> errors.Headers:
        """Rate-limit headers: what the key may still use."""
        return [] if self._key is None or self._quota is None else await self._quota.headers(self._key)


ANYBODY = Caller(None, Quotas())
"""The caller of a request when there are no keys."""


class Access:
    """The access rules of the keys that the file has now."""

    def __init__(self, keys: Followed[Keys] | None, storage: QuotaStorage | None = None) -> None:
        """`storage`: where what keys use is counted; left out: at this gateway."""
        self._keys = keys
        self._quotas = Quotas(storage)

    def of_http(self, path: str, headers: Headers) -> Caller:
        """The caller of an HTTP request. Raises NoKey, Denied."""
        if self._keys is None or path == _OPEN_PATH:
            return ANYBODY
        page = path.startswith(_PAGE)
        given = headers.get("authorization", "")
        if not given and path.startswith(_ANTHROPIC) and (key := headers.get("x-api-key")):
            given = f"Bearer {key}"
        caller = self._caller(given, basic=page)
        if not path.startswith(_MODELS) and path not in _ABOUT_MODELS:
            caller.check_admin()
        return caller

    def of_call(self, method: str, metadata: Iterable[tuple[str, str | bytes]]) -> Caller:
        """The caller of a gRPC call. Raises NoKey."""
        if self._keys is None or method.startswith(_OPEN_SERVICE):
            return ANYBODY
        given = next((value for name, value in metadata if name == "authorization"), "")
        return self._caller(given if isinstance(given, str) else given.decode(errors="replace"))

    def _caller(self, authorization: str, basic: bool = False) -> Caller:
        """The caller with the key in an Authorization header. A browser, which can send no bearer token, may send a key
        as the password of any user (`basic`), but only for the page: browsers send passwords along of their own accord,
        also with requests that another site's page makes. Raises NoKey."""
        assert self._keys is not None
        scheme = "Basic" if basic else "Bearer"
        kind, _, given = authorization.partition(" ")
        secret = given.strip() if kind.lower() == "bearer" else ""
        if basic and kind.lower() == "basic":
            secret = _password(given)
        if not secret:
            raise NoKey("You did not provide an API key: send it as 'Authorization: Bearer KEY'.", scheme)
        key = self._keys.value.find(secret)
        if key is None:
            raise NoKey("Incorrect API key provided.", scheme)
        return Caller(key, self._quotas)


def _password(given: str) -> str:
    try:
        return base64.b64decode(given, validate=True).decode().partition(":")[2]
    except ValueError:  # not base64, or not UTF-8 in it
        return ""
