"""Every way into a running system, a few hundred cases each; benchmarks/fuzz.py does more."""

from __future__ import annotations

import pytest
import pytest_asyncio

from testing.fuzz.outcome import SurfaceOutcome
from testing.fuzz.surfaces import SURFACES
from testing.fuzz.system import attack, fuzzed

pytestmark = pytest.mark.asyncio(loop_scope="module")
CASES = 300
DESCRIBED = 32
SHORT = [name for name in SURFACES if "with keys" not in name and not name.startswith("too long")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running():
    async with fuzzed() as it:
        yield it


@pytest.mark.parametrize("name", SHORT)
async def test_fuzzed_requests_are_refused_and_the_system_keeps_serving(running, name):
    async def run(outcome: SurfaceOutcome) -> None:
        await SURFACES[name](running, DESCRIBED if "described" in name else CASES, 1, outcome)

    outcome = await attack(running, name, run)
    assert outcome.cases >= (DESCRIBED if "described" in name else CASES) // 2
    assert (outcome.faults, outcome.hangs) == ([], 0)
