"""Starts a gateway: the wiring list."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from functools import partial

import starlette.routing

from gateway import app, metrics
from gateway.access import keys, quota_storage
from gateway.access.access import Access
from gateway.access.cors import Cors
from gateway.access.keys import Keys
from gateway.access.quota_storage import QuotaStorage
from gateway.access.usage import UsageLog
from gateway.config import GatewayConfig
from gateway.grpc_api import InferenceServicer
from gateway.http.messages import Bodies
from gateway.http.server import FIRST_REQUEST_S, HttpServer
from gateway.parsing.parsers import Parsers
from gateway.routing.activation_calls import ActivationCalls
from gateway.routing.groups import GroupLinks
from gateway.routing.relay import Relay, RelayPatience
from gateway.routing.routes import Route, RouteTable
from gateway.serving import Serving
from gateway.text.tokenizers import Tokenizers
from gateway.ui import access as ui_access
from gateway.ui.live import Live
from gateway.ui.look import ANSWER_S, ServiceClients
from gateway.ui.pages import Pages
from placement.client import PlacementClient
from protos import gateway_pb2_grpc, placement_pb2, placement_pb2_grpc
from services.errors import Invalid, PrismError
from services.ipc import inherited
from services.rpc import rpc
from services.rpc.watch import follow_stream
from services.runtime import tasks
from services.runtime.watched_files import Followed
from services.service import Service, read_arguments, run
from services.telemetry import log, tracing
from tokenization.loading import without_torch

_log = log.get(__name__)
_ROUTES_TIME_OUT_S = 10.0
"""Seconds that a starting gateway waits for placement's routes before it serves without them: placement answers at
once, unless it is away."""
_LAST_S = 1.0
"""Seconds of a stop's time that are kept for telling clients why their requests end; a quarter of that time if that is
less."""


async def build(
    service: Service,
    *,
    first_request_s: float = FIRST_REQUEST_S,
    look_s: float = ANSWER_S,
    quota_s: float = quota_storage.ANSWER_S,
) -> None:
    """`first_request_s`: seconds that a connection taken before a stop has for its first request. `look_s`: seconds
    after which a look at the system, for the page, has failed. `quota_s`: seconds after which a shared quota storage
    that has not answered counts as away."""
    config = service.config
    assert isinstance(config, GatewayConfig)
    if config.traces:
        service.on_stop(tracing.start(config.name))
    storage = QuotaStorage(config.quota_storage, answer_s=quota_s)
    service.on_stop(storage.close)
    usage = UsageLog(config.usage_file)
    service.on_stop(usage.close)
    access = Access(_keys(service, config.keys_file), storage)
    service.server.guard = partial(_guard, access)
    placement = placement_pb2_grpc.PlacementStub(rpc.channel(config.placement))
    routes = RouteTable()
    metrics.ROUTES_FRESH.set_function(lambda: routes.fresh)
    links = GroupLinks()
    tokenizers = Tokenizers(threads=config.tokenizer_threads)
    patience = RelayPatience(
        park_s=config.park_time_out_s,
        total_s=config.request_time_out_s,
        strikes=config.replay_limit,
        reach_s=config.reach_time_out_s,
        compile_s=config.compile_time_out_s,
    )
    activations = ActivationCalls(placement)
    relay = Relay(routes, links, activations, patience)
    parsers = Parsers()
    service.on_stop(parsers.close)
    serving = Serving(
        routes,
        tokenizers,
        relay,
        parsers=parsers,
        usage=usage,
        most_in_flight=config.most_in_flight,
        models_defaults=config.sampling_defaults == "model",
        cut_to_context=config.max_tokens_beyond_context == "cut",
    )
    page: list[starlette.routing.Route] = []
    may_see = ui_access.by_setting(config.ui, config.http, keys=bool(config.keys_file))
    if may_see is not None:
        looker = ServiceClients(config.placement, answer_s=look_s)
        pages = Pages(Live(looker.look), routes, may_see, keys=bool(config.keys_file))
        page = pages.routes()
        service.on_drain(pages.close)
        service.on_stop(looker.close)
    steering = PlacementClient(config.placement, "placement")
    service.on_stop(steering.close)
    bodies = Bodies(config.most_body_bytes, config.most_bodies_bytes)
    application = app.build(
        serving,
        access,
        bodies,
        page=page,
        placement=steering,
        cors=Cors(config.cors_origins),
        waking_comment_s=config.waking_comment_s,
    )
    server = HttpServer(application, config.http, service.identity, first_request_s=first_request_s)

    heard = asyncio.Event()

    def keep_ready(table: Mapping[str, Route]) -> None:
        heard.set()
        links.keep([place.address for place in route.places] for route in table.values())
        relay.prefixes.keep(
            (place.address, name, place.active) for name, route in table.items() for place in route.places
        )
        tokenizers.prefetch((route.model.path, route.model.generation) for route in table.values() if route.places)

    routes.on_change(keep_ready)
    routes.on_change(metrics.Series())
    routes.on_change(serving.tell_faults)
    tokenizers.on_change(serving.tell_faults)
    tokenizers.on_change(serving.prepare_parsers)
    service.spawn(
        routes.follow(follow_stream(lambda: placement.WatchRoutes(placement_pb2.WatchRoutesRequest()), "routes")),
        "follow routes",
    )
    service.add(
        gateway_pb2_grpc.add_InferenceServicer_to_server,
        InferenceServicer(serving, access),
        "prism.gateway.v1.Inference",
    )
    service.on_stop(links.close)
    service.on_drain(partial(_leave, service, server, serving, config.withdraw_s))
    try:
        async with asyncio.timeout(_ROUTES_TIME_OUT_S):
            await heard.wait()
    except TimeoutError:
        _log.warning("serving before placement has answered: every model is unavailable until then")
    listeners = inherited.listeners()
    if len(listeners) > 1:
        raise Invalid(f"{len(listeners)} listening sockets were handed over, and HTTP is one")
    await server.start(*listeners)
    await service.ready()


def _guard(access: Access, method: str, metadata: Iterable[tuple[str, str | bytes]]) -> None:
    """Checks the key of a gRPC call. Raises NoKey, and counts the call as failed, since no other code sees it."""
    try:
        access.of_call(method, metadata)
    except PrismError as error:
        count = metrics.Count(method.removeprefix("/"))
        count.failed(error)
        count.end()
        raise


async def _leave(service: Service, server: HttpServer, serving: Serving, withdraw_s: float) -> None:
    """Stops in three steps: first load balancers and clients are sent elsewhere, then no new requests are taken, and
    then running answers end."""
    serving.leaving = True
    server.withdraw()
    await asyncio.sleep(withdraw_s)
    # gRPC clients are sent elsewhere. Not awaited: a client that watches health never ends.
    tasks.spawn(service.server.stop(service.config.drain_s), "no new calls")
    left = tasks.spawn(_end(server, serving), "answers end")
    last_s = min(_LAST_S, service.config.drain_s / 4)
    if not (await asyncio.wait([left], timeout=max(0.0, service.config.drain_s - withdraw_s - last_s)))[0]:
        serving.cut()  # otherwise their connections would be cut with no error sent
    await left


async def _end(server: HttpServer, serving: Serving) -> None:
    """Waits until running answers have ended. A connection that was taken before the stop may still bring a request,
    which is answered."""
    await server.stop()
    await serving.drain()


def _keys(service: Service, path: str) -> Followed[Keys] | None:
    """The keys of the file, followed as it changes; None if `path` is empty. Raises Invalid if the file cannot be
    used."""
    if not path:
        _log.warning("no keys_file: whoever reaches this gateway may use it")
        return None
    return service.follow(Followed("keys", [path], lambda: keys.load(path)))


if __name__ == "__main__":
    without_torch()
    run(read_arguments(GatewayConfig, "The Prism gateway: HTTP and gRPC inference."), build)
