"""The stream for gateways of the same node."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path
from typing import cast

import pytest

from gpu_scheduler.local import LocalServer
from gpu_scheduler.queue.intake import Intake


async def test_local_server_listens_only_once_the_mode_of_its_socket_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = f"unix:{tmp_path}/s.sock"
    listened: list[bool] = []
    chmod = os.chmod

    def watched(at: str, mode: int) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
            listened.append(other.connect_ex(at) == 0)
        chmod(at, mode)

    monkeypatch.setattr(os, "chmod", watched)
    server = LocalServer(address, cast(Intake, None), 0o660)
    await server.start()
    assert listened == [False]
    assert stat.S_IMODE(os.stat(f"{tmp_path}/s.sock.stream").st_mode) == 0o660
    await server.stop()
