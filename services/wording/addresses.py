"""Addresses in configurations, checked when they are read: gRPC would take any text in its own way, "127.0.0.1" as port
443 of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from pydantic import AfterValidator

_UNIX = "unix:"
_NAME = "dns:"
_MOST_PATH = 100
"""The most bytes of a socket's path: the kernel takes 107, and beside some sockets there is another with a longer
name."""


def grpc(address: str) -> str:
    """Checks a gRPC server's address, "unix:PATH" or "HOST:PORT", or that of several, "dns:HOST:PORT". Raises
    ValueError with one line."""
    if _is_open(address):
        return address
    if address.startswith(_UNIX):
        socket_path(address.removeprefix(_UNIX))
    elif (name := of_several(address)) is not None:
        if "[" in name or not _is_host_and_port(name):  # a numeric address is not looked up
            raise ValueError(f'"{address}" is not "dns:HOST:PORT"')
    elif not _is_host_and_port(address):
        raise ValueError(f'"{address}" is neither "unix:PATH" nor "HOST:PORT"')
    return address


def http(address: str) -> str:
    """Checks an HTTP server's address, "HOST:PORT". Raises ValueError with one line."""
    if not (_is_open(address) or _is_host_and_port(address)):
        raise ValueError(f'"{address}" is not "HOST:PORT"')
    return address


def socket_path(path: str) -> str:
    """Checks the path of a Unix socket, without "unix:". Raises ValueError with one line."""
    if _is_open(path):
        return path
    if not path or path.startswith(_UNIX):
        raise ValueError(f'"{path}" is not the path of a socket')
    if len(path.encode()) > _MOST_PATH:
        raise ValueError(f'"{path}" has {len(path.encode())} bytes; a socket\'s path may have {_MOST_PATH}')
    return path


def of_several(address: str) -> str | None:
    """The "HOST:PORT" in an address that stands for several, as gRPC writes names; None for any other address."""
    return address.removeprefix(_NAME).removeprefix("///") if address.startswith(_NAME) else None


def host_and_port(address: str) -> tuple[str, int]:
    """Host and port of a checked address, the host without the brackets of IPv6."""
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _is_open(text: str) -> bool:
    """Whether the environment's variables are not filled in yet (`services/runtime/config.py`)."""
    return "${" in text


def _is_host_and_port(text: str) -> bool:
    host, _, port = text.rpartition(":")
    in_brackets = host.startswith("[") and host.endswith("]")
    named = bool(host) and (in_brackets or not set(host) & set(":/[]"))
    return named and port.isascii() and port.isdecimal() and int(port) <= 65_535


def _or_empty(check: Callable[[str], str]) -> AfterValidator:
    return AfterValidator(lambda text: check(text) if text else text)


Address = Annotated[str, AfterValidator(grpc), "address"]
HttpAddress = Annotated[str, AfterValidator(http), "HTTP address"]
SocketPath = Annotated[str, AfterValidator(socket_path), "socket path"]
AddressOrNone = Annotated[str, _or_empty(grpc), "address"]
"""Address types that may be empty. (The last word of each is for docs/operate/settings.md.)"""
HttpAddressOrNone = Annotated[str, _or_empty(http), "HTTP address"]
SocketPathOrNone = Annotated[str, _or_empty(socket_path), "socket path"]
