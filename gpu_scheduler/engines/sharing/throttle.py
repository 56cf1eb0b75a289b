"""How fast a model may prefill beside neighbours that decode, so that each of these keeps its TPOT target. Its own
decodes are `tpot_slack.py`'s.

**What is protected** is a request's mean time per output token, (last - first) / (n - 1), which is what a TPOT target
means; not the gap between two tokens. A step that meets a prefill step at all is slow, however small that is: the
driver slices the devices between processes, and 128 tokens read the weights as 2048 do. Of an 8B model on an H200, 16
streams beside another 8B that prefills: 5.3 ms a step alone, 12.7 beside chunks of 2048, 12.6 at the 99th percentile
beside chunks of 128 with a pause of a step after each. That cost the prefill three quarters of its 18,400 tokens/s
and left the tail where it was. The mean is had for a quarter.

**The form.** In a second in which a neighbour prefills, a model that decodes loses a share `loss` of the steps it would
have made (a step then takes 1 / (1 - loss) times as long as its s alone: 2.4 times by default; `interference.py`
observes it). A neighbour that prefills a share f of the time therefore leaves it steps of s / (1 - f * loss) in the
mean, and that is at most `margin` of the target where

    f <= (1 - s / (margin * target)) / loss.

With f at 1 or more there is nothing to do. Else each prefill step is followed by a pause of 1 / f - 1 times what it
took, which the engine measures: then f holds whatever the step was, and no estimate of its time is needed for that.
Of several neighbours the strictest counts. Where several engines prefill at once, each gets an equal part of f: what is
lost beside two at the same time is less than twice what is lost beside one.

**How large a step is.** A mean holds for a request only if that lives through several cycles of step and pause. A
cycle lasts no more than `cycle_steps` steps of the neighbour, but a step is never so small that the weights are most of
what it reads.

**Who wins.** What runs, up to its target and not beyond it, as long as nobody's first token is late for that. An engine
makes no pauses while one of its prompts would be late by them (`Backlog.late_by_pauses`), and once the queue holds more
than can be on time (`Backlog.pressed`) nobody does until that is over: pauses make all that waits later, and those who
wait are more than those who decode. So they are for prompts that are in no hurry: without a target, or far from it.
With pauses come what may, eight models on two H200s (a busy slice of servegen48, six times) had 36 % of their first
tokens in time where engines that knew of no pauses had 57 %, and targets of streams were met no more often
(docs/lab/gpu-runs.md). A target below what the model does alone cannot be met by any pause, so it buys no more than
others can: `least_share` of the time is always left to prefills, and costs a neighbour a sixth more than alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

LOSS = 1 - 1 / 2.4
"""Until something else was observed."""


@dataclass(frozen=True, slots=True)
class PrefillThrottle:
    """In what steps an engine may prefill."""

    chunk_tokens: int = 0
    """The most prompt tokens of one step; 0: as many as the engine itself takes."""
    pause_ratio: float = 0.0
    """Seconds from the end of a step to the next one's start, for each second that it took."""
    step_s: float = 0.0
    """The mean that decode steps of the engine itself may take, its own prefills included (`tpot_slack.py`); 0: no
    bound."""
    urgent: bool = False
    """Requests of the model wait that are late, for those that decode to end: these want more of the devices, whatever
    they have in hand (`decode_arbitration.py`)."""

    @property
    def share(self) -> float:
        """Of the time, that goes into steps: f."""
        return 1 / self.slowdown

    @property
    def slowdown(self) -> float:
        """How many times as long a prefill of many steps takes as without pauses. At least 1."""
        return 1 + self.pause_ratio


FREE = PrefillThrottle()


@dataclass(frozen=True, slots=True)
class ThrottleRules:
    """Numbers of the protection."""

    margin: float = 0.9
    """Share of a target that the mean over many cycles may take; the rest is for what one request meets more than
    others: a cycle begun and not ended, steps that grow with the context, its own model's prefills."""
    least_share: float = 0.25
    """Of the time, that prefills get together whatever the targets are."""
    own_least_share: float = 0.9
    """The same, of an engine's prefills before its own decodes; but these get their share where it is small:"""
    decode_first_max_share: float = 1 / 3
    """Of the time, that decodes may have before prefills of their own engine if they need no more of the devices than
    that to keep their target."""
    cycle_steps: int = 16
    """Steps alone, of the neighbour, that a cycle may last: a request of a few dozen tokens sees several cycles."""
    fixed_costs: float = 3.0
    """A prefill step is at least so many times as long as one with a single token, which reads the weights and does
    little else: 530 tokens of the 8B model above."""
    least_step_s: float = 0.02
    """Nor is it ever shorter than this by the engine's speed: without a CUDA graph the host needs 9 ms (1B) to 17 ms
    (8B) to launch a prefill step of whatever size."""
    least_tokens: int = 128
    """Of a prefill step, where that time is not known."""


@dataclass(frozen=True, slots=True)
class Decoding:
    """A model that decodes now. Seconds."""

    step_s: float
    """One of its steps, alone. 0: not known, so that nothing can be said for it."""
    target_s: float
    """The tightest TPOT target of its requests."""
    loss: float = LOSS
    """Share of its steps that it loses while one neighbour prefills."""

    def bears(self, rules: ThrottleRules) -> float:
        """Share of the time in which neighbours may prefill; 1 or more: all of it."""
        if self.step_s == 0 or self.loss == 0:
            return inf
        return max(rules.least_share, (1 - self.step_s / (rules.margin * self.target_s)) / self.loss)


@dataclass(frozen=True, slots=True)
class Prefilling:
    """A model's prefill alone."""

    tokens_per_s: float
    """Of a whole chunk."""
    least_s: float = 0.0
    """Of a step with a single token."""


BESIDE = 2.0
"""How many times as long a prefill step takes beside decodes: they get every other slice. 1.9 for the 8B model."""


def step_s(chunk_tokens: int, prefilling: Prefilling) -> float:
    """About what a prefill step takes beside decodes."""
    return BESIDE * max(prefilling.least_s, chunk_tokens / prefilling.tokens_per_s)


def pace(
    prefilling: Prefilling, neighbours: Iterable[Decoding], at_once: int = 1, rules: ThrottleRules | None = None
) -> PrefillThrottle:
    """For a model beside `neighbours`, where `at_once` engines prefill at the same time (1 under the turn)."""
    rules = rules or ThrottleRules()
    return within(prefilling, ((one.bears(rules), one.step_s) for one in neighbours), at_once, rules)


def within(
    prefilling: Prefilling, bounds: Iterable[tuple[float, float]], at_once: int, rules: ThrottleRules
) -> PrefillThrottle:
    """The same, for neighbours of which (what it `bears`, its step alone) is known."""
    f, step = inf, inf
    for bears, step_alone_s in bounds:
        if bears / at_once < 1:
            f, step = min(f, bears / at_once), min(step, step_alone_s)
    if f == inf:
        return FREE
    fitting = rules.cycle_steps * step * f / BESIDE
    longest_s = max(fitting, rules.fixed_costs * prefilling.least_s, rules.least_step_s)
    tokens = int(longest_s * prefilling.tokens_per_s)
    return PrefillThrottle(max(rules.least_tokens, tokens), 1 / f - 1)
