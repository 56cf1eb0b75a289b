"""How fast a model may prefill beside neighbours that decode, so that each of these keeps its TPOT target. The model's
own decodes are the matter of `tpot_slack.py`.

**What is protected** is a request's mean time per output token, (last - first) / (n - 1), which is what a TPOT target
means; not the gap between two tokens. A step that meets a prefill step at all is slow, however small the prefill step
is: the driver slices the devices between processes, and 128 tokens read the weights as 2048 do. For 16 streams of an 8B
model on an H200 beside another 8B that prefills, a step takes 5.3 ms alone, 12.7 beside chunks of 2048, and 12.6 at the
99th percentile beside chunks of 128 with a pause of a step after each. That cost the prefill three quarters of its
18,400 tokens/s and left the tail where it was. Keeping the mean costs a quarter.

**The form.** In a second in which a neighbour prefills, a model that decodes loses a share `loss` of the steps it would
have made (a step then takes 1 / (1 - loss) times as long as its s alone: 2.4 times by default; `interference.py`
observes it). A neighbour that prefills a share f of the time therefore leaves it steps of s / (1 - f * loss) in the
mean, and that is at most `margin` of the target if

    f <= (1 - s / (margin * target)) / loss.

With f at 1 or more there is nothing to do. Else each prefill step is followed by a pause of 1 / f - 1 times its
duration, which the engine measures: then f holds whatever the step was, and no estimate of its time is needed for that.
Of several neighbours the strictest counts. If several engines prefill at once, each gets an equal part of f: the loss
beside two at the same time is less than twice the loss beside one.

**How large a step is.** A mean holds for a request only if the request lives through several cycles of step and pause.
A cycle lasts no more than `cycle_steps` steps of the neighbour, but a step is never so small that the weights are most
of what it reads.

**Who wins.** Running requests, up to their targets and not beyond, as long as that makes no first token late. An engine
makes no pauses while they would make one of its prompts late (`Backlog.late_by_pauses`), and once the queue holds more
than can be on time (`Backlog.pressed`) no engine pauses until that is over: pauses make all waiting requests later, and
those are more than the decoding ones. So pauses are for prompts that have time: without a target, or far from it. With
unconditional pauses, eight models on two H200s (a busy slice of servegen48, six times) had 36 % of their first tokens
in time where engines without pauses had 57 %, and TPOT targets were met no more often (docs/lab/gpu-runs.md). A target
below what the model does alone cannot be met by any pause, so it gets no more protection than others: `least_share` of
the time is always left to prefills, and costs a neighbour a sixth more than alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

LOSS = 1 - 1 / 2.4
"""Share of decode steps lost beside a prefill, until it has been observed."""


@dataclass(frozen=True, slots=True)
class PrefillThrottle:
    """The throttle of one engine's prefills: how large its steps may be, how long it pauses after each, and the step
    time that its own decodes need."""

    chunk_tokens: int = 0
    """Most prompt tokens of one prefill step; 0: as many as the engine itself takes."""
    pause_ratio: float = 0.0
    """Seconds of pause after a prefill step, for each second that the step took."""
    step_s: float = 0.0
    """Mean seconds that decode steps of the engine itself may take, its own prefills included (`tpot_slack.py`); 0: no
    bound."""
    urgent: bool = False
    """True if late requests of the model wait, which can start only when decodes end: these bid for the devices
    whatever their TPOT slack is (`decode_arbitration.py`)."""

    @property
    def share(self) -> float:
        """Share of the prefill time that is spent in steps, not pauses: f."""
        return 1 / self.slowdown

    @property
    def slowdown(self) -> float:
        """Factor by which pauses lengthen a prefill of many steps. At least 1."""
        return 1 + self.pause_ratio


FREE = PrefillThrottle()


@dataclass(frozen=True, slots=True)
class ThrottleRules:
    """Parameters of the prefill throttle."""

    margin: float = 0.9
    """Share of a TPOT target that the mean over many cycles may take; the rest is for what a single request meets
    beyond the mean: a cycle begun and not ended, steps that grow with the context, its own model's prefills."""
    least_share: float = 0.25
    """Share of the time that prefills get together whatever the targets are."""
    own_least_share: float = 0.9
    """Share of the time that an engine's prefills get before its own decodes, unless the decodes' share is small
    (`decode_first_max_share`)."""
    decode_first_max_share: float = 1 / 3
    """Share of the time that an engine's decodes may have before its own prefills if they need no more of the devices
    than that to keep their target."""
    cycle_steps: int = 16
    """Length of a cycle of step and pause, at most, in solo decode steps of the neighbour: a request of a few dozen
    tokens sees several cycles."""
    fixed_costs: float = 3.0
    """Least duration of a prefill step, in multiples of a step with a single token, which reads the weights and does
    little else: 530 tokens for the 8B model above."""
    least_step_s: float = 0.02
    """Least seconds of a prefill step by the engine's speed: without a CUDA graph the host needs 9 ms (1B) to 17 ms
    (8B) to launch a prefill step of whatever size."""
    least_tokens: int = 128
    """Least prompt tokens of a prefill step, for when the duration of a step with a single token is unknown."""


@dataclass(frozen=True, slots=True)
class Decoding:
    """A model that decodes now. Times in seconds."""

    step_s: float
    """Seconds of a decode step alone; 0: unknown, so that the model is not protected."""
    target_s: float
    """Tightest TPOT target of its requests, in seconds."""
    loss: float = LOSS
    """Share of its steps that it loses while one neighbour prefills."""

    def tolerates(self, rules: ThrottleRules) -> float:
        """Share of the time in which neighbours may prefill; 1 or more: all of it."""
        if self.step_s == 0 or self.loss == 0:
            return inf
        return max(rules.least_share, (1 - self.step_s / (rules.margin * self.target_s)) / self.loss)


@dataclass(frozen=True, slots=True)
class Prefilling:
    """A model's prefill speed alone."""

    tokens_per_s: float
    """Prompt tokens per second with whole chunks."""
    least_s: float = 0.0
    """Seconds of a step with a single token."""


BESIDE = 2.0
"""Factor by which decodes beside it lengthen a prefill step: they get every other slice. 1.9 for the 8B model."""


def prefill_step_s(chunk_tokens: int, prefilling: Prefilling) -> float:
    """Approximate seconds of a prefill step beside decodes."""
    return BESIDE * max(prefilling.least_s, chunk_tokens / prefilling.tokens_per_s)


def throttle_beside(
    prefilling: Prefilling, bounds: Iterable[tuple[float, float]], at_once: int, rules: ThrottleRules
) -> PrefillThrottle:
    """The throttle for a model beside neighbours that decode, while `at_once` engines prefill at the same time.
    `bounds`: of each neighbour the share of the time in which others may prefill, and the seconds of a decode step
    alone."""
    f, step = inf, inf
    for tolerates, step_alone_s in bounds:
        if tolerates / at_once < 1:
            f, step = min(f, tolerates / at_once), min(step, step_alone_s)
    if f == inf:
        return FREE
    fitting = rules.cycle_steps * step * f / BESIDE
    longest_s = max(fitting, rules.fixed_costs * prefilling.least_s, rules.least_step_s)
    tokens = int(longest_s * prefilling.tokens_per_s)
    return PrefillThrottle(max(rules.least_tokens, tokens), 1 / f - 1)
