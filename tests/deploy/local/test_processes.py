"""What a supervised process ends with, and what is done then."""

import asyncio
import os

import pytest

from deploy.local.processes import SupervisedProcess, recent
from deploy.local.topology import Process
from testing.patience import PATIENCE_S

DIES = """
import os, socket, sys
path, refuses = sys.argv[1:3]
if os.path.exists(refuses):
    sys.exit(f"{os.getpid()}: there is no keys.toml")
listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
listening.bind(path)
listening.listen()
while True:
    there, _ = listening.accept()
    there.close()
"""


@pytest.fixture
async def started(tmp_path):
    """A process that is up, what was said of it, and the file with which it ends at once."""
    (tmp_path / "dies.py").write_text(DIES)
    said = asyncio.Queue()
    path, refuses = str(tmp_path / "s.sock"), tmp_path / "refuses"
    spec = Process("gateway", "dies", (path, str(refuses)), path, under=("env", f"PYTHONPATH={tmp_path}"))
    supervised = SupervisedProcess(spec, tmp_path, said.put_nowait)
    await supervised.start()
    yield supervised, said, refuses
    await supervised.kill()


async def test_reason_of_a_process_that_dies_again_and_again_is_said_once_with_growing_pauses(started):
    supervised, said, refuses = started
    refuses.touch()
    supervised._child.kill()
    async with asyncio.timeout(PATIENCE_S):
        lines = [await said.get() for _ in range(4)]
    assert lines[0] == "gateway was killed by SIGKILL; starting it again in 0.2 s"
    assert lines[1].startswith("gateway ended with status 1; starting it again in 0.4 s:\n")
    assert lines[1].endswith(": there is no keys.toml")
    assert [line.splitlines() for line in lines[2:]] == [
        ["gateway ended with status 1; starting it again in 0.8 s"],
        ["gateway ended with status 1; starting it again in 1.6 s"],
    ]


async def test_lines_from_long_before_an_end_are_no_reason_for_it(started):
    supervised, said, _ = started
    supervised.log_path.write_text('{"level": "warning", "timestamp": "2020-01-01T00:00:00.000000Z"}\nan old word\n')
    os.utime(supervised.log_path, (0, 0))
    supervised._child.kill()
    async with asyncio.timeout(PATIENCE_S):
        assert await said.get() == "gateway was killed by SIGKILL; starting it again in 0.2 s"


def line(second):
    return f'{{"event": "e", "timestamp": "1970-01-01T00:01:{second:02}.000000Z"}}'


@pytest.mark.parametrize(
    ("lines", "written", "since", "found"),
    [
        pytest.param([line(1), line(2), line(3)], 63, 62, [line(2), line(3)], id="dated"),
        pytest.param([line(1), "trace", "back"], 63, 62, ["trace", "back"], id="undated ones are as old as the log"),
        pytest.param([line(1), "trace", line(2)], 99, 90, [], id="or as the next that has a date"),
        pytest.param(["trace", "back"], 50, 62, [], id="an old log"),
        pytest.param(["x", '{"timestamp": "?"}', "y"], 63, 62, ["x", '{"timestamp": "?"}', "y"], id="no date"),
        pytest.param([], 63, 62, [], id="none"),
    ],
)
def test_recent_lines_of_a_log_are_those_written_since_then(lines, written, since, found):
    assert recent(lines, written, since) == found


async def test_process_is_not_started_after_its_end_in_the_pause_before(started):
    supervised, said, refuses = started
    refuses.touch()
    supervised._child.kill()
    async with asyncio.timeout(PATIENCE_S):
        await said.get()
        await supervised.end()
    assert supervised._watch.done() and supervised._child.returncode is not None
