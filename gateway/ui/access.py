"""Access to the page where there are no keys. (With keys, `gateway/access/access.py` has checked for an admin's
before.)"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable

from starlette.datastructures import Headers

from gateway.errors import Denied

Access = Callable[[Headers], None]
"""A check of a request's headers; raises Denied."""


def by_setting(ui: bool | None, http: str, keys: bool) -> Access | None:
    """The check that the gateway's setting `ui` means for a gateway that listens on `http`, "host:port", with or
    without keys; None: there is no page."""
    if keys:
        return None if ui is False else _anyone
    if ui is None:
        return _by_loopback_name if _is_loopback(_host(http)) else None
    return _anyone if ui else None


def _anyone(headers: Headers) -> None:
    """Allows every request that gets here: it had a key, or the operator opened the page."""


def _by_loopback_name(headers: Headers) -> None:
    """Allows only requests for this machine by a name of its own. A page elsewhere whose name was made to mean this
    machine shows its own name here (DNS rebinding), and so does a request that a proxy passes on. Raises Denied."""
    host = _host(headers.get("host", ""))
    if not _is_loopback(host):
        raise Denied(f"the page is for this machine only, not for '{host}': the gateway's setting 'ui' opens it")


def _host(address: str) -> str:
    """The host in "host", "host:port" or "[host]:port"."""
    if address.startswith("["):
        return address[1:].partition("]")[0]
    return address.rpartition(":")[0] or address


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
