"""Who may ask for what. Whatever comes in by HTTP or gRPC is checked here, before anything else looks at it.

Without a file of keys everybody may do everything but see what `gateway/ui/access.py` keeps. With one nothing but
health answers without a key. What runs when a key is taken away runs to its end.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable

from starlette.datastructures import Headers

from gateway import errors
from gateway.access.keys import Key, Keys
from gateway.access.quotas import Charge, Quotas
from gateway.errors import Denied, NoKey, UnknownModel
from services.runtime.files import Followed

_OPEN_PATH = "/health"
_OPEN_SERVICE = "/grpc.health.v1.Health/"
_PAGE = "/ui"
_MODELS = "/v1/"
_ABOUT_MODELS = ("/tokenize", "/detokenize", "/openapi.json")
"""What is any key's beside all below `_MODELS`. All else is an admin's: also what the router takes for one of its paths
though it is written in another way, as "/metrics" with a newline behind it."""


class Caller:
    """Who asks, and what that may do."""

    def __init__(self, key: Key | None, quotas: Quotas) -> None:
        """Without a key: everything."""
        self._key = key
        self._quota = None if key is None else quotas.of(key)

    @property
    def log_fields(self) -> dict[str, str]:
        """What lines of the log are to have."""
        return {} if self._key is None else {"key": self._key.name}

    def may_use(self, model: str) -> bool:
        return self._key is None or self._key.may_use(model)

    def check_model(self, model: str) -> None:
        """Raises UnknownModel: that there is a model is not told to who may not use it."""
        if not self.may_use(model):
            raise UnknownModel(model)

    def check_admin(self) -> None:
        """Raises Denied."""
        if self._key is not None and not self._key.admin:
            raise Denied(f"The key '{self._key.name}' is not an admin's.")

    def take_in_flight(self, count: int) -> None:
        """Counts answers that are being made. Raises TooMany."""
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
        """Holds tokens, of a prompt and of the most that its answers may be, if their client said it. Raises
        OverLimit."""
        if self._key is None or self._quota is None:
            return Charge()
        return await self._quota.hold(self._key, prompt, answers, answers_said)

    async def headers(self) -> errors.Headers:
        """What is left to ask for."""
        return [] if self._key is None or self._quota is None else await self._quota.headers(self._key)


ANYBODY = Caller(None, Quotas())
"""Who asks where there are no keys."""


class Access:
    """The keys, as their file has them now."""

    def __init__(self, keys: Followed[Keys] | None) -> None:
        self._keys = keys
        self._quotas = Quotas()

    def of_http(self, path: str, headers: Headers) -> Caller:
        """Raises NoKey, Denied."""
        if self._keys is None or path == _OPEN_PATH:
            return ANYBODY
        page = path.startswith(_PAGE)
        caller = self._caller(headers.get("authorization", ""), basic=page)
        if not path.startswith(_MODELS) and path not in _ABOUT_MODELS:
            caller.check_admin()
        return caller

    def of_call(self, method: str, metadata: Iterable[tuple[str, str | bytes]]) -> Caller:
        """Raises NoKey."""
        if self._keys is None or method.startswith(_OPEN_SERVICE):
            return ANYBODY
        given = next((value for name, value in metadata if name == "authorization"), "")
        return self._caller(given if isinstance(given, str) else given.decode(errors="replace"))

    def _caller(self, authorization: str, basic: bool = False) -> Caller:
        """A browser, which can send no bearer token, may send a key as the password of any user, but only for the page:
        it sends passwords along of its own accord, also with requests that another site's page makes."""
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
