"""Certificates for tests, as files."""

from __future__ import annotations

import os
from pathlib import Path

import trustme

from services.runtime.config import NodeTls, ServerTls


def write(path: Path, data: bytes) -> None:
    """Whole, at once."""
    new = path.with_suffix(".new")
    new.write_bytes(data)
    os.replace(new, path)


class Files:
    """Of one process: its certificate, key and whom it believes."""

    def __init__(self, folder: Path, name: str) -> None:
        self.certificate = folder / f"{name}.pem"
        self.key = folder / f"{name}.key"
        self.ca = folder / f"{name}.ca"

    def issue(self, ca: trustme.CA, *names: str) -> None:
        made = ca.issue_cert(*(names or ("127.0.0.1", "localhost")))
        write(self.key, made.private_key_pem.bytes())
        write(self.certificate, b"".join(blob.bytes() for blob in made.cert_chain_pems))

    def believe(self, *cas: trustme.CA) -> None:
        write(self.ca, b"".join(ca.cert_pem.bytes() for ca in cas))

    @property
    def server(self) -> ServerTls:
        return ServerTls(certificate=str(self.certificate), key=str(self.key))

    def node(self, server_name: str = "") -> NodeTls:
        return NodeTls(certificate=str(self.certificate), key=str(self.key), ca=str(self.ca), server_name=server_name)


def issued(folder: Path, name: str, ca: trustme.CA, *names: str) -> Files:
    files = Files(folder, name)
    files.believe(ca)
    files.issue(ca, *names)
    return files
