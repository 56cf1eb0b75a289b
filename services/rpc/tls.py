"""Certificates that are read from files and follow them: for servers, and for channels between nodes.

A new certificate counts for connections that are made after it was read; open connections go on.
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
from services.runtime.watched_files import Followed


@dataclass(frozen=True)
class Certificate:
    """Contents of the files at one moment; the key was checked to belong to the certificate."""

    chain: bytes
    key: bytes
    ca: bytes
    """CA whose certificates peers must have (PEM); empty: peers need none."""
    context: ssl.SSLContext
    """TLS context for servers that are not gRPC's."""


_VARIABLES = {
    "ca": "PRISM_TLS_CA",
    "certificate": "PRISM_TLS_CERTIFICATE",
    "key": "PRISM_TLS_KEY",
    "server_name": "PRISM_TLS_SERVER_NAME",
}
"""Setting of `tls` -> environment variable, for tools that have no configuration file."""


class Identity:
    """Identity of this process towards others: its certificate and key, read from files."""

    def __init__(self, files: NodeTls | ServerTls) -> None:
        """Reads the files. Raises Invalid with one line if they cannot be used."""
        self._files = files
        self._ca = files.ca if isinstance(files, NodeTls) else ""
        paths = [files.certificate, files.key, *([self._ca] if self._ca else [])]
        self.followed = Followed("certificate", paths, self._read)

    @property
    def revision(self) -> int:
        """Rises when the files have changed, so that new channels would have another certificate."""
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
        """Credentials of a gRPC server; with a CA, clients must have a certificate of it."""

        def present() -> grpc.ServerCertificateConfiguration:
            """The newest certificate; gRPC calls this before each handshake, in a thread of its own."""
            now = self.followed.value
            return grpc.ssl_server_certificate_configuration([(now.key, now.chain)], now.ca or None)

        return grpc.dynamic_ssl_server_credentials(
            present(), present, require_client_authentication=bool(self.followed.value.ca)
        )

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Credentials for a channel that is opened now."""
        now = self.followed.value
        return grpc.ssl_channel_credentials(now.ca, now.key, now.chain)

    def channel_options(self) -> Sequence[tuple[str, Any]]:
        name = self._files.server_name if isinstance(self._files, NodeTls) else ""
        return [("grpc.ssl_target_name_override", name)] if name else []

    def server_context(self) -> ssl.SSLContext:
        """TLS context for an asyncio server: each handshake goes on with the newest certificate."""
        context = _server_context()

        def take_newest(connection: ssl.SSLObject, name: str | None, first: ssl.SSLContext) -> None:
            connection.context = self.followed.value.context

        context.sni_callback = take_newest  # called without a name as well
        return context


def from_environment() -> Identity | None:
    """The identity of a tool, by its environment; None: it speaks in the clear. Raises Invalid with one line."""
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
