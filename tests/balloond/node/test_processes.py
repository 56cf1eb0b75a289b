import asyncio
import errno
import os
import select
import subprocess
import sys

import pytest

from balloond.node import processes
from balloond.node.processes import ProcessIdentity
from testing import descriptors
from testing.patience import PATIENCE_S


def test_a_process_is_its_pid_and_its_start():
    me = ProcessIdentity(os.getpid(), processes.started(os.getpid()))
    assert me.started > 0
    assert str(me) == f"{me.pid}-{me.started}"


def test_a_pidfd_is_readable_when_the_process_is_dead():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    pidfd = processes.watch(ProcessIdentity(child.pid, processes.started(child.pid)))
    assert select.select([pidfd], [], [], 0)[0] == []
    child.kill()
    assert select.select([pidfd], [], [], 20)[0] == [pidfd]
    os.close(pidfd)
    child.wait()
    child.stdin.close()


def test_process_with_the_same_pid_and_another_start_is_not_watched():
    with pytest.raises(ProcessLookupError, match="another process now"):
        processes.watch(ProcessIdentity(os.getpid(), 1))


def test_a_process_that_is_gone_is_not_found():
    child = subprocess.Popen(["true"])
    child.wait()
    with pytest.raises(ProcessLookupError):
        processes.started(child.pid)
    with pytest.raises(ProcessLookupError):
        processes.watch(ProcessIdentity(child.pid, 1))


def test_start_of_a_process_with_parentheses_and_spaces_in_its_name_is_read(tmp_path):
    odd = tmp_path / "a) b (c"
    odd.symlink_to("/bin/cat")
    child = subprocess.Popen([odd], stdin=subprocess.PIPE)
    assert processes.started(child.pid) >= processes.started(os.getpid())
    child.stdin.close()
    child.wait()


async def test_death_watch_reports_a_watched_death_once_and_a_forgotten_one_never():
    told = []
    died = asyncio.Event()
    deaths = processes.DeathWatch()
    children = [subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for _ in range(2)]
    for name, child in zip(("known", "forgotten"), children, strict=True):
        deaths.watch(
            name, ProcessIdentity(child.pid, processes.started(child.pid)), lambda name=name: told.append(name)
        )
    deaths.forget("forgotten")
    assert "known" in deaths and "forgotten" not in deaths
    children[1].kill()
    children[1].wait()
    with pytest.raises(ProcessLookupError):
        deaths.watch("late", ProcessIdentity(children[1].pid, 1), died.set)
    assert "late" not in deaths
    deaths.watch("known", ProcessIdentity(children[0].pid, processes.started(children[0].pid)), died.set)
    children[0].kill()
    async with asyncio.timeout(PATIENCE_S):
        await died.wait()
    assert told == []
    assert "known" not in deaths
    children[0].wait()
    for child in children:
        child.stdin.close()


@pytest.mark.parametrize("what", [(os, "pidfd_open"), (processes, "started")])
async def test_death_watch_without_descriptors_reports_no_death_and_leaks_none(monkeypatch, what):
    me = ProcessIdentity(os.getpid(), processes.started(os.getpid()))
    deaths = processes.DeathWatch()
    deaths.watch("me", me, lambda: None)
    before = descriptors.held("pidfd")

    def none_left(_pid):
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as while_short:
        while_short.setattr(*what, none_left)
        with pytest.raises(OSError, match="Too many") as raised:
            deaths.watch("me", me, lambda: None)
    assert not isinstance(raised.value, ProcessLookupError)
    assert "me" in deaths, "what was watched before still is"
    assert descriptors.held("pidfd") == before
    deaths.forget("me")
