"""A real engine beside one that prefills: its decodes stand still, its own prefills do not, and it says the same."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from gpu_scheduler.engines import turn
from gpu_scheduler.policy.pace import FREE
from tests.gpu_scheduler.engines.sglang.conftest import INDEX
from tests.gpu_scheduler.engines.sglang.harness import load, node
from tests.gpu_scheduler.engines.sglang.shared import Engines

pytestmark = [pytest.mark.sglang, pytest.mark.asyncio(loop_scope="session")]

NEIGHBOUR = INDEX + 1
LONG_S, SHORT_S = 1000.0, 0.02


@pytest.mark.parametrize("as_on_a_gpu", [False, True])
async def test_decodes_stand_still_while_a_neighbour_prefills_and_first_tokens_come(
    as_on_a_gpu: bool,
    tmp_path: Path,
    turns: turn.Turn,
    engines: Engines,
    models: dict[str, Path],
    prompts: list[list[int]],
    said: dict[str, list[list[int]]],
) -> None:
    options = {"page_size": 16, "overlap": 1} if as_on_a_gpu else {}
    turns.set_pace(INDEX, FREE)
    turns.set_precedence(LONG_S)
    async with node(tmp_path) as at, engines.one() as end:
        await at.book("llama")
        await end.hold(load(at, "llama", models["llama"], context_tokens=512, **options))

        turns.claim(NEIGHBOUR, time.monotonic())
        for number in range(3):
            end.ask(f"{number}", prompts[number], 40, ignore_eos=True)
            await end.until(lambda number=number: len(end.answers[f"{number}"].tokens) > 0)
        assert [len(end.answers[f"{number}"].tokens) for number in range(3)] == [1, 1, 1]

        turns.release(NEIGHBOUR)
        for number in range(3):
            assert (await end.answer(f"{number}")).tokens == said["llama"][number]

        turns.set_precedence(SHORT_S)
        turns.claim(NEIGHBOUR, time.monotonic() + LONG_S)  # as if it prefilled for ever
        end.ask("slow", prompts[3], 10, ignore_eos=True)
        assert (await end.answer("slow")).tokens == said["llama"][3][:10], "a step each time that it waited"
        turns.release(NEIGHBOUR)
        turns.set_precedence(0.0)
        assert not turns.claimed(NEIGHBOUR, time.monotonic()), "its own claims ended with its prefills"
