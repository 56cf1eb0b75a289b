"""Cross-origin access (CORS): pages of other origins that may read answers in a browser.

A browser first sends a preflight request, without the page's key, and then shows a page only answers that name its
origin. This protects the browser's user, and is no access control: a client with a key may do anything without a
browser.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from gateway import errors
from gateway.errors import Denied

ANY = "*"
_KEPT = ("/ui", "/metrics")
"""Beginnings of paths whose answers are for the gateway's own page alone: they are about the whole system, and who may
see `/ui` can depend on the name by which it is asked for (`gateway/ui/access.py`)."""
_READABLE = ", ".join(
    (
        "x-request-id",
        "retry-after",
        "x-should-retry",
        *(f"x-ratelimit-{what}-{kind}" for kind in ("requests", "tokens") for what in ("limit", "remaining", "reset")),
    )
)
_REMEMBERED_S = 600
"""Seconds for which a browser need not repeat its preflight request."""
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_HOST = re.compile(r"[a-z0-9._-]+|[0-9a-f:]+")
_PORTS = {"http": 80, "https": 443}


def origin(text: str) -> str:
    """An origin as browsers send it, "https://chat.example.com" or "http://localhost:3000", or "*" for all. Raises
    ValueError with one line."""
    if text == ANY or "${" in text:  # the environment's variables are not filled in yet (services/runtime/config.py)
        return text
    exact = _as_sent(text)
    if not exact:
        raise ValueError(f'"{text}" is no origin: "SCHEME://HOST" or "SCHEME://HOST:PORT", or "*" for all')
    if text != exact:
        raise ValueError(f'"{text}" is not what browsers send for an origin: write "{exact}"')
    return text


def _as_sent(text: str) -> str:
    """The origin of an address; empty if it has none."""
    try:
        split = urlsplit(text)
        host, port = split.hostname or "", split.port
        host = host if host.isascii() else host.encode("idna").decode()
    except ValueError:
        return ""
    if not split.scheme or not _HOST.fullmatch(host):
        return ""
    named = f"[{host}]" if ":" in host else host
    return f"{split.scheme}://{named}" + (f":{port}" if port and port != _PORTS.get(split.scheme) else "")


def alone(origins: Sequence[str]) -> Sequence[str]:
    """Origins among which "*" is the only one if it is there. Raises ValueError with one line."""
    if ANY in origins and len(origins) > 1:
        raise ValueError('"*" allows every origin: name no other beside it')
    return origins


class Cors:
    """CORS headers for browsers of pages at `origins`; none if there are no origins."""

    def __init__(self, origins: Sequence[str] = ()) -> None:
        """`origins`: checked by `origin`."""
        self._origins = frozenset(origins)
        self._any = ANY in self._origins

    def headers(self, path: str, headers: Headers) -> errors.Headers:
        """Headers of every answer to a request with these headers, errors and streams included."""
        if not self._origins or path.startswith(_KEPT):
            return []
        readable = (b"access-control-expose-headers", _READABLE.encode())
        if self._any:
            return [(b"access-control-allow-origin", ANY.encode()), readable]
        varies = (b"vary", b"origin")  # a cache must not give one origin's answer to another
        given = headers.get("origin", "")
        if given not in self._origins:
            return [varies]
        return [(b"access-control-allow-origin", given.encode()), readable, varies]

    def asked(self, method: str, path: str, headers: Headers) -> bool:
        """Whether the request is a browser's preflight: it asks whether a page may send a request."""
        return (
            bool(self._origins)
            and method == "OPTIONS"
            and not path.startswith(_KEPT)
            and "origin" in headers
            and "access-control-request-method" in headers
        )

    def answer(self, headers: Headers) -> errors.Headers:
        """Headers of the answer to a preflight: what the page's request may have, beside `headers`. Raises Denied."""
        given = headers["origin"]
        if not self._any and given not in self._origins:
            raise Denied(f"The origin '{given[:100]}' is not among the gateway's `cors_origins`.")
        wanted = ", ".join(_HEADER_NAME.findall(headers.get("access-control-request-headers", "")))
        allowed = [
            (b"access-control-allow-methods", b"GET, POST"),
            (b"access-control-max-age", b"%d" % _REMEMBERED_S),
        ]
        if wanted:
            # All other headers are ignored, and "*" would not do for Authorization.
            allowed.append((b"access-control-allow-headers", wanted.encode()))
        if headers.get("access-control-request-private-network") == "true":
            allowed.append((b"access-control-allow-private-network", b"true"))
        return allowed
