"""Faults under 50 streams: none of these may cost a stream, change a token, or leave memory behind. The whole list,
with figures, is `python -m benchmarks.chaos`."""

import pytest
import pytest_asyncio

from testing import faketime
from testing.chaos import faults
from testing.chaos.world import chaos

pytestmark = pytest.mark.asyncio(loop_scope="module")
STREAMS = 50


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running():
    async with chaos(STREAMS, patient=True) as it:
        yield it


@pytest.mark.parametrize("process", ["gpu_scheduler", "balloond", "gateway"])
async def test_a_killed_process_costs_no_stream_but_a_gateways_own(running, process):
    outcome = await faults.suffer(running, faults.killed(process))
    assert (outcome.failed, outcome.wrong, outcome.why) == (0, 0, ())
    # One that came while it died is one more.
    assert (outcome.failed_by_own_gateway >= STREAMS // 2) == (process == "gateway")
    assert outcome.ended >= STREAMS and outcome.ledger_looks
    assert (outcome.ledger_unequal, outcome.leaked_bytes) == (0, 0)


async def test_the_time_of_day_may_jump_by_days_under_streams():
    if not faketime.INSTALLED:
        pytest.skip("libfaketime is not installed")
    async with chaos(12, clock=True, patient=True) as it:
        outcome = await faults.suffer(it, faults.clock_jumps)
    assert (outcome.failed, outcome.wrong, outcome.why) == (0, 0, ())
    assert (outcome.ledger_unequal, outcome.leaked_bytes) == (0, 0)
