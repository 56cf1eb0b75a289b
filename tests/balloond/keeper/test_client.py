import os
import signal

import pytest

from balloond.keeper.client import KeeperClient
from protos import keeper_pb2
from services.errors import Unavailable
from tests.balloond.conftest import TIMEOUT_S


def kept(id, fd=None):
    return keeper_pb2.Record(id=id, owner="o", has_descriptor=fd is not None), fd


async def connected(node, everything):
    client = KeeperClient(node.keeper_path, "o")
    held = await client.start(10)
    client.follow(everything)
    return client, held


async def names(node):
    """What the keeper holds, by another connection."""
    client = KeeperClient(node.keeper_path, "o")
    held = await client.start(10)
    for _, fd in held:
        if fd >= 0:
            os.close(fd)
    await client.close()
    return {record.id: fd >= 0 for record, fd in held}


@pytest.fixture
async def keeper(tmp_path):
    from tests.balloond.conftest import Node

    node = Node(tmp_path)
    await node.start_keeper()
    yield node
    node.end()


async def test_keeper_client_kept_records_stay_and_forgotten_ones_do_not(keeper):
    fds = [os.memfd_create("x") for _ in range(300)]
    client, _ = await connected(keeper, tuple)
    await client.keep([kept(f"e{i}", fd) for i, fd in enumerate(fds)] + [kept("lease")])
    await client.forget([f"e{i}" for i in range(299)])
    await client.keep([kept("last")])
    assert await names(keeper) == {"e299": True, "lease": False, "last": False}
    await client.close()


async def test_keeper_client_sends_everything_to_a_keeper_that_restarted(keeper):
    fd = os.memfd_create("x")
    world = [kept("e1", fd), kept("lease")]
    client, _ = await connected(keeper, lambda: world)
    await client.keep(world)
    keeper.kill(keeper.keeper)
    await keeper.start_keeper()
    await client.keep(world)
    assert await names(keeper) == {"e1": True, "lease": False}
    await client.close()


async def test_keeper_client_keep_waits_for_a_restart_and_survives_descriptors_closed_meanwhile(keeper):
    world = []
    client, _ = await connected(keeper, lambda: world)
    keeper.kill(keeper.keeper)
    fd = os.memfd_create("x")
    world.append(kept("e1", fd))
    keeping = client.keep(list(world))
    # Freed while the keeper was away: neither in `everything` nor open any more.
    world[:] = [kept("lease")]
    os.close(fd)
    await keeper.start_keeper()
    await keeping
    assert await names(keeper) == {"lease": False}
    await client.close()


async def test_keeper_client_records_forgotten_while_disconnected_are_forgotten_afterwards(keeper):
    world = [kept("a"), kept("b")]
    client, _ = await connected(keeper, lambda: world)
    await client.keep(world)
    client._connection.close()
    del world[0]
    client.forget_soon(["a"])
    await client.keep(world)
    assert await names(keeper) == {"b": False}
    await client.close()


async def test_keeper_client_forget_waits_for_a_keeper_that_is_away(keeper):
    world = [kept("a"), kept("b")]
    client, _ = await connected(keeper, lambda: world)
    await client.keep(world)
    keeper.kill(keeper.keeper)
    del world[0]
    forgetting = client.forget(["a"])
    await keeper.start_keeper()
    await forgetting
    assert await names(keeper) == {"b": False}
    await client.close()


async def test_a_keeper_that_stands_still_or_is_gone_does_not_answer_and_a_new_one_does(keeper):
    client, _ = await connected(keeper, tuple)
    assert await client.answers(TIMEOUT_S)
    keeper.keeper.send_signal(signal.SIGSTOP)
    assert not await client.answers(0.05)
    keeper.keeper.send_signal(signal.SIGCONT)
    assert await client.answers(TIMEOUT_S)
    keeper.kill(keeper.keeper)
    assert not await client.answers(0.05)
    await keeper.start_keeper()
    assert await client.answers(TIMEOUT_S)
    await client.close()


async def test_keeper_client_without_a_keeper_fails_to_start_in_one_line(tmp_path):
    with pytest.raises(Unavailable, match="no keeper answers"):
        await KeeperClient(str(tmp_path / "none.sock"), "o").start(0.05)
