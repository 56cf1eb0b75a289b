"""How errors are written in each of the APIs: as the body of a response, and as the last events of a stream that has
begun."""

from __future__ import annotations

from typing import Protocol

import orjson

from gateway import errors
from gateway.http import sse
from services.errors import PrismError

_FAULT = "Internal error."


class Dialect(Protocol):
    def body(self, error: PrismError | None) -> bytes:
        """The body of an error; None: a fault of the gateway."""

    def events(self, error: PrismError | None) -> bytes:
        """The last events of a stream that ends with an error; None: a fault of the gateway."""

    def refusal(self, status: int, message: str, code: str | None) -> bytes:
        """The body of the answer to an unknown path, or a method that the path does not have."""


class OpenAi:
    """Chat completions, completions, embeddings, and all paths beside them."""

    def body(self, error: PrismError | None) -> bytes:
        if error is None:
            return orjson.dumps(errors.envelope(_FAULT, "server_error", None))
        return errors.encode(error)

    def events(self, error: PrismError | None) -> bytes:
        return sse.error(self.body(error)) + sse.DONE

    def refusal(self, status: int, message: str, code: str | None) -> bytes:
        return orjson.dumps(errors.envelope(message, "invalid_request_error", code))


class Responses(OpenAi):
    """OpenAI's Responses: the same bodies, and an event of its own."""

    def __init__(self, number: int = 0) -> None:
        """`number`: that of the event in its stream."""
        self._number = number

    def events(self, error: PrismError | None) -> bytes:
        said = errors.body(error)["error"] if error is not None else {"message": _FAULT, "code": "server_error"}
        named = {key: said.get(key) for key in ("code", "message", "param")}
        # The event's documented fields, and an `error`, as OpenAI sends it: only that makes OpenAI's clients raise.
        return sse.named("error", {"type": "error", **named, "error": said, "sequence_number": self._number})


_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Anthropic's kinds of errors by status."""


class Anthropic:
    """Anthropic's Messages."""

    def body(self, error: PrismError | None) -> bytes:
        return orjson.dumps(self._error(error))

    def events(self, error: PrismError | None) -> bytes:
        return sse.named("error", self._error(error))

    def refusal(self, status: int, message: str, code: str | None) -> bytes:
        return orjson.dumps(self._envelope(status, message))

    def _error(self, error: PrismError | None) -> dict[str, object]:
        status = errors.shape(error).status if error is not None else 500
        return self._envelope(status, _FAULT if error is None else str(error))

    def _envelope(self, status: int, message: str) -> dict[str, object]:
        kind = _KINDS.get(status, "api_error" if status >= 500 else "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": message}}


OPENAI, RESPONSES, ANTHROPIC = OpenAi(), Responses(), Anthropic()


def of(path: str) -> Dialect:
    """The dialect of a path."""
    if path.startswith("/v1/messages"):
        return ANTHROPIC
    return RESPONSES if path == "/v1/responses" else OPENAI
