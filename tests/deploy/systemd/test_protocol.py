"""The real services under a service manager that speaks systemd's protocol: started by READY alone, killed, stopped."""

import contextlib
import tempfile
from pathlib import Path

import pytest

from deploy.local.topology import Local
from services.rpc import rpc
from testing.patience import PATIENCE_S
from testing.ports import free_port
from testing.systems.local import MODELS, catalogue
from tests.deploy.system import complete, ledger
from tests.deploy.systemd.manager import Unit

WATCHDOG_US = 200_000


@pytest.fixture
async def units():
    """Services by name, in the order of their start; ended in the reverse order."""
    async with contextlib.AsyncExitStack() as stack:
        # Unix socket paths are short; pytest's folders are not.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="prism-")))
        local = Local(
            state=folder,
            catalogue=catalogue(folder, "echo"),
            http=f"127.0.0.1:{free_port()}",
            engine="echo",
            devices={"cpu:0": 32 << 20},
        )
        started = {}
        for process in local.processes():
            unit = Unit(process.name, [process.module, *process.arguments], folder, WATCHDOG_US)
            await unit.start()
            started[process.name] = unit
            stack.push_async_callback(unit.close)
        yield local, started


async def test_balloond_killed_under_the_systemd_protocol_restarts_with_the_same_ledger(units):
    local, started = units
    for unit in started.values():
        assert await unit.hears("WATCHDOG") == "1"
        # Who said that it is ready serves.
        assert unit.name == "keeper" or await rpc.healthy(local.unix(unit.name), PATIENCE_S)
    # One too many is never ready, and says why.
    (plan,) = [process for process in local.processes() if process.name == "balloond"]
    second = Unit("second", [plan.module, *plan.arguments], local.state, WATCHDOG_US)
    with pytest.raises(AssertionError, match="second ended with status 1"):
        await second.start()
    assert f"{local.state}/handoff.sock: another process serves it" in [state.get("STATUS") for state in second.said]
    await second.close()

    text = await complete(local.http, MODELS[0])
    before, keeper = await ledger(local.unix("balloond")), started["keeper"].process.pid
    assert before
    await started["balloond"].kill()
    await started["balloond"].start()
    assert await started["balloond"].hears("WATCHDOG") == "1"
    assert await ledger(local.unix("balloond")) == before
    assert started["keeper"].process.pid == keeper and started["keeper"].process.returncode is None
    assert await complete(local.http, MODELS[0]) == text
    for unit in reversed(started.values()):
        assert await unit.stop() == 0, unit.name
        assert any(state.get("STOPPING") == "1" for state in unit.said), unit.name
