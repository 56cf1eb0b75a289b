"""gRPC servers with health, reflection and translated errors, and channels to them.

Every call states in its user agent which protocol version its process speaks (`PROTOCOL`); a server refuses another
major version with FAILED_PRECONDITION. Callers that state none (probes, grpcurl) are served.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from inspect import isawaitable
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from services.errors import Invalid, PrismError, Unavailable, Unmet
from services.ipc import sockets
from services.rpc.channels import RenewedChannel
from services.rpc.status import to_status
from services.rpc.tls import Identity
from services.telemetry import log

_log = log.get(__name__)
_identity: Identity | None = None
"""Identity of this process, for its channels; a module variable, because channels are made in many places of one
process."""
PROTOCOL = (1, 4)
"""Major and minor version of protos/. The minor version rises with a change that an older process may leave out or
ignore (a new field, a new call), the major one with a change that it would misunderstand."""
_AGENT = re.compile(r"prism-protocol/(\d+)\.(\d+)")
_MEGABYTE = 1 << 20
_OPTIONS: list[tuple[str, Any]] = [
    # Prompts and states are lists of numbers; none of them comes near this size.
    ("grpc.max_receive_message_length", 64 * _MEGABYTE),
    ("grpc.max_send_message_length", 64 * _MEGABYTE),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # Reconnecting after a restart must not take up to two minutes, as it would by default.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # A call that finds its server stopping fails, and its caller knows whether it may be repeated. gRPC's own
    # repetition ("transparent retries") has no bound: between a server's GOAWAY and its closed socket it can begin a
    # call anew for ever, in native threads, for 200 MB of memory a second.
    ("grpc.enable_retries", 0),
    # Two channels of a process to one address are two connections, so that a busy stream does not hold up another
    # service's calls.
    ("grpc.use_local_subchannel_pool", 1),
]
_KEEPALIVE: list[tuple[str, Any]] = [
    # A peer that vanished without closing (another host, a cut cable) is noticed within 5 s by either side: a ping is
    # sent after 2 s without data. It has 3 s to reach the peer's kernel (gRPC makes the keepalive's time-out
    # TCP_USER_TIMEOUT, for all bytes) and to be answered by its process (the ping's time-out, which is a minute by
    # default). One second of silence must not count, nor what the kernel sends again after it: every stream to the peer
    # would begin anew. gRPC answers pings beside Python, so a busy loop is no silence.
    ("grpc.keepalive_time_ms", 2_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.http2.ping_timeout_ms", 3_000),
]
_LOCAL_KEEPALIVE: list[tuple[str, Any]] = [
    # On one host the kernel reports at once that a peer is dead. A peer that does not answer may have a reason:
    # registering a host's memory takes seconds. A ping has gRPC's own minute.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
]
_SERVER_STOPPED = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
"""Codes of a call whose server stopped, whichever state the call was in."""
_AGAIN_S = 0.05
_THIS_HOST = ("unix:", "127.", "localhost:", "[::1]:")
_SERVER_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.so_reuseport", 0),  # a second server on the port fails instead of sharing it
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
]


def _other_version(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """Why a call with these headers is refused; empty if it is not."""
    agent = next((value for key, value in metadata if key == "user-agent"), "")
    said = _AGENT.search(agent if isinstance(agent, str) else agent.decode(errors="replace"))
    if said is None or int(said[1]) == PROTOCOL[0]:
        return ""
    return f"protocol {said[1]}.{said[2]} is not spoken here: this process speaks {PROTOCOL[0]}.{PROTOCOL[1]}"


Guard = Callable[[str, Iterable[tuple[str, str | bytes]]], Any]
"""(method, metadata) of a call -> None; raises the PrismError with which the call is refused. The method is
"/package.Service/Method"."""


def _parse(kind: Callable[[bytes], Any], message: bytes) -> Any:
    """The message in `message`. Raises Invalid for bytes that are no such message."""
    try:
        return kind(message)
    except DecodeError as error:
        raise Invalid(str(error)) from None


async def _parse_each(kind: Callable[[bytes], Any], messages: AsyncIterator[bytes]) -> AsyncIterator[Any]:
    async for message in messages:
        yield _parse(kind, message)


class _TranslateErrors(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Refuses callers of another major version, and calls that the server's guard refuses. Answers a PrismError with
    its status. Any other exception is a fault of the server: it is logged with its trace, and answered as INTERNAL.

    Requests are parsed here, because gRPC would answer a request that it cannot parse as a fault of the server.
    """

    def __init__(self, guard: Guard) -> None:
        self._guard = guard

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler = await continuation(details)
        if handler is None:
            return None
        ours = details.method.startswith("/prism.")  # health and reflection are open to any version
        other = _other_version(details.invocation_metadata) if ours else ""
        refusal: PrismError | None = Unmet(other) if other else None
        try:
            self._guard(details.method, details.invocation_metadata)
        except PrismError as error:
            refusal = error

        def parse(request: Any) -> Any:
            kind = handler.request_deserializer
            if kind is None:
                return request
            return _parse_each(kind, request) if handler.request_streaming else _parse(kind, request)

        async def refuse(context: Any, error: Exception) -> None:
            if isinstance(error, PrismError):
                code, text = to_status(error)
            else:
                _log.error("call failed", method=details.method, exc_info=error)
                code, text = grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}"
            await context.abort(code, text)

        def unary(behaviour: Callable[..., Any]) -> Callable[..., Any]:
            async def call(request: Any, context: Any) -> Any:
                if refusal is not None:
                    await refuse(context, refusal)
                try:
                    return await behaviour(parse(request), context)
                except grpc.aio.AbortError:
                    raise
                except Exception as error:  # the process's outermost edge: every failure gets an answer
                    await refuse(context, error)

            return call

        def stream(behaviour: Callable[..., Any]) -> Callable[..., Any]:
            async def call(request: Any, context: Any) -> Any:
                if refusal is not None:
                    await refuse(context, refusal)
                try:
                    answers = behaviour(parse(request), context)
                    if isawaitable(answers):  # health's Watch writes its messages itself
                        await answers
                        return
                    async for message in answers:
                        yield message
                except grpc.aio.AbortError:
                    raise
                except Exception as error:  # the outermost edge here too
                    await refuse(context, error)

            return call

        kinds = {"unary_unary": unary, "stream_unary": unary, "unary_stream": stream, "stream_stream": stream}
        for kind, wrap in kinds.items():
            behaviour = getattr(handler, kind)
            if behaviour is not None:
                return handler._replace(**{kind: wrap(behaviour), "request_deserializer": None})
        return handler


def _options(address: str) -> list[tuple[str, Any]]:
    """gRPC options for both sides of a connection at the address."""
    return [*_OPTIONS, *(_LOCAL_KEEPALIVE if address.startswith(_THIS_HOST) else _KEEPALIVE)]


class Server:
    """A gRPC server on one address. It is NOT_SERVING until `set_serving(True)`."""

    def __init__(self, address: str, identity: Identity | None = None, socket_mode: int = 0o600) -> None:
        """Serves over TCP, with TLS if there is an `identity`, or on a Unix socket with mode `socket_mode`."""
        self.address = address
        self._socket_mode = socket_mode
        self._identity = identity
        self.guard: Guard = lambda method, metadata: None
        """Check that is called before each call, health's and reflection's included."""
        options = [*_options(address), *_SERVER_OPTIONS]
        interceptor = _TranslateErrors(lambda method, metadata: self.guard(method, metadata))
        self._server = grpc.aio.server(interceptors=[interceptor], options=options)
        self._health = health.aio.HealthServicer()
        self._names: list[str] = []
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)

    def add(self, adder: Callable[[Any, Any], None], servicer: Any, name: str) -> None:
        """Adds a servicer by its generated `add_…_to_server`; `name` is the full one, "prism.balloond.v1.Balloond"."""
        adder(servicer, self._server)
        self._names.append(name)

    async def start(self) -> None:
        """Starts to listen. Raises Unavailable with one line if the address is taken."""
        path = sockets.unix_path(self.address)
        if path is not None:
            sockets.clear_stale(path)
        reflection.enable_server_reflection([*self._names, health.SERVICE_NAME, reflection.SERVICE_NAME], self._server)
        try:
            if path is None and self._identity is not None:
                self.port = self._server.add_secure_port(self.address, self._identity.server_credentials())
            else:
                with sockets.nobody_elses():  # it listens at once, before its mode can be set
                    self.port = self._server.add_insecure_port(self.address)
        except RuntimeError:
            raise Unavailable(f"cannot listen on {self.address}: taken, or no address of this host") from None
        if path is not None:
            os.chmod(path, self._socket_mode)
        await self._server.start()
        await self.set_serving(False)

    async def set_serving(self, serving: bool) -> None:
        state = health_pb2.HealthCheckResponse
        for name in ("", *self._names):
            await self._health.set(name, state.SERVING if serving else state.NOT_SERVING)

    async def stop(self, grace_s: float) -> None:
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)


def identify(identity: Identity | None) -> None:
    """Sets what all channels of this process over TCP show to servers, and demand of them, from now on; None: nothing,
    and connections are in the clear."""
    global _identity
    _identity = identity


def channel(address: str) -> grpc.aio.Channel:
    """A channel to `address`. It connects when first used, and again whenever the server comes back."""
    agent = f"prism-protocol/{PROTOCOL[0]}.{PROTOCOL[1]}"
    options = [*_options(address), ("grpc.primary_user_agent", agent)]
    identity = _identity
    if identity is None or sockets.unix_path(address) is not None:
        return grpc.aio.insecure_channel(address, options=options)
    options += identity.channel_options()

    def open_now() -> grpc.aio.Channel:
        return grpc.aio.secure_channel(address, identity.channel_credentials(), options=options)

    return RenewedChannel(open_now, lambda: identity.revision)


async def answer(
    method: Any,
    request: Any,
    timeout_s: float,
    again: bool = True,
    is_there: Callable[[], Awaitable[None]] | None = None,
) -> Any:
    """The answer of a unary call. Waits for the server to be there, for `timeout_s` seconds in all, and repeats the
    call if the server stops meanwhile and `again` says that the call may be made twice. `is_there` is awaited before
    each call, and raises what the caller gets if the server is not there. Raises AioRpcError."""
    loop = asyncio.get_running_loop()
    until = loop.time() + timeout_s
    while True:
        if is_there is not None:
            await is_there()
        try:
            return await method(request, timeout=max(0.0, until - loop.time()), wait_for_ready=True)
        except grpc.aio.AioRpcError as error:
            if not again or error.code() not in _SERVER_STOPPED or loop.time() + _AGAIN_S >= until:
                raise
        await asyncio.sleep(_AGAIN_S)


async def healthy(address: str, timeout_s: float) -> bool:
    """Whether the server at `address` answers SERVING within `timeout_s` seconds."""
    async with channel(address) as there:
        try:
            answer = await health_pb2_grpc.HealthStub(there).Check(
                health_pb2.HealthCheckRequest(), timeout=timeout_s, wait_for_ready=True
            )
        except grpc.aio.AioRpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
