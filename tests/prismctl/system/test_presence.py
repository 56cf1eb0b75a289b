"""What is told of a service that does not answer, with real sockets and processes."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile

import pytest

from prismctl.system import presence
from services.ipc import seqpacket
from services.rpc import rpc
from testing.ports import free_port

SERVER = """
import asyncio, sys
from services.rpc import rpc
async def main():
    server = rpc.Server(sys.argv[1])
    await server.start()
    await server.set_serving(True)
    print("ready", flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


@contextlib.contextmanager
def process(*arguments):
    """One that has said that it is ready."""
    there = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE)
    try:
        assert there.stdout.readline() == b"ready\n"
        yield there
    finally:
        there.kill()
        there.wait()
        there.stdout.close()


async def test_server_that_does_not_serve_yet_is_waited_for_and_has_no_problem_once_it_does(tmp_path):
    server = rpc.Server(f"unix:{tmp_path}/s")
    await server.start()
    assert "it is there and does not serve" in await presence.problem(server.address, 0.2)
    asking = asyncio.get_running_loop().create_task(presence.problem(server.address, 60.0))
    await asyncio.sleep(0)
    await server.set_serving(True)
    assert await asking == ""
    await server.stop(0)


async def test_stopped_process_is_named_with_the_command_that_continues_it(tmp_path):
    address = f"unix:{tmp_path}/s"
    with process("-c", SERVER, address) as there:
        assert await presence.problem(address, 60.0) == ""
        there.send_signal(signal.SIGSTOP)
        stopped = f"its process {there.pid} is stopped, kill -CONT {there.pid} lets it go on"
        assert await presence.problem(address, 0.2) == stopped
        there.send_signal(signal.SIGCONT)
        assert await presence.problem(address, 60.0) == ""
    assert await presence.problem(address, 0.0) == "no process listens there: it has ended"


async def test_keeper_that_is_stopped_or_gone_has_a_problem(tmp_path):
    path = f"{tmp_path}/k"
    assert await presence.keeper_problem(path, 0.0) == presence.NO_SOCKET
    there = subprocess.Popen([sys.executable, "-m", "balloond.keeper", "--socket", path])
    try:
        assert await presence.keeper_problem(path, 60.0) == ""
        there.send_signal(signal.SIGSTOP)
        assert f"kill -CONT {there.pid} lets it go on" in await presence.keeper_problem(path, 0.2)
        there.send_signal(signal.SIGCONT)
        assert await presence.keeper_problem(path, 60.0) == ""
    finally:
        there.kill()
        there.wait()
    assert await presence.keeper_problem(path, 0.0) == "no process listens there: it has ended"


async def test_listener_that_accepts_and_stays_silent_is_reported_with_its_process(tmp_path):
    path = f"{tmp_path}/s"
    with socket.socket(socket.AF_UNIX) as here:
        here.bind(path)
        here.listen()
        silent = f"it is connected and silent: its process {os.getpid()} hangs, or is very busy"
        assert await presence.problem(f"unix:{path}", 0.0) == silent
        assert await presence.why(f"unix:{path}", connected="it refused") == "it refused"
    with seqpacket.listen(f"{tmp_path}/k"):
        assert await presence.why(f"{tmp_path}/k") == silent


def test_socket_of_another_user_is_reported_as_such():
    """Whoever runs this: root becomes somebody else for a moment."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as here:
        os.chmod(folder, 0o755)
        here.bind(f"{folder}/s")
        here.listen()
        os.chmod(f"{folder}/s", 0)
        me = os.geteuid()
        os.seteuid(me or 65534)
        try:
            told = presence._at_socket(f"{folder}/s", "")
        finally:
            os.seteuid(me)
    assert told.startswith("this user may not use the socket of ")


async def test_tcp_address_is_reported_as_refused_or_silent():
    refused = f"127.0.0.1:{free_port()}"
    assert await presence.problem(refused, 0.0) == "connection refused"
    with socket.create_server(("127.0.0.1", 0)) as here:
        silent = f"127.0.0.1:{here.getsockname()[1]}"
        assert "it is connected and silent" in await presence.problem(silent, 0.0)


@pytest.mark.parametrize("name", ["file", "folder"])
async def test_path_that_is_no_socket_is_reported_as_having_no_listener(tmp_path, name):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    assert await presence.why(f"unix:{tmp_path}/{name}") == "no process listens there: it has ended"
