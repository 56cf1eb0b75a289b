"""Waiting for no longer than those answer without whom what was asked for does not come to its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import typer

from services.errors import Unavailable
from services.runtime import tasks

PATIENCE = 2
"""Times the wait for a service that does not answer: so long one may be silent while something is under way. It is
named after the first."""
_LOOK_S = 0.5


@dataclass(frozen=True)
class RequiredProcess:
    """A process that has to answer."""

    name: str
    """As sentences call it: "the loader"."""
    address: str
    problem: Callable[[float], Awaitable[str]]
    """Asks it, for so many seconds at most: empty if it answers, else what can be told of why it does not."""
    look: str = ""
    """What to look at then."""

    def silent(self, why: str) -> str:
        """Says that it does not answer."""
        return f"{self.name} at {self.address} does not answer; {why}" + (f"; {self.look}" if self.look else "")


@asynccontextmanager
async def attending(asked: Sequence[RequiredProcess], wait_s: float) -> AsyncIterator[None]:
    """While this is open, these are asked again and again whether they are there. Who is silent for `wait_s` is named
    on stderr; who is for PATIENCE times as long ends the block. Raises Unavailable then, with its name."""
    silent: list[str] = []
    loop = asyncio.get_running_loop()

    def give_up(said: str) -> None:
        silent.append(said)
        limit.reschedule(loop.time())

    try:
        async with asyncio.timeout(None) as limit:
            watching = [tasks.spawn(_watch(each, wait_s, give_up), f"attend {each.name}") for each in asked]
            try:
                yield
            finally:
                await tasks.cancel(*watching)
    except TimeoutError:
        if not silent:
            raise
        raise Unavailable(silent[0]) from None


async def _watch(asked: RequiredProcess, wait_s: float, give_up: Callable[[str], None]) -> None:
    loop = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(_LOOK_S)
        until = loop.time() + PATIENCE * wait_s
        told = False
        while problem := await asked.problem(min(wait_s, max(0.0, until - loop.time()))):
            if loop.time() >= until:
                give_up(asked.silent(problem))
                return
            if not told:
                typer.echo(f"prismctl: {asked.silent(problem)}; waiting for it", err=True)
            told = True
            await asyncio.sleep(min(_LOOK_S, max(0.0, until - loop.time())))
