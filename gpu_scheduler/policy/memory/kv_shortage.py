"""Which models' waiting requests lack KV memory, as admission sees it.

Admission counts what others have cached as free, and takes off it what running requests are still expected to grow by.
So what it lacks nobody has to give: it may be there today, in prefixes that balloond would hand over at once, and is
promised to answers under way. Placement sends idle models to sleep for it
(`placement/policy/lifecycle/kv_pressure.py`), and has to hear of it before those answers have grown into the rest: when
balloond does not find any, running requests are next. What a model's own limit keeps from it is no lack: nobody who
left would change it.

What is lacking for less than `LASTING_S` is not told: engines and balloond report every tenth of a second, and what was
freed in between is no lack. Nor does a plan that found none end one at once: it may not have come to that model, behind
others that wait for the prefill turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gpu_scheduler.policy.queue.decisions import NeedMemory

LASTING_S = 0.1


@dataclass(slots=True)
class _Of:
    """One model's. Seconds."""

    nbytes: int
    since: float
    seen_at: float
    """By the last plan that found it."""


class KvShortages:
    """Of all models. Seconds, on the caller's clock."""

    def __init__(self) -> None:
        self._of: dict[str, _Of] = {}
        self._looked_at = 0.0

    def __bool__(self) -> bool:
        """Whether any model's does, however short a time."""
        return bool(self._of)

    def look(self, needs: Iterable[NeedMemory], waiting: Mapping[str, int], now: float) -> None:
        """What a plan found. `waiting`: how many requests wait of each model."""
        self._looked_at = now
        self._of = {name: one for name, one in self._of.items() if waiting.get(name) and now - one.seen_at < LASTING_S}
        for need in needs:
            if need.lacking:
                known = self._of.setdefault(need.model, _Of(need.lacking, now, now))
                known.nbytes, known.seen_at = need.lacking, now

    def of(self, model: str, now: float) -> int:
        """Bytes on each device that the first of the model's requests lacks; 0: none does, or only just."""
        one = self._of.get(model)
        if one is None:
            return 0
        until = now if one.seen_at == self._looked_at else one.seen_at
        return one.nbytes if until >= one.since + LASTING_S else 0
