"""The HTTP application: what each path is, and the answers to unexpected paths, methods and faults."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Sequence
from typing import Any, TypeVar

import orjson
import prometheus_client
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway import errors, openapi
from gateway.access.access import Access, Caller
from gateway.access.cors import Cors
from gateway.admin.models import AdminEndpoints
from gateway.anthropic.bodies import CountRequest
from gateway.anthropic.messages import MessagesEndpoint
from gateway.errors import BadField
from gateway.http import dialects, messages, paths
from gateway.metrics import Count
from gateway.openai import bodies
from gateway.openai.bodies import DetokenizeRequest, TokenizeRequest
from gateway.openai.completions import ChatForm, CompletionForm, GenerateEndpoint
from gateway.openai.embeddings import EmbeddingsEndpoint
from gateway.openai.endpoint import Endpoint
from gateway.openai.responses import ResponsesEndpoint
from gateway.openai.scoring import RerankEndpoint, ScoreEndpoint
from gateway.request import Prompt
from gateway.routing.routes import Route as ModelRoute
from gateway.serving import Serving
from kv_kinds import messages as kv_messages
from kv_kinds import wording as kv_wording
from placement.client import PlacementClient
from protos import common_pb2
from services.errors import PrismError
from services.wording import enums
from tokenization.tokenizer import Tokenizer

B = TypeVar("B", TokenizeRequest, DetokenizeRequest, CountRequest)
T = TypeVar("T")
MOST_CHARACTERS = 1 << 21
"""The most characters of a text for /tokenize, which no context bounds."""


def build(
    serving: Serving,
    access: Access,
    bodies: messages.Bodies,
    *,
    page: Sequence[Route] = (),
    placement: PlacementClient | None = None,
    cors: Cors | None = None,
    waking_comment_s: float = 0.0,
) -> ASGIApp:
    """The ASGI application over `serving`, with the paths of its `page`, and those for admins over `placement` if it is
    given. `access` checks every request first, except a
    browser's preflight (`cors`), which has no key. `waking_comment_s`: seconds (`GatewayConfig`)."""
    cors = cors or Cors()
    other = Endpoints(serving, bodies)
    rerank = RerankEndpoint(serving, bodies)
    hot: dict[str, Endpoint[Any]] = {
        form.path: GenerateEndpoint(serving, form, bodies, waking_comment_s) for form in (ChatForm(), CompletionForm())
    } | {
        ResponsesEndpoint.path: ResponsesEndpoint(serving, bodies, waking_comment_s),
        EmbeddingsEndpoint.path: EmbeddingsEndpoint(serving, bodies),
        ScoreEndpoint.path: ScoreEndpoint(serving, bodies),
        **dict.fromkeys((RerankEndpoint.path, *RerankEndpoint.others), rerank),
        MessagesEndpoint.path: MessagesEndpoint(serving, bodies, waking_comment_s),
    }
    everything = Starlette(
        routes=[
            *(Route(path, endpoint, methods=["POST"]) for path, endpoint in hot.items()),
            Route("/v1/models", other.models),
            Route("/v1/models/{model:path}", other.model),
            Route("/openapi.json", other.description),
            Route("/health", other.health),
            Route("/metrics", other.metrics),
            Route("/tokenize", other.tokenize, methods=["POST"]),
            Route("/detokenize", other.detokenize, methods=["POST"]),
            Route("/v1/messages/count_tokens", other.count_tokens, methods=["POST"]),
            *(AdminEndpoints(serving, placement, bodies, other.card).routes() if placement is not None else ()),
            *page,
        ],
        exception_handlers={
            HTTPException: _http_error,
            PrismError: _prism_error,
            messages.ClientGone: _nobody,
            500: _fault,
        },
    )
    everything.router.redirect_slashes = False  # paths are made plain before they come there

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        # Answers of engines need none of the layers that a general framework puts around a response, and every token's
        # event would pass each of them.
        assert scope["type"] == "http"  # the server speaks no other protocol
        path = scope["path"] = paths.plain(scope["path"])
        method, headers = scope["method"], messages.headers_of(scope)
        count = scope[messages.COUNT] = Count(paths.label(path))
        scope[messages.ANSWER_HEADERS] = cors.headers(path, headers)
        try:
            try:
                if cors.asked(method, path, headers):
                    await messages.respond_empty(_completing(scope, send), cors.answer(headers))
                    return
                scope[messages.CALLER] = access.of_http(path, headers, method)
            except PrismError as error:
                count.failed(error)
                await messages.respond_error(_completing(scope, send), error, dialect=dialects.of(path))
                return
            receive = bodies.unpacked(headers, receive)
            asked = hot.get(path) if method == "POST" else None
            if asked is not None:
                await asked(scope, receive, send)
            else:
                await everything(scope, receive, _completing(scope, send))
        finally:
            count.end()

    return application


def _completing(scope: Scope, send: Send) -> Send:
    """`send`, adding the headers that every answer has, and counting its status."""

    async def completing(message: Message) -> None:
        if message["type"] == "http.response.start":
            messages.count_of(scope).answered(message["status"])
            name = messages.request_id(messages.headers_of(scope))
            message["headers"] = [*message.get("headers", ()), *messages.answer_headers(scope, name)]
        await send(message)

    return completing


class Endpoints:
    """The endpoints that generate nothing."""

    def __init__(self, serving: Serving, bodies: messages.Bodies) -> None:
        self._serving = serving
        self._bodies = bodies
        self._created = int(time.time())
        self._description = orjson.dumps(openapi.document())

    async def models(self, request: Request) -> Response:
        caller = _caller(request)
        cards = []
        for route in self._serving.routes.all():
            name = route.model.name
            if caller.may_use(name):
                cards.append(self.card(route, name, caller))
            cards += [
                self.card(route, alias, caller)
                for alias in self._serving.routes.aliases(name)
                if caller.may_use(name, alias)
            ]
        return _json({"object": "list", "data": cards})

    async def model(self, request: Request) -> Response:
        asked = request.path_params["model"]
        return _json(self.card(self._route(request, asked), asked, _caller(request)))

    def card(self, route: ModelRoute, name: str, caller: Caller) -> dict[str, Any]:
        """The card of a model under its name or one of its aliases, as the caller sees it."""
        model = route.model
        aliases = self._serving.routes.aliases(model.name)
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "prism",
            "root": model.name,
            "parent": model.adapter.base or None,
            "aliases": [alias for alias in aliases if caller.may_use(model.name, alias)],
            "max_model_len": model.context_tokens,
            "architecture": model.architecture,
            "quantisation": model.quantisation or None,
            "unverified": model.unverified,
            "residency": enums.name(common_pb2.Residency, route.residency),
            "groups": [place.group for place in route.places],
            "error": route.error or self._serving.fault(route) or None,
            "pinned": model.pinned,
            "image_pinned": route.image_pinned,
            "weights_bytes": model.weights_bytes,
            "kv_bytes_per_token": model.kv_bytes_per_token,
            "kv_kinds": kv_wording.listed(kv_messages.layout(model)),
            "measured_weights_bytes": route.measured_weights_bytes or None,
            "measured_private_bytes": route.measured_private_bytes or None,
            "task": _task(model),
            "embedding_dimensions": model.embedding.dimensions or None if _task(model) == "embed" else None,
        }

    async def description(self, request: Request) -> Response:
        return Response(self._description, media_type="application/json")

    async def health(self, request: Request) -> Response:
        routes = self._serving.routes
        if self._serving.leaving:
            return _json({"status": "stopping"}, 503)
        if not routes.known:
            return _json({"status": "waiting for placement"}, 503)
        return _json({"status": "ok", "placement": "ok" if routes.fresh else "away", "models": len(routes.all())})

    async def metrics(self, request: Request) -> Response:
        return Response(prometheus_client.generate_latest(), media_type=prometheus_client.CONTENT_TYPE_LATEST)

    async def tokenize(self, request: Request) -> Response:
        asked = await self._parse(request, TokenizeRequest)
        prompt, field, called = asked.tokenized()
        route = self._route(request, asked.model)
        await _caller(request).take_request()
        tokenizer = await self._serving.tokenizer(route)
        if called is not None:
            await self._serving.parsers_of(called, False, tokenizer, route)
        ids = await self._encoded(request, tokenizer, prompt, field)
        written = None
        if asked.return_token_strs:
            written = await _while_connected(request, self._serving.pieces(tokenizer, ids))
        context = route.model.context_tokens
        return _json({"tokens": list(ids), "token_strs": written, "count": len(ids), "max_model_len": context})

    async def count_tokens(self, request: Request) -> Response:
        asked = await self._parse(request, CountRequest)
        chat = asked.chat()
        called = chat.called()
        route = self._route(request, asked.model)
        await _caller(request).take_request()
        tokenizer = await self._serving.tokenizer(route)
        await self._serving.parsers_of(called, False, tokenizer, route)
        ids = await self._encoded(request, tokenizer, chat.conversation(called), "messages")
        return _json({"input_tokens": len(ids)})

    async def _encoded(self, request: Request, tokenizer: Tokenizer, prompt: Prompt, field: str) -> Sequence[int]:
        """Token ids of a prompt that nothing is to answer. Raises BadField."""
        if (characters := prompt.characters) > MOST_CHARACTERS:
            raise BadField(f"{characters} characters are too many: at most {MOST_CHARACTERS} are tokenized.", field)
        return await _while_connected(request, self._serving.encode(tokenizer, prompt, field, characters, aside=True))

    async def detokenize(self, request: Request) -> Response:
        asked = await self._parse(request, DetokenizeRequest)
        route = self._route(request, asked.model)
        size = route.model.vocab_size
        if size and (unknown := max(asked.tokens, default=0)) >= size:
            raise BadField(f"Token id {unknown} is not in the model's vocabulary of {size}.", "tokens")
        await _caller(request).take_request()
        return _json({"prompt": await _while_connected(request, self._serving.text(route, asked.tokens, aside=True))})

    async def _parse(self, request: Request, kind: type[B]) -> B:
        """The checked body; the request is counted for the model that it names. Raises BadField."""
        data = await self._bodies.read(request.receive)
        count, caller = messages.count_of(request.scope), _caller(request)
        try:
            asked = bodies.parse(kind, data)
        except PrismError:
            count.model = self._serving.known(bodies.model_of(data), caller)
            raise
        count.model = self._serving.known(asked.model, caller)
        return asked

    def _route(self, request: Request, model: str) -> ModelRoute:
        """The route of a model by its name or alias, for which the request is counted. Raises UnknownModel."""
        route = self._serving.route(model, _caller(request))
        messages.count_of(request.scope).model = route.model.name
        return route


def _task(model: common_pb2.ModelSpec) -> str:
    if model.HasField("reranker"):
        return "rerank"
    return "embed" if model.HasField("embedding") else "generate"


def _caller(request: Request) -> Caller:
    caller = request.scope[messages.CALLER]
    assert isinstance(caller, Caller)
    return caller


async def _while_connected(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`. Cancels it and raises ClientGone if the client goes away."""
    async with messages.WhileConnected(request.receive):
        return await work
    raise messages.ClientGone


def _json(value: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")


async def _prism_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, PrismError)
    messages.count_of(request.scope).failed(error)
    written = dialects.of(request.url.path).body(error)
    response = Response(written, errors.shape(error).status, media_type="application/json")
    response.raw_headers += errors.headers(error)
    return response


async def _http_error(request: Request, error: Exception) -> Response:
    """The answer to an unknown path, or a method that the path does not have."""
    assert isinstance(error, HTTPException)
    asked = f"{request.method} {request.url.path}"
    message, code = {
        404: (f"Unknown request URL: {asked}.", "unknown_url"),
        405: (f"Not allowed: {asked}.", "method_not_allowed"),
    }.get(error.status_code, (error.detail, None))
    messages.count_of(request.scope).answered(error.status_code, code or "")
    written = dialects.of(request.url.path).refusal(error.status_code, message, code)
    response = Response(written, error.status_code, media_type="application/json")
    response.headers.update(error.headers or {})
    return response


async def _nobody(request: Request, error: Exception) -> Response:
    """A response that the server sends nowhere: the client is gone."""
    messages.count_of(request.scope).gone()
    return Response(status_code=400)


async def _fault(request: Request, error: Exception) -> Response:
    """The answer to a fault of the gateway; the server logs the fault with its trace."""
    messages.count_of(request.scope).fault()
    return Response(dialects.of(request.url.path).body(None), 500, media_type="application/json")
