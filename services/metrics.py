"""Prometheus text over HTTP. Metrics are prometheus_client objects in the modules that count; names are
`prism_<what>_<unit>`."""

from __future__ import annotations

import prometheus_client

from services.errors import Unavailable


def serve(address: str) -> None:
    """Serves this process's metrics on "host:port" from a thread of its own. Raises Unavailable when the port is
    taken."""
    host, _, port = address.rpartition(":")
    try:
        prometheus_client.start_http_server(int(port), host or "0.0.0.0")
    except OSError as error:
        raise Unavailable(f"metrics address {address}: {error.strerror}") from None
