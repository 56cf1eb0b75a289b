"""Waiting no longer than others answer. They are functions here; real processes are stopped in test_live.py."""

import asyncio
from functools import partial

import pytest

from prismctl.system import patience
from prismctl.system.patience import RequiredProcess
from services.errors import Unavailable
from testing.patience import PATIENCE_S

attending = partial(patience.attending, look_s=0.0)


def asked(*problems, look=""):
    """Says these one after the other, the last for ever."""
    left = list(problems)

    async def problem(wait_s):
        return left.pop(0) if len(left) > 1 else left[0]

    return RequiredProcess("the loader", "unix:/l", problem, look)


async def test_work_ends_normally_while_all_processes_answer():
    async with attending([asked("")], 0.01):
        assert await asyncio.sleep(0, "done") == "done"


async def test_silent_process_ends_the_work_and_is_named_with_its_log(capsys):
    with pytest.raises(Unavailable) as error:
        async with asyncio.timeout(PATIENCE_S), attending([asked("it hangs", look="its log is l.log")], 0.001):
            await asyncio.Event().wait()
    said = "the loader at unix:/l does not answer; it hangs; its log is l.log"
    assert str(error.value) == said
    assert f"prismctl: {said}; waiting for it\n" in capsys.readouterr().err


async def test_silent_process_is_waited_for_at_most_twice_the_given_time(monkeypatch):
    loop, waited = asyncio.get_running_loop(), []
    now = loop.time
    monkeypatch.setattr(loop, "time", lambda: now() + sum(waited))

    async def problem(wait_s):
        waited.append(wait_s)
        return "it hangs"

    with pytest.raises(Unavailable):
        async with attending([RequiredProcess("the loader", "unix:/l", problem)], 3600.0):
            await asyncio.Event().wait()
    assert sum(waited) <= 2 * 3600.0 and waited[0] == 3600.0


async def test_silent_process_that_answers_again_is_waited_for(capsys):
    silent = asked("it hangs", "it hangs", "")
    heard = asyncio.Event()
    answers = silent.problem

    async def problem(wait_s):
        why = await answers(wait_s)
        if not why:
            heard.set()
        return why

    async with (
        asyncio.timeout(PATIENCE_S),
        attending([RequiredProcess("the loader", "unix:/l", problem)], 60.0),
    ):
        await heard.wait()
    assert capsys.readouterr().err.count("waiting for it") == 1


async def test_timeout_of_the_work_is_raised_as_such():
    with pytest.raises(TimeoutError):
        async with attending([asked("")], 0.01), asyncio.timeout(0):
            await asyncio.Event().wait()


async def test_error_of_the_work_is_raised_unchanged():
    with pytest.raises(KeyError):
        async with attending([asked("it hangs")], 60.0):
            raise KeyError
