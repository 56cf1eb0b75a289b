import asyncio
import contextlib
import os
import socket

import pytest

from services.runtime import notify, tasks
from testing.patience import PATIENCE_S


@pytest.fixture(params=["path", "abstract"])
def manager(request, tmp_path):
    """A service manager's socket and how the environment names it."""
    name = str(tmp_path / "notify") if request.param == "path" else f"@prism-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(name.replace("@", "\0", 1) if name.startswith("@") else name)
        sock.settimeout(PATIENCE_S)
        yield sock, name


def test_notify_messages_arrive_with_one_variable_per_line(manager):
    sock, name = manager
    said = notify.Manager({"NOTIFY_SOCKET": name})
    said.ready("serving on unix:/x")
    said.stopping()
    said.failed("two\nlines")
    assert [sock.recv(1000) for _ in range(3)] == [
        b"READY=1\nSTATUS=serving on unix:/x",
        b"STOPPING=1\nSTATUS=stopping",
        b"STATUS=two lines",
    ]


def test_notify_variables_are_removed_from_the_environment_of_children():
    environment = {"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "1", "WATCHDOG_PID": "1", "HOME": "/"}
    notify.Manager(environment)
    assert environment == {"HOME": "/"}


@pytest.mark.parametrize(
    "environment",
    [{}, {"WATCHDOG_USEC": "1000"}, {"NOTIFY_SOCKET": "/x"}, {"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "soon"},
     {"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "1000", "WATCHDOG_PID": "1"}],
)  # fmt: skip
async def test_notify_watchdog_not_configured_for_this_process_ends_at_once(environment):
    await notify.Manager(environment).beat()


def test_notify_without_a_manager_or_with_one_that_is_gone_raises_nothing(tmp_path):
    notify.Manager({}).ready("")
    notify.Manager({"NOTIFY_SOCKET": str(tmp_path / "gone")}).ready("")


async def test_notify_watchdog_stops_while_the_event_loop_is_blocked(manager):
    sock, name = manager
    sock.setblocking(False)
    beat = asyncio.get_running_loop().create_task(
        notify.Manager({"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "1000"}).beat()
    )
    for _ in range(3):
        assert await asyncio.get_running_loop().sock_recv(sock, 1000) == b"WATCHDOG=1"
    with contextlib.suppress(BlockingIOError):
        while True:
            sock.recv(1000)
    # This call keeps the loop from turning, for a hundred intervals.
    sock.settimeout(0.1)
    with pytest.raises(TimeoutError):
        sock.recv(1000)
    sock.setblocking(False)
    assert await asyncio.get_running_loop().sock_recv(sock, 1000) == b"WATCHDOG=1"
    await tasks.cancel(beat)
