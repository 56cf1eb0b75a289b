"""A real engine under a pace: smaller prefill steps, pauses in which it decodes, and the same answers."""

from __future__ import annotations

import json
import random
import shutil
import time
from pathlib import Path

import pytest

from gpu_scheduler.engines import shared_board
from gpu_scheduler.engines.sharing.throttle import FREE, PrefillThrottle
from testing.engines.harness import Answer, load, node
from tests.gpu_scheduler.engines.sglang import checkpoints
from tests.gpu_scheduler.engines.sglang.conftest import INDEX
from tests.gpu_scheduler.engines.sglang.shared import Engines

pytestmark = [pytest.mark.sglang, pytest.mark.asyncio(loop_scope="session")]

LONG, STEPS = 2000, 16
"""Prompt tokens, and how many steps of 128 that is."""
LONGEST = 2048
WHOLE = 512
"""Prompt tokens of a step where nothing else is said."""
TURNS, LEAST_DUE = 5, 8
"""Decode steps. How many are due a machine says that is as fast as it was a moment ago; and of one that stood still
meanwhile, what decodes is too late to be worth a hurry, or through."""
FOR_EVER = 4000.0
"""Times as long as the step before: a minute at the least."""


@pytest.fixture(scope="module")
def long_llama(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights, for a longer context."""
    folder = shutil.copytree(models["llama"], tmp_path_factory.mktemp("long") / "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": LONGEST}))
    return folder


@pytest.mark.parametrize("as_on_a_gpu", [False, True])
async def test_prefill_throttle_makes_steps_smaller_and_puts_pauses_between_them(
    as_on_a_gpu: bool,
    tmp_path: Path,
    turns: shared_board.SharedBoard,
    engines: Engines,
    long_llama: Path,
    prompts: list[list[int]],
) -> None:
    chance = random.Random(4)
    paced, free, held = ([chance.randrange(2, checkpoints.VOCABULARY) for _ in range(LONG)] for _ in range(3))
    said = checkpoints.reference(long_llama, [paced, free, held], 4)
    options = {"page_size": 16, "overlap": 1} if as_on_a_gpu else {}
    async with node(tmp_path) as at, engines.one() as end:
        await at.book("llama")
        # The model's first pass takes no notice.
        turns.set_throttle(INDEX, PrefillThrottle(128, FOR_EVER))
        model = load(at, "llama", long_llama, context_tokens=LONGEST, chunked_prefill_size=WHOLE, **options)
        await end.hold(model)

        turns.set_throttle(INDEX, PrefillThrottle(135 if as_on_a_gpu else 128, 0.05))  # in whole pages
        end.ask("paced", paced, 4, ignore_eos=True)
        answer = await end.answer("paced")
        assert answer.tokens == said[0]
        assert answer.prefilled == [(0, 128 * step) for step in range(1, 16)], "with the first one 16 steps"

        turns.set_throttle(INDEX, FREE)
        end.ask("free", free, 4, ignore_eos=True)
        answer = await end.answer("free")
        assert answer.tokens == said[1] and answer.prefilled == [(0, WHOLE * step) for step in range(1, 4)]

        end.ask("running", prompts[0], 120, ignore_eos=True)
        await end.until(lambda: len(end.answers["running"].tokens) > 0)
        turns.set_throttle(INDEX, PrefillThrottle(128, FOR_EVER))
        end.ask("held", held, 4, ignore_eos=True)
        assert len((await end.answer("running")).tokens) == 120, "decoding goes on in a pause"
        assert not end.answers["held"].tokens and not end.answers["held"].prefilled
        turns.set_throttle(INDEX, FREE)
        answer = await end.answer("held")
        assert answer.tokens == said[2] and answer.prefilled == [(0, WHOLE * step) for step in range(1, 4)]


@pytest.mark.parametrize("as_on_a_gpu", [False, True])
async def test_own_decodes_go_on_between_prefill_steps_where_their_target_requires_it(
    as_on_a_gpu: bool,
    tmp_path: Path,
    turns: shared_board.SharedBoard,
    engines: Engines,
    long_llama: Path,
    prompts: list[list[int]],
) -> None:
    chance = random.Random(5)
    (spoken,) = checkpoints.reference(long_llama, prompts[:1], 400)
    options = {"page_size": 16, "overlap": 1} if as_on_a_gpu else {}
    turns.set_throttle(INDEX, FREE)
    async with node(tmp_path) as at, engines.one() as end:
        await at.book("llama")
        await end.hold(load(at, "llama", long_llama, context_tokens=LONGEST, chunked_prefill_size=WHOLE, **options))

        async def prefilled(name: str, step_s: float) -> tuple[Answer, float]:
            """A long prompt beside a request with that target, and how long it took."""
            long = [chance.randrange(2, checkpoints.VOCABULARY) for _ in range(LONG)]
            (said,) = checkpoints.reference(long_llama, [long], 4)
            turns.set_throttle(INDEX, PrefillThrottle(128, 0.0, step_s))
            beside = f"{name}: decodes"
            end.ask(beside, prompts[0], 400, ignore_eos=True)
            await end.until(lambda: len(end.answers[beside].tokens) > 0)
            began = time.monotonic()
            end.ask(name, long, 4, ignore_eos=True)
            answer = await end.answer(name)
            took_s = time.monotonic() - began
            assert answer.tokens == said
            assert (await end.answer(beside)).tokens == spoken
            return answer, took_s

        answer, took_s = await prefilled("loose", 3600.0)
        assert answer.told_meanwhile <= 1, "prefill first"
        for turn in range(TURNS):
            # Decode steps are due as often as prefill steps end, where the machine is twice as fast by now, too.
            step_s = took_s / STEPS / 2
            answer, took_s = await prefilled(f"tight {turn}", step_s)
            due = min(STEPS, took_s / step_s)
            went_on = due >= LEAST_DUE and answer.told_meanwhile >= due / 4
            if went_on:
                break
        assert went_on
