"""Addresses as configurations give them, checked when they are read: what gRPC is given it takes in its own way, and
"127.0.0.1" would be port 443 of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from pydantic import AfterValidator

_UNIX = "unix:"
_NAME = "dns:"
_MOST_PATH = 100
"""Characters of a socket's path: the kernel takes 107, and beside some sockets is another with a longer name."""


def grpc(address: str) -> str:
    """Of a server: "unix:PATH" or "HOST:PORT", of several "dns:HOST:PORT". Raises ValueError with one line, as all of
    these do."""
    if _is_open(address):
        return address
    if address.startswith(_UNIX):
        socket_path(address.removeprefix(_UNIX))
    elif (name := of_several(address)) is not None:
        if "[" in name or not _is_host_and_port(name):  # an address is not looked up
            raise ValueError(f'"{address}" is not "dns:HOST:PORT"')
    elif not _is_host_and_port(address):
        raise ValueError(f'"{address}" is neither "unix:PATH" nor "HOST:PORT"')
    return address


def http(address: str) -> str:
    """Of a server: "HOST:PORT"."""
    if not (_is_open(address) or _is_host_and_port(address)):
        raise ValueError(f'"{address}" is not "HOST:PORT"')
    return address


def socket_path(path: str) -> str:
    """Of a Unix socket, as it is."""
    if _is_open(path):
        return path
    if not path or path.startswith(_UNIX):
        raise ValueError(f'"{path}" is not the path of a socket')
    if len(path.encode()) > _MOST_PATH:
        raise ValueError(f'"{path}" has {len(path.encode())} bytes; a socket\'s path may have {_MOST_PATH}')
    return path


def of_several(address: str) -> str | None:
    """The "HOST:PORT" of one that stands for several, as gRPC writes names; None for any other."""
    return address.removeprefix(_NAME).removeprefix("///") if address.startswith(_NAME) else None


def host_and_port(address: str) -> tuple[str, int]:
    """Of one that was checked, the host without the brackets of IPv6."""
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _is_open(text: str) -> bool:
    """Whether the environment's variables are yet to be filled in (`services/runtime/config.py`)."""
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
"""These may be empty. (The words are for docs/operate/settings.md.)"""
HttpAddressOrNone = Annotated[str, _or_empty(http), "HTTP address"]
SocketPathOrNone = Annotated[str, _or_empty(socket_path), "socket path"]
