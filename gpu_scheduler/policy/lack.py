"""Which models' waiting requests lack KV memory, as admission sees it.

Admission counts what others have cached as free, and takes off it what running requests are still expected to grow by.
So what it lacks nobody has to give: it may be there today, in prefixes that balloond would hand over at once, and is
promised to answers under way. Placement sends idle models to sleep for it (`placement/policy/relief.py`), and has to
hear of it before those answers have grown into the rest: when balloond does not find any, running requests are next.

What is lacking for less than `LASTING_S` is not told: engines and balloond report every tenth of a second, and what was
freed in between is no lack.
"""

from __future__ import annotations

from collections.abc import Iterable

from gpu_scheduler.policy.decisions import NeedMemory

LASTING_S = 0.1


class Lack:
    """Of all models. Seconds, on the caller's clock."""

    def __init__(self) -> None:
        self._of: dict[str, tuple[int, float]] = {}
        """Bytes on each device, and since when there was no plan without a lack."""

    def __bool__(self) -> bool:
        """Whether any model's does, however short a time."""
        return bool(self._of)

    def look(self, needs: Iterable[NeedMemory], now: float) -> None:
        """All that a plan found lacking."""
        self._of = {need.model: (need.bytes, self._of.get(need.model, (0, now))[1]) for need in needs}

    def of(self, model: str, now: float) -> int:
        """Bytes on each device that the first of the model's requests lacks; 0: none does, or only just."""
        nbytes, since = self._of.get(model, (0, now))
        return nbytes if now >= since + LASTING_S else 0
