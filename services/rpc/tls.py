"""Certificates that are read from files and follow them: for servers, and for channels between nodes.

A new certificate counts for connections that are made after it was read; those that are open go on.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from services.errors import Invalid
from services.runtime.config import NodeTls, ServerTls
from services.runtime.files import Followed


@dataclass(frozen=True)
class Certificate:
    """One state of the files, checked: the key is the certificate's."""

    chain: bytes
    key: bytes
    ca: bytes
    """Whose certificates peers must have; empty: they need none."""
    context: ssl.SSLContext
    """For servers that are not gRPC's."""


_VARIABLES = {
    "ca": "PRISM_TLS_CA",
    "certificate": "PRISM_TLS_CERTIFICATE",
    "key": "PRISM_TLS_KEY",
    "server_name": "PRISM_TLS_SERVER_NAME",
}
"""Of tools that have no configuration file, as `tls` of one."""


class Identity:
    """Who this process is to others, by the files that say so."""

    def __init__(self, files: NodeTls | ServerTls) -> None:
        """Raises Invalid with one line when they cannot be used."""
        self._files = files
        self._ca = files.ca if isinstance(files, NodeTls) else ""
        paths = [files.certificate, files.key, *([self._ca] if self._ca else [])]
        self.followed = Followed("certificate", paths, self._read)

    @property
    def revision(self) -> int:
        """Another one means that new channels would be others."""
        return self.followed.revision

    def _read(self) -> Certificate:
        files = self._files
        chain, key = Path(files.certificate).read_bytes(), Path(files.key).read_bytes()
        ca = Path(self._ca).read_bytes() if self._ca else b""
        context = _server_context()
        try:
            context.load_cert_chain(files.certificate, files.key, password="")
        except ssl.SSLError as error:
            raise ValueError(f"{files.certificate}, {files.key}: {error.reason or error}") from None
        if self._ca:
            try:
                context.load_verify_locations(cadata=ca.decode())
            except (ssl.SSLError, ValueError) as error:
                raise ValueError(f"{self._ca}: {getattr(error, 'reason', None) or error}") from None
        return Certificate(chain, key, ca, context)

    def server_credentials(self) -> grpc.ServerCredentials:
        """With a CA, clients must have a certificate of it."""

        def present() -> grpc.ServerCertificateConfiguration:
            """Asked before each handshake, in a thread of gRPC's."""
            now = self.followed.value
            return grpc.ssl_server_certificate_configuration([(now.key, now.chain)], now.ca or None)

        return grpc.dynamic_ssl_server_credentials(
            present(), present, require_client_authentication=bool(self.followed.value.ca)
        )

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Of a channel that is opened now."""
        now = self.followed.value
        return grpc.ssl_channel_credentials(now.ca, now.key, now.chain)

    def channel_options(self) -> Sequence[tuple[str, Any]]:
        name = self._files.server_name if isinstance(self._files, NodeTls) else ""
        return [("grpc.ssl_target_name_override", name)] if name else []

    def server_context(self) -> ssl.SSLContext:
        """For an asyncio server: each handshake goes on with the newest certificate."""
        context = _server_context()

        def take_newest(connection: ssl.SSLObject, name: str | None, first: ssl.SSLContext) -> None:
            connection.context = self.followed.value.context

        context.sni_callback = take_newest  # called without a name as well
        return context


def from_environment() -> Identity | None:
    """Of a tool; None: it speaks in the clear. Raises Invalid with one line."""
    given = {field: os.environ[name] for field, name in _VARIABLES.items() if os.environ.get(name)}
    if not given:
        return None
    missing = [name for field, name in _VARIABLES.items() if field not in given and field != "server_name"]
    if missing:
        raise Invalid(f"{', '.join(missing)} must be set too")
    return Identity(NodeTls(**given))


def _server_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context
