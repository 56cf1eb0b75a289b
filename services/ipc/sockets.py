"""Unix socket files: their addresses and modes, and the removal of files that no process listens on any more."""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from services.errors import Unavailable


def unix_path(address: str) -> str | None:
    """The path of a "unix:" address; None for any other address."""
    return address.removeprefix("unix:") if address.startswith("unix:") else None


def stream_path(address: str) -> str | None:
    """The path at which a server at a "unix:" address takes plain streams of messages (`services/ipc/framing.py`)
    beside gRPC; None for any other address."""
    path = unix_path(address)
    return None if path is None else f"{path}.stream"


def clear_stale(path: str) -> None:
    """Makes `path` free to bind: removes a socket file without a listener, and makes its folder. Raises Unavailable if
    a process listens there, if the file is no socket, or if the folder is not writable."""
    folder = os.path.dirname(path) or "."
    try:
        os.makedirs(folder, exist_ok=True)
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        mode = None
    except OSError as error:
        raise Unavailable(f"{path}: {error.strerror or error}") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise Unavailable(f"{path}: this process's user may make no file in {folder}")
    if mode is None:
        return
    if not stat.S_ISSOCK(mode):
        raise Unavailable(f"{path} exists and is not a socket")
    for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
        with socket.socket(socket.AF_UNIX, kind) as probe:
            try:
                probe.connect(path)
            except ConnectionRefusedError:
                continue
            except OSError as error:
                if error.errno != errno.EPROTOTYPE:  # a listener of the other kind: the other probe connects
                    raise Unavailable(f"{path}: {error.strerror}") from None
                continue
            raise Unavailable(f"{path}: another process serves it")
    os.unlink(path)


def bound(make: Callable[[], socket.socket], path: str, mode: int) -> socket.socket:
    """A bound socket, made by `make`, that does not listen yet: no process can connect before `mode` holds. A stale
    file is removed first. Raises Unavailable with one line if another process serves the path or it cannot be bound."""
    clear_stale(path)
    here = make()
    try:
        here.bind(path)
        os.chmod(path, mode)
    except OSError as error:
        here.close()
        raise Unavailable(f"{path}: {error.strerror or error}") from None
    return here


@contextmanager
def nobody_elses() -> Iterator[None]:
    """A context in which socket files are bound for their owner alone; their modes may be widened later."""
    before = os.umask(0o177)
    try:
        yield
    finally:
        os.umask(before)
