"""A real engine beside one that prefills: its decodes stand still, its own prefills do not, and it says the same."""

from __future__ import annotations

import time

import pytest

from gpu_scheduler.engines import shared_board
from gpu_scheduler.engines.sharing.throttle import FREE
from testing.engines.harness import EngineEnd
from tests.gpu_scheduler.engines.sglang.conftest import INDEX, NEIGHBOUR

pytestmark = [pytest.mark.sglang, pytest.mark.asyncio(loop_scope="session")]

LONG_S, SHORT_S = 1000.0, 0.02


async def test_decodes_stand_still_while_a_neighbour_prefills_unless_they_are_too_many(
    turns: shared_board.SharedBoard,
    llama: EngineEnd,
    prompts: list[list[int]],
    said: dict[str, list[list[int]]],
) -> None:
    turns.set_throttle(INDEX, FREE)
    turns.set_prefill_priority(LONG_S, 0)
    turns.claim(NEIGHBOUR, time.monotonic(), 1)
    for number in range(3):
        llama.ask(f"{number}", prompts[number], 40, ignore_eos=True)
        await llama.until(lambda number=number: len(llama.answers[f"{number}"].tokens) > 0)
    assert [len(llama.answers[f"{number}"].tokens) for number in range(3)] == [1, 1, 1]

    turns.set_prefill_priority(LONG_S, 2)
    await llama.until(lambda: all(len(llama.answers[f"{number}"].tokens) > 1 for number in range(3)))  # for one prompt
    turns.release(NEIGHBOUR)
    for number in range(3):
        assert (await llama.answer(f"{number}")).tokens == said["llama"][number]

    turns.set_prefill_priority(SHORT_S, 0)
    turns.claim(NEIGHBOUR, time.monotonic() + LONG_S, 1)  # as if it prefilled for ever
    llama.ask("slow", prompts[3], 10, ignore_eos=True)
    assert (await llama.answer("slow")).tokens == said["llama"][3][:10], "a step each time that it waited"
    turns.release(NEIGHBOUR)
    turns.set_prefill_priority(0.0, 0)
    assert not turns.claimed(NEIGHBOUR, time.monotonic()), "its own claims ended with its prefills"
