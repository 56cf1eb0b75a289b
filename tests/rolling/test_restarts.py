"""Each process is stopped and started again while streams run: clients behind a balancer see none of it but a pause.
The figures are `python -m benchmarks.rolling`."""

import time

import pytest
import pytest_asyncio

from tests.chaos import faults
from tests.chaos.load import steady
from tests.chaos.world import chaos, watched

pytestmark = pytest.mark.asyncio(loop_scope="module")
STREAMS = 18
"""One for each gateway, model and half of a stream's ends."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running():
    async with chaos(STREAMS, step_ms=30) as it:
        it.load.balanced = True
        await it.prepare()
        yield it


@pytest.mark.parametrize("process", ["gateway", "gpu_scheduler", "placement", "loader", "balloond", "keeper"])
async def test_a_process_that_is_restarted_costs_no_stream(running, process):
    async with watched(running) as books, steady(running.load) as load:
        taken = running.taken_up_again()
        replaced = await faults.restarted(process)(running)
        await running.full_service(time.monotonic(), replaced)
    assert (load.failures, load.wrong, load.ended >= STREAMS) == ([], [], True)
    assert books.looks and not books.unequal
    if process == "gpu_scheduler":
        # Its models went to the other group while it waited.
        log = running.local.state / "logs" / f"{next(iter(replaced))}.log"
        assert '"left"' in log.read_text() or '"drain took too long"' in log.read_text()
    else:
        assert running.taken_up_again() == taken
