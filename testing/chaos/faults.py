"""What happens to a system under load, and what is reported of it.

A fault is an async function of the world that returns when it is over: for a killed process at once, for a stopped one
when it goes on. It returns the processes that must be replaced, with the pids they had.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from testing.chaos.load import steady
from testing.chaos.world import Chaos, busiest_engine, memory_bytes, watched
from testing.patience import PATIENCE_S

STOPPED_S = 5.0
_DAY_S = 86400
STANDS_STILL_S = 20.0
"""After which somebody kills what stands still."""
Replaced = dict[str, int]
Fault = Callable[[Chaos], Awaitable[Replaced]]


@dataclass(frozen=True)
class Outcome:
    """What clients and the ledger saw of one fault."""

    failed: int
    """Streams that ended with an error, or not at all; without those of a gateway that was killed."""
    failed_by_own_gateway: int
    wrong: int
    """Streams that said something else than undisturbed."""
    ended: int
    """Streams that said all of it."""
    taken_up_again: int
    """Streams that lost their place after their first token and went on, as the gateways' logs say."""
    refused: int
    """Connections not taken, and tried again."""
    longest_pause_s: float
    lasted_s: float
    """The fault: of a restart, until the process had ended."""
    full_service_s: float
    """From the end of the fault."""
    leaked_bytes: int
    """Taken by the ledger's or by the kernel's word when nothing is up any more, the larger."""
    spare_refused: int
    """Requests for the model that was away that got an error; asked again."""
    ledger_looks: int
    ledger_unequal: int
    gateways_grew_bytes: int
    """Most that a gateway's memory had grown to at the end of the fault."""
    why: tuple[str, ...]
    """The first reasons for what is counted above."""


async def suffer(it: Chaos, fault: Fault) -> Outcome:
    """One fault under the steady load."""
    await it.prepare()
    it.spare_errors.clear()
    gateways = [it.system.running[name].pid for name in it.bases]
    async with watched(it) as books:
        async with steady(it.load) as load:
            taken = it.taken_up_again()
            before = [memory_bytes(pid) for pid in gateways]
            began = time.monotonic()
            async with asyncio.timeout(PATIENCE_S):
                replaced = await fault(it)
            over = time.monotonic()
            alive = [
                (pid, was) for pid, was in zip(gateways, before, strict=True) if os.path.exists(f"/proc/{pid}/maps")
            ]
            grew = max([0, *(memory_bytes(pid) - was for pid, was in alive if pid not in replaced.values())])
            full_service_s = await it.full_service(over, replaced)
        ledger, kernel = await it.left_behind()
    killed = {it.bases[name] for name in replaced if name in it.bases}
    own = [failure for failure in load.failures if failure.base in killed]
    others = [failure for failure in load.failures if failure.base not in killed]
    return Outcome(
        failed=len(others),
        failed_by_own_gateway=len(own),
        wrong=len(load.wrong),
        ended=load.ended,
        taken_up_again=it.taken_up_again() - taken,
        refused=load.refused,
        longest_pause_s=round(load.longest_gap_s, 3),
        lasted_s=round(over - began, 3),
        full_service_s=round(full_service_s, 3),
        leaked_bytes=max(ledger, kernel),
        spare_refused=len(it.spare_errors),
        ledger_looks=books.looks,
        ledger_unequal=len(books.unequal),
        gateways_grew_bytes=grew,
        why=(*(failure.why for failure in others[:3]), *load.wrong[:3], *books.unequal[:3], *it.spare_errors[:3]),
    )


async def nothing(it: Chaos) -> Replaced:
    return {}


def killed(process: str) -> Fault:
    """SIGKILL of one of the plan's processes."""
    return _signalled(process, signal.SIGKILL)


def restarted(process: str) -> Fault:
    """SIGTERM of one of the plan's processes; over when it has ended."""
    return _signalled(process, signal.SIGTERM)


def _signalled(process: str, number: signal.Signals) -> Fault:
    async def fault(it: Chaos) -> Replaced:
        name = it.name_of(process)
        pid = it.system.running[name].pid
        os.kill(pid, number)
        while it.system.running[name].pid == pid and os.path.exists(f"/proc/{pid}/fd/0"):
            await asyncio.sleep(0.02)
        return {name: pid}

    return fault


async def clock_jumps(it: Chaos) -> Replaced:
    """Of all processes, engines included: the time of day, not the time since the start, which cannot jump. Each jump
    is waited for in the answers' `created`."""
    for days in (2, -2, 0):
        it.set_clock(days)

        async def jumped(days: int = days) -> bool:
            created = (await it.complete(it.models[0], [5, 6, 7], 1))["created"]
            return abs(created - time.time() - days * _DAY_S) < _DAY_S / 2

        await it.until(jumped, "the clock does not jump")
        await asyncio.sleep(STOPPED_S)
    return {}


async def engine_killed(it: Chaos) -> Replaced:
    os.kill(await busiest_engine(it), signal.SIGKILL)
    return {}


async def engine_stands_still(it: Chaos) -> Replaced:
    """SIGSTOP, and it never goes on: its gpu_scheduler finds that out and kills it."""
    pid = await busiest_engine(it)
    os.kill(pid, signal.SIGSTOP)
    while os.path.exists(f"/proc/{pid}/fd/0"):
        await asyncio.sleep(0.02)
    return {}


async def _hold(it: Chaos, process: str, seconds: float, then: signal.Signals) -> int:
    """SIGSTOP for so long; its pid."""
    pid = await busiest_engine(it) if process == "engine" else it.system.running[process].pid
    os.kill(pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(seconds)
    finally:
        os.kill(pid, then)
    return pid


def stopped(process: str) -> Fault:
    """SIGSTOP, and SIGCONT after STOPPED_S."""

    async def fault(it: Chaos) -> Replaced:
        await _hold(it, process, STOPPED_S, signal.SIGCONT)
        return {}

    return fault


def stands_still(process: str) -> Fault:
    """SIGSTOP, and it never goes on: after STANDS_STILL_S an operator kills it."""

    async def fault(it: Chaos) -> Replaced:
        return {process: await _hold(it, process, STANDS_STILL_S, signal.SIGKILL)}

    return fault
