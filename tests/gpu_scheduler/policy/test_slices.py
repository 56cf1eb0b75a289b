"""Protection on a simulated GPU that two processes share in slices: one decodes, the other prefills long prompts."""

import random

import pytest

from gpu_scheduler.policy.protection import Protection

TICK_S = 0.0001
SLICE_S = 0.002
TOKENS_PER_S = 35_000.0
WHOLE, PROMPT = 2048, 8000
LEAST_S = 0.0045
"""Of work in a prefill step, however short."""
LAUNCH_S = 0.0015
"""From the end of a pause to the next step's first work."""


def _work_s(tokens: int, prefix: int) -> float:
    """A small step is less efficient than a whole one, and one after a long prefix has more to attend to."""
    return max(LEAST_S, 1.15 * tokens / TOKENS_PER_S) + tokens * prefix * 1.2e-9


def simulate(step_s: float, target_s: float, protect: bool, seconds: float = 8.0) -> tuple[list[float], float]:
    """(gaps between tokens in order of size, prompt tokens per second)."""
    chance = random.Random(1)
    group = Protection()
    for model in "ab":
        group.measured(model, TOKENS_PER_S, step_s)
    group.decodes("a", "stream", target_s)
    group.prefills({"b"})
    gaps: list[float] = []
    now = last = ready = 0.0
    decode, prefill, tokens, pause_s, prefix, done = step_s, 0.0, 0, 0.0, 0, 0
    decoding, slice_left = True, SLICE_S
    while now < seconds:
        if prefill <= 0 and now >= ready:
            pace = group.paces()["b"][0]
            bound = pace.chunk_tokens if protect and pace.chunk_tokens else WHOLE
            tokens, pause_s = min(bound, WHOLE, PROMPT - prefix), pace.pause_s if protect else 0.0
            prefill = _work_s(tokens, prefix)
        if slice_left <= 0 or (not decoding and prefill <= 0):
            decoding, slice_left = not decoding or prefill <= 0, SLICE_S
        if decoding:
            decode -= TICK_S
        else:
            prefill -= TICK_S
            if prefill <= 0:
                done += tokens
                prefix = (prefix + tokens) % PROMPT
                ready = now + pause_s + (LAUNCH_S if pause_s else 0.0)
        now += TICK_S
        slice_left -= TICK_S
        if decode <= 0:
            gaps.append(now - last)
            last = now
            group.step("a", now)
            decode = step_s * chance.uniform(0.95, 1.05)
    return sorted(gaps), done / seconds


@pytest.mark.parametrize("step_s", [0.006, 0.008, 0.010])
def test_a_target_of_twice_a_step_is_kept_and_the_prefill_goes_on(step_s):
    missed, most = simulate(step_s, 2 * step_s, protect=False)
    kept, paced = simulate(step_s, 2 * step_s, protect=True)
    assert missed[len(missed) // 2] > 2 * step_s, "slices alone: half of the steps take longer"
    assert kept[int(0.99 * len(kept))] <= 2 * step_s + TICK_S
    assert 0.3 * most < paced < most


def test_a_target_that_slices_keep_costs_the_prefill_nothing():
    assert simulate(0.008, 0.024, protect=True) == simulate(0.008, 0.024, protect=False)
