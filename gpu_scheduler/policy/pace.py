"""How fast a model may prefill beside neighbours that decode, so that each of these keeps its TPOT target.

The engines of a group take turns on its devices in short slices. A decode step of s seconds that meets a prefill step
of g seconds then takes s + g while g <= s, and 2 s however long that is. So a prefill step gets, over all neighbours,

    g = margin * ease * (target - s) / engines that prefill        (seconds; `beat.py` has the ease)

of work, and there is no bound for a neighbour whose share is s or more: its target allows a prefill without end. After
each prefill step comes a pause of one step of the slowest neighbour that set a bound, so that no step meets two of
them.

**Who wins.** What runs, up to its target and not beyond it. The prefill always gets all that the targets allow, so it
cannot go faster when a request is late: a first token that comes too late is one miss, and would be bought with a miss
for every stream that decodes. A target that a neighbour would miss alone buys it the smallest prefill steps beside it,
nothing more: every prompt goes on by `least_tokens` a step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf


@dataclass(frozen=True, slots=True)
class Pace:
    """What an engine may prefill: prompt tokens of one step, and the seconds from its end to the next one's start."""

    chunk_tokens: int = 0
    """0: as many as the engine itself takes."""
    pause_s: float = 0.0


FREE = Pace()


@dataclass(frozen=True, slots=True)
class PaceRules:
    """Numbers of the protection."""

    margin: float = 0.6
    """Share of a neighbour's slack that is given away; the rest is for what the formula leaves out: a small step is
    slower than its share of a whole one, and slower still at the end of a long prompt."""
    least_tokens: int = 128
    """A prefill step is never made smaller: below that its cost is that of reading the weights."""


@dataclass(frozen=True, slots=True)
class Decoding:
    """A model that decodes now. Seconds."""

    step_s: float
    """One of its steps, alone. 0: not known, so that nothing can be said for it."""
    target_s: float
    """The tightest TPOT target of its requests."""
    ease: float = 1.0
    """Share of the computed g that it was seen to bear."""

    def bears(self, margin: float) -> float:
        """Seconds of prefill that one of its steps may meet; +inf: any."""
        g = max(0.0, margin * self.ease * (self.target_s - self.step_s))
        return inf if g >= self.step_s else g


@dataclass(frozen=True, slots=True)
class Prefilling:
    """A model's prefill alone."""

    tokens_per_s: float
    """Of a whole chunk."""
    least_s: float = 0.0
    """Of a step with a single token."""

    def seconds(self, tokens: int) -> float:
        """Of one step."""
        return max(self.least_s, tokens / self.tokens_per_s)


def pace(
    prefilling: Prefilling, neighbours: Iterable[Decoding], at_once: int = 1, rules: PaceRules | None = None
) -> Pace:
    """For a model beside `neighbours`, where `at_once` engines prefill at the same time (1 under the turn)."""
    rules = rules or PaceRules()
    bounds = [(g, one.step_s) for one in neighbours if (g := one.bears(rules.margin)) < inf]
    if not bounds:
        return FREE
    tokens = int(min(bounds)[0] / max(1, at_once) * prefilling.tokens_per_s)
    return Pace(max(rules.least_tokens, tokens), max(step_s for _, step_s in bounds))


def stretch(pace: Pace, prefilling: Prefilling) -> float:
    """How many times as long a long prompt takes under the pace as without one. At least 1."""
    if not pace.chunk_tokens:
        return 1.0
    taken = prefilling.seconds(pace.chunk_tokens) + pace.pause_s
    return max(1.0, taken * prefilling.tokens_per_s / pace.chunk_tokens)
