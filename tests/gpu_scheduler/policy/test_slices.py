"""Protection on a simulated GPU that two processes share in slices: one decodes, the other prefills long prompts.

Its numbers are those of an 8B model on an H200 beside another one: a step of 5.2 ms takes 12.7 beside a prefill, whole
chunks keep a little more than half of their speed, and a chunk of 128 tokens takes as long as reading the weights.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import accumulate

import pytest

from gpu_scheduler.engines.sharing.throttle import FREE, PrefillThrottle
from gpu_scheduler.policy.throttle.throttling import ThrottleController

TICK_S = 0.0001
DECODE_SLICE_S, PREFILL_SLICE_S = 0.0020, 0.0024
SWITCH_S = 0.0001
"""In which nobody computes."""
TOKENS_PER_S = 35_000.0
WHOLE, PROMPT = 2048, 8000
LEAST_S = 0.006
"""Of work in a prefill step, however short: the weights are read."""
LAUNCH_S = 0.004
"""Before the first work of a step that another one was not formed ahead of: kernels are launched one by one."""
OUTPUT = 128
"""Tokens of a request."""
SMALL = PrefillThrottle(128, 0.6)
"""128 tokens, and after them a pause of about a decode step."""


def _work_s(tokens: int, prefix: int) -> float:
    """After a long prefix there is more to attend to."""
    return max(LEAST_S, tokens / TOKENS_PER_S) + tokens * prefix * 0.4e-9


@dataclass
class Seen:
    steps_s: list[float]
    """One after the other."""
    tokens_per_s: float
    """Of the prefill."""

    def tpots_s(self, tokens: int = OUTPUT) -> list[float]:
        """Of requests of so many tokens, one of which begins with each step."""
        at = list(accumulate(self.steps_s, initial=0.0))
        return sorted((at[i + tokens - 1] - at[i]) / (tokens - 1) for i in range(len(at) - tokens + 1))


def p(ordered: list[float], q: float) -> float:
    return ordered[int(q * (len(ordered) - 1))]


def simulate(step_s: float, target_s: float = 1.0, fixed: PrefillThrottle | None = None, seconds: float = 8.0) -> Seen:
    """The second half of `seconds`, under the throttle that protection gives or a `fixed` one."""
    chance = random.Random(1)
    group = ThrottleController()
    for model in "ab":
        group.measured(model, TOKENS_PER_S, step_s)
    group.decodes("a", "stream", target_s)
    group.prefills({"b"}, 0.0)
    steps: list[tuple[float, float]] = []
    now = last = ready = began = 0.0
    decode, prefill, tokens, prefix, done = step_s, 0.0, 0, 0, 0
    throttle = FREE
    decoding, slice_left, switching = True, DECODE_SLICE_S, 0.0
    while now < seconds:
        if prefill <= 0 and now >= ready:
            throttle = fixed or group.throttles()["b"]
            tokens = min(throttle.chunk_tokens or WHOLE, WHOLE, PROMPT - prefix)
            prefill, began = _work_s(tokens, prefix), now
        now += TICK_S
        if switching > 0:
            switching -= TICK_S
            continue
        if decoding:
            decode -= TICK_S
        else:
            prefill -= TICK_S
            if prefill <= 0:
                done += tokens if now >= seconds / 2 else 0
                prefix = (prefix + tokens) % PROMPT
                pause_s = throttle.pause_ratio * (now - began)
                ready = now + pause_s + (LAUNCH_S if pause_s else 0.0)
        if decode <= 0:
            steps.append((now, now - last))
            last = now
            group.step("a", now)
            decode = step_s * chance.uniform(0.95, 1.05)
        slice_left -= TICK_S
        other_waits = prefill > 0 if decoding else True
        if other_waits and (slice_left <= 0 or (not decoding and prefill <= 0)):
            decoding, switching = not decoding, SWITCH_S
            slice_left = DECODE_SLICE_S if decoding else PREFILL_SLICE_S
    return Seen([took for at, took in steps if at >= seconds / 2], 2 * done / seconds)


def table(step_s: float = 0.0052) -> None:
    """Prints what the cases cost: gaps between tokens and TPOT by request (p50, p99, ms), prompt tokens per second."""
    cases = {"neither": simulate(step_s, fixed=FREE), "small": simulate(step_s, fixed=SMALL)}
    cases |= {f"target {times} steps": simulate(step_s, times * step_s) for times in (1.0, 1.5, 2.0, 2.5, 3.0)}
    for name, seen in cases.items():
        gaps, tpots = sorted(seen.steps_s), seen.tpots_s()
        figures = [1e3 * x for x in (p(gaps, 0.5), p(gaps, 0.99), p(tpots, 0.5), p(tpots, 0.99))]
        print(f"{name:18}", *(f"{x:6.2f}" for x in figures), f"{seen.tokens_per_s:7.0f}")


def test_the_simulated_gpu_is_like_the_measured_one():
    seen = simulate(0.0052, fixed=FREE)
    assert p(sorted(seen.steps_s), 0.5) == pytest.approx(0.0127, rel=0.1)
    assert seen.tokens_per_s == pytest.approx(18_400, rel=0.15)


def test_small_steps_cost_the_prefill_most_of_its_speed_and_leave_the_tail_of_single_gaps():
    whole, small = simulate(0.0052, fixed=FREE), simulate(0.0052, fixed=SMALL)
    assert small.tokens_per_s < 0.45 * whole.tokens_per_s
    assert p(sorted(small.steps_s), 0.99) > 0.8 * p(sorted(whole.steps_s), 0.99)


@pytest.mark.parametrize("step_s", [0.003, 0.0052, 0.008, 0.012])
@pytest.mark.parametrize("tokens", [48, OUTPUT])
def test_tpot_target_of_twice_a_step_is_kept_and_the_prefill_keeps_most_of_its_speed(step_s, tokens):
    missed = simulate(step_s, fixed=FREE)
    kept = simulate(step_s, 2 * step_s)
    assert p(missed.tpots_s(tokens), 0.5) > 2 * step_s
    assert p(kept.tpots_s(tokens), 0.99) <= 2 * step_s
    assert kept.tokens_per_s > 0.55 * missed.tokens_per_s


def test_a_target_below_a_step_alone_leaves_the_prefill_its_least_share():
    whole, least = simulate(0.0052, fixed=FREE), simulate(0.0052, 0.004)
    assert least.tokens_per_s > 0.15 * whole.tokens_per_s
    assert p(least.tpots_s(), 0.99) < 1.4 * 0.0052


def test_a_target_that_slices_keep_costs_the_prefill_nothing():
    free, loose = simulate(0.0052, fixed=FREE), simulate(0.0052, 3 * 0.0052)
    assert loose.tokens_per_s == free.tokens_per_s
