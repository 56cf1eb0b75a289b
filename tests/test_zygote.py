"""A fork in place of a new interpreter cannot be told from it, but by the modules that it has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from deploy.local.processes import die_with_parent
from testing import zygote

COMMAND = (sys.executable, "-m", "tests.told")
pytestmark = pytest.mark.skipif(subprocess._fork_exec is zygote._execute, reason="tests execute all processes here")


def ended(*arguments: str, **options: Any) -> tuple[Any, str, int]:
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, input="a line", **options)
    return json.loads(done.stdout), done.stderr, done.returncode


@pytest.mark.parametrize("status", ["0", "3"])
def test_a_fork_is_started_as_a_program_that_is_executed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with open("kept", "w") as kept, open("not kept", "w"):
        options: dict[str, Any] = {
            "cwd": zygote.ROOT,
            "env": {**os.environ, "ONE": "é = =", "PYTHONUNBUFFERED": "1"},
            "pass_fds": [kept.fileno()],
            "start_new_session": True,
            "preexec_fn": die_with_parent,
        }
        with zygote.executing():
            executed = ended(status, "--long option", **options)
        assert ended(status, "--long option", **options) == executed
    told, said, ended_with = executed
    assert (said, ended_with, told["leads"]) == ("to the other\n", int(status), True)
    assert list(told["descriptors"].values()) == [str(tmp_path / "kept")]


def test_a_fork_has_the_environment_and_parent_of_its_caller() -> None:
    told, said, status = ended("0")
    assert told["environment"] == dict(os.environ) and (said, status) == ("to the other\n", 0)
    assert told["parent"] == os.getpid() and not told["leads"]


def test_a_fork_is_waited_for_and_killed_as_a_child() -> None:
    with subprocess.Popen([*COMMAND, "0"], stdin=subprocess.PIPE) as process:
        assert process.poll() is None
        process.kill()
    assert process.returncode == -9


def test_command_that_the_zygote_does_not_serve_is_executed(monkeypatch: pytest.MonkeyPatch) -> None:
    executed: list[Any] = []
    original = zygote._execute
    assert original is not None

    def execute(*given: Any) -> int:
        executed.append(given[0])
        return int(original(*given))

    ended("0")  # the zygote is there
    monkeypatch.setattr(zygote, "_execute", execute)
    ended("0")
    assert not executed
    for command in (["true"], [sys.executable, "-c", ""], ["env", *COMMAND, "0"]):
        subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=True)
    subprocess.run([*COMMAND, "0"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, umask=0o77)
    subprocess.run([*COMMAND, "0"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, preexec_fn=lambda: None)
    ended("0", env={**os.environ, "PYTHONHASHSEED": "1"})
    assert len(executed) == 6
    with zygote.executing():
        ended("0")


def test_fork_after_the_zygote_died_still_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zygote, "_zygotes", {})
    ended("0")
    (one,) = zygote._zygotes.values()
    assert one is not None
    process = one._process
    assert isinstance(process, subprocess.Popen) and zygote.is_one(process.pid)
    process.kill()
    process.wait()
    assert ended("0")[2] == 0


def test_zygote_is_not_started_from_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its children would end with the thread."""
    monkeypatch.setattr(zygote, "_zygotes", {})
    said: list[int] = []
    thread = threading.Thread(target=lambda: said.append(ended("0")[2]))
    thread.start()
    thread.join()
    assert said == [0] and not zygote._zygotes
