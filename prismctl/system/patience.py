"""Bounds the waiting of a command: it goes on only while the processes answer that its operation needs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import typer

from services.errors import Unavailable
from services.runtime import tasks

PATIENCE = 2
"""Multiple of the wait for a service that does not answer: for so long one may be silent while an operation is under
way. It is named after the first wait."""
_LOOK_S = 0.5
"""Seconds between two checks of a process."""


@dataclass(frozen=True)
class RequiredProcess:
    """A process that has to answer."""

    name: str
    """Name of the process in sentences: "the loader"."""
    address: str
    problem: Callable[[float], Awaitable[str]]
    """Checks the process, for so many seconds at most; returns an empty text if it answers, else what is known of why
    it does not."""
    look: str = ""
    """What a person should look at if it does not answer."""

    def silent(self, why: str) -> str:
        """The sentence that the process does not answer, and why."""
        return f"{self.name} at {self.address} does not answer; {why}" + (f"; {self.look}" if self.look else "")


@asynccontextmanager
async def attending(asked: Sequence[RequiredProcess], wait_s: float, *, look_s: float = _LOOK_S) -> AsyncIterator[None]:
    """A context in which these processes are checked every `look_s` seconds. One that is silent for `wait_s` seconds is
    named on stderr; one that is silent for PATIENCE times as long ends the block. Raises Unavailable with its name
    then."""
    silent: list[str] = []
    loop = asyncio.get_running_loop()

    def give_up(said: str) -> None:
        silent.append(said)
        limit.reschedule(loop.time())

    try:
        async with asyncio.timeout(None) as limit:
            watching = [tasks.spawn(_watch(each, wait_s, give_up, look_s), f"attend {each.name}") for each in asked]
            try:
                yield
            finally:
                await tasks.cancel(*watching)
    except TimeoutError:
        if not silent:
            raise
        raise Unavailable(silent[0]) from None


async def _watch(asked: RequiredProcess, wait_s: float, give_up: Callable[[str], None], look_s: float) -> None:
    loop = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(look_s)
        until = loop.time() + PATIENCE * wait_s
        told = False
        while problem := await asked.problem(min(wait_s, max(0.0, until - loop.time()))):
            if loop.time() >= until:
                give_up(asked.silent(problem))
                return
            if not told:
                typer.echo(f"prismctl: {asked.silent(problem)}; waiting for it", err=True)
            told = True
            await asyncio.sleep(min(look_s, max(0.0, until - loop.time())))
