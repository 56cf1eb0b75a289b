"""The page's paths."""

from __future__ import annotations

import contextlib
import hashlib
import time
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from importlib import resources
from typing import Any

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from gateway import metrics
from gateway.routing.routes import RouteTable
from gateway.ui.access import Access
from gateway.ui.live import Live, View
from gateway.ui.state import document

Endpoint = Callable[[Request], Awaitable[Response]]
_HEADERS = {
    # The page loads its own files and nothing else; names of models, which come from users, can never become markup.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}
_DECIDED = ("model", "action", "group", "reason", "outcome")
"""Fields of a decision that do not change with time."""
_KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


@dataclass(frozen=True)
class File:
    """A file of the page, as it is sent."""

    body: bytes
    kind: str
    tag: str


class Pages:
    """All paths of the page; each calls `access` first."""

    def __init__(
        self,
        live: Live,
        models: RouteTable,
        access: Access,
        now: Callable[[], float] = time.monotonic,
        *,
        keys: bool = False,
    ) -> None:
        """`keys`: whether the gateway has API keys. Without them nobody may steer models over HTTP."""
        self._live = live
        self._models = models
        self._access = access
        self._keys = keys
        self._now = now
        self._files = _files()
        self._last: tuple[View, dict[str, Any]] | None = None
        """The last view and the document made of it, once for all viewers."""

    def routes(self) -> list[Route]:
        endpoints: dict[str, Endpoint] = {
            "/": self._redirect,
            "/ui": self._redirect,
            "/ui/": self._file,
            "/ui/state.json": self._state,
            "/ui/events": self._events,
            "/ui/{file}": self._file,
        }
        return [Route(path, self._checked(endpoint)) for path, endpoint in endpoints.items()]

    async def close(self) -> None:
        """Ends all streams."""
        self._live.close()

    def _checked(self, endpoint: Endpoint) -> Endpoint:
        async def checked(request: Request) -> Response:
            self._access(request.headers)
            response = await endpoint(request)
            response.headers.update(_HEADERS)
            return response

        return checked

    async def _redirect(self, request: Request) -> Response:
        return RedirectResponse("ui/")  # relative: a prefix that a proxy puts in front stays

    async def _file(self, request: Request) -> Response:
        file = self._files.get(request.path_params.get("file", "index.html"))
        if file is None:
            raise HTTPException(404)
        headers = {"etag": file.tag}
        if request.headers.get("if-none-match") == file.tag:
            return Response(status_code=304, headers=headers)
        return Response(file.body, media_type=file.kind, headers=headers)

    async def _state(self, request: Request) -> Response:
        async with contextlib.aclosing(self._live.follow()) as views:
            async for view in views:
                return Response(orjson.dumps(self._document(view)), media_type="application/json")
        raise HTTPException(503, "this gateway is stopping")

    async def _events(self, request: Request) -> Response:
        if "gzip" not in request.headers.get("accept-encoding", ""):
            return StreamingResponse(self._stream(), media_type="text/event-stream")
        headers = {"content-encoding": "gzip", "vary": "accept-encoding"}
        return StreamingResponse(_zipped(self._stream()), media_type="text/event-stream", headers=headers)

    async def _stream(self) -> AsyncGenerator[bytes, None]:
        """The document as the event "state", again and again. Decisions are left out while they are the same as those
        sent last."""
        sent: Any = None
        async with contextlib.aclosing(self._live.follow()) as views:
            async for view in views:
                state = dict(self._document(view))
                decided = [tuple(each[key] for key in _DECIDED) for each in state["decisions"]]
                if decided == sent:
                    del state["decisions"]
                sent = decided
                yield b"event: state\ndata: " + orjson.dumps(state) + b"\n\n"

    def _document(self, view: View) -> dict[str, Any]:
        if self._last is None or self._last[0] is not view:
            made = document(view.told, view.away, self._now(), self._models.all(), metrics.SLO.collect())
            self._last = (view, {**made, "keys": self._keys})
        return self._last[1]


async def _zipped(stream: AsyncGenerator[bytes, None]) -> AsyncIterator[bytes]:
    """The stream, compressed: each event is much like the one before, so a tenth is left of it."""
    pack = zlib.compressobj(1, wbits=31)
    async with contextlib.aclosing(stream) as events:
        async for event in events:
            yield pack.compress(event) + pack.flush(zlib.Z_SYNC_FLUSH)
    yield pack.flush()


def _files() -> dict[str, File]:
    files = {}
    for file in (resources.files("gateway.ui") / "static").iterdir():
        body = file.read_bytes()
        kind = _KINDS["." + file.name.rpartition(".")[2]]
        files[file.name] = File(body, kind, f'"{hashlib.sha256(body).hexdigest()[:16]}"')
    return files
