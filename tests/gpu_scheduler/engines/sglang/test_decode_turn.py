"""A real engine beside one that decodes, too, and wants to be first: it stands still, and what it says is the same."""

from __future__ import annotations

import time

import pytest

from gpu_scheduler.engines import shared_board
from gpu_scheduler.engines.sharing.throttle import FREE, PrefillThrottle
from testing.engines.harness import EngineEnd
from tests.gpu_scheduler.engines.sglang.conftest import INDEX, NEIGHBOUR

pytestmark = [pytest.mark.sglang, pytest.mark.asyncio(loop_scope="session")]

LONG_S, SHORT_S = 1000.0, 0.02
PACE = PrefillThrottle(step_s=0.0001)
"""No machine keeps it: the engine wants nothing."""


async def test_decodes_with_a_target_stand_still_for_a_neighbours_better_bid_and_others_do_not(
    turns: shared_board.SharedBoard,
    llama: EngineEnd,
    prompts: list[list[int]],
    said: dict[str, list[list[int]]],
) -> None:
    llama.ask("first", prompts[3], 2, ignore_eos=True)
    await llama.answer("first")
    await llama.until(lambda: llama.has_counted)  # what follows is counted from there

    turns.set_throttle(INDEX, PACE)
    turns.set_decode_arbitration(LONG_S)
    turns.bid(NEIGHBOUR, 0.0, time.monotonic() + LONG_S)
    for number in range(3):
        llama.ask(f"{number}", prompts[number], 40, ignore_eos=True)
        await llama.until(lambda number=number: len(llama.answers[f"{number}"].tokens) > 0)
    assert [len(llama.answers[f"{number}"].tokens) for number in range(3)] == [1, 1, 1]
    turns.bid(NEIGHBOUR, None, time.monotonic())
    for number in range(3):
        assert (await llama.answer(f"{number}")).tokens == said["llama"][number]

    turns.set_throttle(INDEX, FREE)
    turns.bid(NEIGHBOUR, 0.0, time.monotonic() + LONG_S)
    llama.ask("no target", prompts[3], 10, ignore_eos=True)
    assert (await llama.answer("no target")).tokens == said["llama"][3][:10]

    turns.set_throttle(INDEX, PACE)
    turns.set_decode_arbitration(SHORT_S)
    turns.bid(NEIGHBOUR, 0.0, time.monotonic() + LONG_S)
    llama.ask("slow", prompts[3], 10, ignore_eos=True)
    assert (await llama.answer("slow")).tokens == said["llama"][3][:10], "a step each time that it waited"
    turns.bid(NEIGHBOUR, None, time.monotonic())
    steps = 1 + 39 + 9 + 9
    await llama.until(lambda: llama.stats.decode_steps >= steps - 1 and llama.stats.stood_still_s > 0)
    assert llama.stats.decode_step_s > PACE.step_s and llama.stats.urgent_steps == 0, "it wants nothing"
