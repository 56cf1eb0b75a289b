"""The last decisions with their outcomes: what Explain shows."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from protos import placement_pb2

KEPT = 1000


@dataclass(eq=False)
class DecisionRecord:
    """A decision: `at` in seconds of the history's clock, `took_s` in seconds. `outcome` is filled in when it is
    carried out."""

    at: float
    model: str
    action: str
    group: str
    reason: str
    candidates: list[placement_pb2.Candidate] = field(default_factory=list)
    outcome: str = "under way"
    took_s: float = 0.0
    parts: list[DecisionRecord] = field(default_factory=list)
    """Decisions that are carried out as part of this one. Whether each of them was is not heard."""

    def done(self, seconds: float) -> None:
        """Records that the decision was carried out in so many seconds."""
        self.took_s = seconds
        self.outcome = f"done in {seconds:.2f} s"

    def failed(self, why: object) -> None:
        """Records that the decision was not carried out, in whole or in part."""
        self.outcome = f"failed: {why}"
        for part in self.parts:
            part.outcome += ", which failed"
        self.parts = []


class DecisionHistory:
    """The last `KEPT` decisions, newest last."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._entries: deque[DecisionRecord] = deque(maxlen=KEPT)

    def add(
        self,
        model: str,
        action: str,
        group: str,
        reason: str,
        candidates: Iterable[placement_pb2.Candidate] = (),
        outcome: str = "under way",
    ) -> DecisionRecord:
        entry = DecisionRecord(self._now(), model, action, group, reason, list(candidates), outcome)
        last = next((e for e in reversed(self._entries) if e.model == model), None)
        if last is not None and (last.action, last.group, last.reason) == (action, group, reason) and action == "stay":
            last.at = entry.at  # it repeats the last one: do not push out older entries
            return last
        self._entries.append(entry)
        return entry

    def last(self, model: str, limit: int) -> list[placement_pb2.Decision]:
        """The last `limit` decisions (0: all), newest first, of one model, or of all if `model` is empty."""
        chosen = [entry for entry in reversed(self._entries) if not model or entry.model == model]
        return [
            placement_pb2.Decision(
                age_s=self._now() - entry.at,
                model=entry.model,
                action=entry.action,
                group=entry.group,
                reason=entry.reason,
                candidates=entry.candidates,
                outcome=entry.outcome,
                took_s=entry.took_s,
            )
            for entry in chosen[: limit or len(chosen)]
        ]
