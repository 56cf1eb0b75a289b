import asyncio
import subprocess
import sys

import pytest

from services.ipc import seqpacket
from services.rpc import rpc
from testing.ports import free_port
from testing.systems.local import ROOT


def ask(*arguments):
    done = subprocess.run(
        [sys.executable, "-m", "deploy.healthy", *arguments], cwd=ROOT, capture_output=True, text=True
    )
    return done.returncode, done.stderr.strip()


async def asked(*arguments):
    return await asyncio.to_thread(ask, *arguments)


async def asked_again(*arguments):
    """The first answer that is yes, or the last: who is busy may need longer than one question waits."""
    for _ in range(5):
        answer = await asked(*arguments)
        if answer[0] == 0:
            break
    return answer


async def test_a_server_is_healthy_while_it_serves(tmp_path):
    address = f"unix:{tmp_path}/s.sock"
    server = rpc.Server(address)
    await server.start()
    assert await asked(address) == (1, f"{address} is not healthy")
    await server.set_serving(True)
    assert await asked_again(address) == (0, "")
    await server.stop(0)


async def test_a_socket_that_is_served_is_healthy(tmp_path):
    path = f"{tmp_path}/k.sock"
    assert await asked(path) == (1, f"{path} is not healthy")

    async def on_connect(connection):
        while await connection.recv() is not None:
            pass

    server = seqpacket.SeqpacketServer(path, on_connect)
    server.start()
    assert await asked_again(path) == (0, "")
    await server.stop()


def test_a_socket_whose_owner_hangs_is_not_healthy(tmp_path):
    path = f"{tmp_path}/k.sock"
    with seqpacket.listen(path):
        assert ask(path) == (1, f"{path} is not healthy")


def test_address_on_which_no_process_listens_is_not_healthy(tmp_path):
    for address in (f"unix:{tmp_path}/none.sock", f"127.0.0.1:{free_port()}"):
        assert ask(address) == (1, f"{address} is not healthy")


@pytest.mark.parametrize("arguments", [(), ("placement",), ("/a", "/b")])
def test_malformed_address_of_a_health_check_is_one_line(arguments):
    status, said = ask(*arguments)
    assert status == 1 and said.startswith("usage: ") and "\n" not in said
