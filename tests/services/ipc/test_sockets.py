"""Whose Unix sockets are."""

from __future__ import annotations

import ctypes
import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from services.errors import Unavailable
from services.rpc import rpc

_NOBODY = 65534
_SETRESUID = {"x86_64": (116, 119, 117), "aarch64": (159, 149, 147)}
"""Numbers of setgroups, setresgid, setresuid."""


@pytest.fixture
def no_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.parametrize("mode", [0o600, 0o660])
async def test_socket_of_a_server_has_the_configured_mode(tmp_path: Path, no_umask: None, mode: int) -> None:
    path = tmp_path / "s.sock"
    server = rpc.Server(f"unix:{path}", socket_mode=mode)
    await server.start()
    assert stat.S_IMODE(path.stat().st_mode) == mode
    await server.stop(0)


@pytest.mark.parametrize("within", ["a file", "a folder that is another's"])
async def test_socket_path_that_cannot_be_created_is_refused_in_one_line(tmp_path: Path, within: str) -> None:
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" if within == "a file" else Path("/proc")
    with pytest.raises(Unavailable, match=f"{folder}/x/s.sock: "):
        await rpc.Server(f"unix:{folder}/x/s.sock").start()


async def test_socket_of_a_server_is_closed_to_others_before_its_mode_is_set(
    tmp_path: Path, no_umask: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "s.sock"
    before: list[int] = []
    chmod = os.chmod

    def watched(at: str, mode: int) -> None:
        before.append(stat.S_IMODE(path.stat().st_mode))
        chmod(at, mode)

    monkeypatch.setattr(os, "chmod", watched)
    server = rpc.Server(f"unix:{path}", socket_mode=0o666)
    await server.start()
    await server.stop(0)
    assert before == [0o600]


@pytest.mark.skipif(os.getuid() != 0 or os.uname().machine not in _SETRESUID, reason="only root can be somebody else")
async def test_socket_admits_another_user_only_if_its_mode_allows_it(no_umask: None) -> None:
    let_in = {}
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        for mode in (0o600, 0o660, 0o666):
            path = f"{folder}/{mode:o}.sock"
            server = rpc.Server(f"unix:{path}", socket_mode=mode)
            await server.start()
            with ThreadPoolExecutor(1) as thread:
                let_in[mode] = thread.submit(connects_as_nobody, path).result()
            await server.stop(0)
    assert let_in == {0o600: False, 0o660: False, 0o666: True}


def connects_as_nobody(path: str) -> bool:
    """Of a thread that nobody else uses: the system calls change it alone, the C library's functions all of them."""
    call = ctypes.CDLL(None).syscall
    setgroups, setresgid, setresuid = _SETRESUID[os.uname().machine]
    call(setgroups, 0, None)
    call(setresgid, _NOBODY, _NOBODY, _NOBODY)
    call(setresuid, _NOBODY, _NOBODY, _NOBODY)
    try:
        with socket.socket(socket.AF_UNIX) as there:
            there.connect(path)
    except PermissionError:
        return False
    return True
