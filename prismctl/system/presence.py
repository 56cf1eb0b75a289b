"""Whether a process answers, and what can be found out if it does not: no process is there, it is stopped or hangs, or
its socket is another user's."""

from __future__ import annotations

import asyncio
import errno
import os
import pwd
import socket

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.errors import PrismError
from services.ipc import seqpacket
from services.ipc.sockets import unix_path
from services.rpc import rpc
from services.wording.addresses import host_and_port, of_several

NO_SOCKET = "there is no such socket"
_AGAIN_S = 0.05
_CONNECT_S = 1.0
_AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


async def problem(address: str, wait_s: float) -> str:
    """An empty text once the gRPC server at `address` reports that it serves; after `wait_s` seconds what is known of
    why it does not."""
    loop = asyncio.get_running_loop()
    until = loop.time() + wait_s
    async with rpc.channel(address) as there:
        health = health_pb2_grpc.HealthStub(there)
        while True:
            told = ""
            try:
                left = max(0.0, until - loop.time())
                answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=left, wait_for_ready=True)
            except grpc.aio.AioRpcError as error:
                if error.code() not in _AWAY:
                    return error.details() or error.code().name
            else:
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return ""
                told = "it is there and does not serve: it starts, or ends, or waits for another service"
            if loop.time() + _AGAIN_S >= until:
                return told or await why(address)
            await asyncio.sleep(_AGAIN_S)


async def keeper_problem(path: str, wait_s: float) -> str:
    """An empty text once the keeper at the SEQPACKET socket `path` answers; after `wait_s` seconds what is known of why
    it does not. The keeper answers if it ends the connection when this side does: that a connection is made says
    nothing, since the kernel does that for a process that hangs as well."""
    loop = asyncio.get_running_loop()
    until = loop.time() + wait_s
    while True:
        with seqpacket.new() as there:
            there.setblocking(False)
            try:
                async with asyncio.timeout_at(until):
                    await loop.sock_connect(there, path)
                    there.shutdown(socket.SHUT_WR)
                    while await loop.sock_recv(there, 1 << 16):
                        pass
                return ""
            except OSError:  # or its time is over
                pass
        if loop.time() + _AGAIN_S >= until:
            return await why(path)
        await asyncio.sleep(_AGAIN_S)


async def why(address: str, connected: str = "") -> str:
    """What can be found out about a process that does not answer at a gRPC address, or at the path of a socket.
    `connected`: text for one that takes connections and is not stopped, in place of the text that it is silent."""
    path = address if address.startswith("/") else unix_path(address)
    return await _at_port(address, connected) if path is None else await asyncio.to_thread(_at_socket, path, connected)


def _at_socket(path: str, connected: str) -> str:
    for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
        with socket.socket(socket.AF_UNIX, kind) as there:
            there.setblocking(False)
            try:
                there.connect(path)
            except FileNotFoundError:
                return NO_SOCKET
            except PermissionError:
                return f"this user may not use the socket{_owner(path)}"
            except ConnectionRefusedError:
                return "no process listens there: it has ended"
            except BlockingIOError:
                return "its process takes no connections"
            except OSError as error:
                if error.errno == errno.EPROTOTYPE:
                    continue
                return error.strerror or str(error)
            return _connected(there, connected)
    return "it is no socket of a service"


def _owner(path: str) -> str:
    """The socket's owner as the end of a sentence; empty if it cannot be found out."""
    try:
        return f" of {pwd.getpwuid(os.stat(path).st_uid).pw_name}"
    except (OSError, KeyError):
        return ""


def _connected(there: socket.socket, told: str) -> str:
    """The state of the process that listens, if it can be seen from here: whether it was stopped."""
    silent = "it is connected and silent"
    try:
        peer = seqpacket.peer(there)
    except PrismError:
        return told or silent
    os.close(peer.pidfd)
    try:
        with open(f"/proc/{peer.pid}/stat") as file:
            state = file.read().rpartition(")")[2].split()[0]
    except OSError:
        return told or silent
    if state in ("T", "t"):
        return f"its process {peer.pid} is stopped, kill -CONT {peer.pid} lets it go on"
    return told or f"{silent}: its process {peer.pid} hangs, or is very busy"


async def _at_port(address: str, connected: str) -> str:
    host, port = host_and_port(of_several(address) or address)
    try:
        async with asyncio.timeout(_CONNECT_S):
            _, writer = await asyncio.open_connection(host, port)
    except TimeoutError:
        return f"no connection within {_CONNECT_S:g} s"
    except OSError as error:
        if error.errno is not None and error.errno > 0:
            return os.strerror(error.errno).lower()  # the loop's own words repeat the address
        return (error.strerror or str(error)).lower()
    writer.close()
    return connected or "it is connected and silent: it hangs, or only one side speaks TLS (PRISM_TLS_CA)"
