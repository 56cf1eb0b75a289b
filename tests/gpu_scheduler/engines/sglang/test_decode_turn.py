"""A real engine beside one that decodes, too: the one that needs less of the devices goes first, and what it says is
the same."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from gpu_scheduler.engines import turn
from gpu_scheduler.policy.pace import Pace
from tests.gpu_scheduler.engines.sglang.conftest import INDEX
from tests.gpu_scheduler.engines.sglang.harness import load, node
from tests.gpu_scheduler.engines.sglang.shared import Engines

pytestmark = [pytest.mark.sglang, pytest.mark.asyncio(loop_scope="session")]

NEIGHBOUR = INDEX + 1
LONG_S, SHORT_S = 1000.0, 0.02
PACE = Pace(step_s=0.003, lead_s=0.05)
"""More than one engine could keep: a need of several."""


@pytest.mark.parametrize("as_on_a_gpu", [False, True])
async def test_decodes_stand_still_for_a_neighbour_that_needs_less_and_not_for_one_that_needs_more(
    as_on_a_gpu: bool,
    tmp_path: Path,
    turns: turn.Turn,
    engines: Engines,
    models: dict[str, Path],
    prompts: list[list[int]],
    said: dict[str, list[list[int]]],
) -> None:
    options = {"page_size": 16, "overlap": 1} if as_on_a_gpu else {}
    turns.set_pace(INDEX, PACE)
    turns.set_decode_turn(LONG_S)
    async with node(tmp_path) as at, engines.one() as end:
        await at.book("llama")
        await end.hold(load(at, "llama", models["llama"], context_tokens=512, **options))

        turns.want(NEIGHBOUR, 0.0, time.monotonic() + LONG_S)
        for number in range(3):
            end.ask(f"{number}", prompts[number], 40, ignore_eos=True)
            await end.until(lambda number=number: len(end.answers[f"{number}"].tokens) > 0)
        assert [len(end.answers[f"{number}"].tokens) for number in range(3)] == [1, 1, 1]
        turns.want(NEIGHBOUR, None, time.monotonic())
        for number in range(3):
            assert (await end.answer(f"{number}")).tokens == said["llama"][number]

        turns.want(NEIGHBOUR, 65.0, time.monotonic() + LONG_S)
        end.ask("needs less", prompts[3], 10, ignore_eos=True)
        assert (await end.answer("needs less")).tokens == said["llama"][3][:10]

        turns.set_decode_turn(SHORT_S)
        turns.want(NEIGHBOUR, 0.0, time.monotonic() + LONG_S)
        end.ask("slow", prompts[3], 10, ignore_eos=True)
        assert (await end.answer("slow")).tokens == said["llama"][3][:10], "a step each time that it waited"
        turns.want(NEIGHBOUR, None, time.monotonic())
        turns.set_decode_turn(0.0)
