import asyncio

import pytest

from balloond.client import BalloondClient
from services.errors import PrismError, TimedOut, Unavailable
from testing.patience import PATIENCE_S


async def test_client_watch_goes_on_over_a_restart_and_reports_the_loss(node):
    async with node.client() as client, asyncio.timeout(PATIENCE_S):
        states = client.watch()
        assert (await anext(states)).node == "test"
        node.kill(node.balloond)
        while await anext(states) is not None:
            pass
        await node.start_balloond()
        assert (await anext(states)).node == "test"
        await states.aclose()


async def test_a_call_waits_for_a_balloond_that_comes_back(node):
    node.kill(node.balloond)
    async with node.client() as client:
        asking = asyncio.gather(client.inspect(), client.events())
        await asyncio.sleep(0)
        await node.start_balloond()
        state, events = await asking
    assert state.node == "test"
    assert events == []


async def test_client_call_to_a_balloond_that_stays_away_raises_a_prism_error(tmp_path):
    client = BalloondClient(f"unix:{tmp_path / 'nobody.sock'}")
    with pytest.raises(PrismError) as error:
        await client.make_room("cpu:0", "a", bytes=1, may_retract=False, hold_ms=0, timeout_s=0.05)
    assert isinstance(error.value, TimedOut | Unavailable)
    await client.close()


async def test_client_time_out_names_the_balloond(tmp_path):
    client = BalloondClient(f"unix:{tmp_path}/nobody")
    with pytest.raises(TimedOut, match=f"balloond at unix:{tmp_path}/nobody did not answer in time"):
        await client.inspect(timeout_s=0.0)
    await client.close()
