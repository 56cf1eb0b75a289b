"""KV shortage: which models' waiting requests lack KV memory, as admission counts it.

Admission counts other models' cached prefixes as free, and takes off the growth still expected of running requests. So
the bytes it finds missing no model can give up: they may be there today, in prefixes that balloond would hand over at
once, but they are reserved for answers under way. Placement sends idle models to sleep for them
(`placement/policy/lifecycle/kv_pressure.py`), and has to know before those answers have grown into the rest: when
balloond finds no memory, running requests are evicted next. What a model's own limit keeps from it is no shortage:
another model's departure would not change it.

A shortage that lasts less than `LASTING_S` is not reported: engines and balloond report every tenth of a second, and
memory that was freed in between was never short. Nor does a plan without a shortage end one at once: it may not have
reached that model, behind other requests that wait for the prefill turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gpu_scheduler.policy.queue.decisions import NeedMemory

LASTING_S = 0.1


@dataclass(slots=True)
class _Of:
    """The shortage of one model: its bytes on each device, and times in seconds."""

    nbytes: int
    since: float
    seen_at: float
    """When a plan last found the shortage."""


class KvShortages:
    """KV shortages of all models. Seconds, on the caller's clock."""

    def __init__(self) -> None:
        self._of: dict[str, _Of] = {}
        self._looked_at = 0.0

    def __bool__(self) -> bool:
        """Whether any model has a shortage, however short-lived."""
        return bool(self._of)

    def look(self, needs: Iterable[NeedMemory], waiting: Mapping[str, int], now: float) -> None:
        """Records the shortages that a plan found. `waiting`: waiting requests by model."""
        self._looked_at = now
        self._of = {name: one for name, one in self._of.items() if waiting.get(name) and now - one.seen_at < LASTING_S}
        for need in needs:
            if need.lacking:
                known = self._of.setdefault(need.model, _Of(need.lacking, now, now))
                known.nbytes, known.seen_at = need.lacking, now

    def of(self, model: str, now: float) -> int:
        """Bytes on each device that the first of the model's requests lacks; 0 if none does, or only for less than
        `LASTING_S`."""
        one = self._of.get(model)
        if one is None:
            return 0
        until = now if one.seen_at == self._looked_at else one.seen_at
        return one.nbytes if until >= one.since + LASTING_S else 0
