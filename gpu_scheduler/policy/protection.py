"""The models of a group as they meet on its devices: who decodes with what target, who prefills, and the pace of each
that follows (`pace.py`, `beat.py`).

Times are seconds on the caller's clock.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from math import inf

from gpu_scheduler.policy import pace
from gpu_scheduler.policy.beat import Beat
from gpu_scheduler.policy.pace import Decoding, Pace, PaceRules, Prefilling


@dataclass(slots=True)
class _Model:
    prefilling: Prefilling
    beat: Beat
    targets: dict[str, float] = field(default_factory=dict)
    """Of the requests that decode, by id."""

    @property
    def decoding(self) -> Decoding:
        return Decoding(self.beat.step_s, min(self.targets.values()), self.beat.ease)


class Protection:
    """Who decodes and who prefills. A model has to be `measured` before anything else is said of it (KeyError)."""

    def __init__(self, rules: PaceRules | None = None) -> None:
        self._rules = rules or PaceRules()
        self._models: dict[str, _Model] = {}
        self._prefilling: frozenset[str] = frozenset()

    def measured(self, model: str, prefill_tokens_per_s: float, decode_step_s: float) -> None:
        """It became active; alone it is that fast (a step with one request; 0: not known)."""
        prefilling = Prefilling(prefill_tokens_per_s, decode_step_s)
        known = self._models.setdefault(model, _Model(prefilling, Beat(decode_step_s)))
        known.prefilling, known.beat.measured_s = prefilling, decode_step_s

    def decodes(self, model: str, request_id: str, target_s: float) -> None:
        """The request's first token is out."""
        self._models[model].targets[request_id] = target_s

    def ended(self, model: str, request_id: str) -> None:
        """It decodes no more; nothing if it never did."""
        known = self._models.get(model)
        if known is not None and known.targets.pop(request_id, None) is not None and not known.targets:
            known.beat.stopped()

    def step(self, model: str, now: float) -> None:
        """A message with tokens of the model came: a step of it ended."""
        known = self._models[model]
        if known.targets:
            known.beat.step(now, min(known.targets.values()))

    def prefills(self, models: Collection[str]) -> None:
        """These have a prefill under way, from now on."""
        self._prefilling = frozenset(models)
        for name, known in self._models.items():
            known.beat.prefills(name in self._prefilling, bool(self._prefilling - {name}))

    def paces(self) -> dict[str, tuple[Pace, float]]:
        """Of each model its pace, and how many times as long its prefills take under that."""
        decoding = {name: known.decoding for name, known in self._models.items() if known.targets}
        binding = {name: one for name, one in decoding.items() if one.bears(self._rules.margin) < inf}
        answer: dict[str, tuple[Pace, float]] = {}
        for name, known in self._models.items():
            others = [one for other, one in binding.items() if other != name]
            own = pace.pace(known.prefilling, others, len(self._prefilling | {name}), self._rules)
            answer[name] = own, pace.stretch(own, known.prefilling)
        return answer
