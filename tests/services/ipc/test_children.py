import asyncio
import sys

import pytest

from services.ipc import children
from services.runtime import tasks
from testing.patience import PATIENCE_S

FOREVER = (sys.executable, "-c", "import sys; sys.stdin.read()")
PIPES = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}


@pytest.fixture
def created(monkeypatch):
    """Processes that were created, in their order."""
    processes = []
    create = asyncio.create_subprocess_exec

    async def recorded(*command, **options):
        processes.append(await create(*command, **options))
        return processes[-1]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", recorded)
    return processes


@pytest.mark.parametrize("turns", range(6))
async def test_child_start_that_is_cancelled_leaves_no_process(created, turns):
    start = tasks.spawn(children.start(*FOREVER, **PIPES), "start")
    for _ in range(turns):
        await asyncio.sleep(0)
    start.cancel()
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(asyncio.CancelledError):
            await start
    assert all(process.returncode is not None for process in created)


async def test_child_start_of_a_missing_program_raises_an_os_error():
    with pytest.raises(FileNotFoundError):
        await children.start("/nowhere/program")


async def test_child_end_waits_for_its_process_and_may_be_repeated():
    process = await children.start(*FOREVER, **PIPES)
    await children.end(process)
    assert process.returncode == -9
    await children.end(process)
