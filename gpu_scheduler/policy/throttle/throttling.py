"""The models of a group as they meet on its devices: who decodes with what target, who prefills, and the pace of each
that follows (`throttle.py`, `interference.py`).

Times are seconds on the caller's clock.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from math import inf

from gpu_scheduler.engines.sharing import throttle
from gpu_scheduler.engines.sharing.throttle import FREE, Decoding, Prefilling, PrefillThrottle, ThrottleRules
from gpu_scheduler.policy.throttle.interference import DecodeInterference


@dataclass(slots=True)
class _Targets:
    """TPOT targets of requests. There are many requests and few targets, and every plan asks for the least."""

    of: dict[str, float] = field(default_factory=dict)
    """By request id."""
    counts: dict[float, int] = field(default_factory=dict)
    """Requests by target."""
    least: float = inf

    def __bool__(self) -> bool:
        return bool(self.of)

    def least_from(self, target_s: float) -> float:
        """The least that is not below this; the least of all if there is none."""
        return min((target for target in self.counts if target >= target_s), default=self.least)

    def put(self, request_id: str, target_s: float) -> None:
        self.pop(request_id)
        self.of[request_id] = target_s
        self.counts[target_s] = self.counts.get(target_s, 0) + 1
        self.least = min(self.least, target_s)

    def pop(self, request_id: str) -> bool:
        """Whether it was there."""
        target_s = self.of.pop(request_id, None)
        if target_s is None:
            return False
        self.counts[target_s] -= 1
        if not self.counts[target_s]:
            del self.counts[target_s]
            self.least = min(self.counts, default=inf)
        return True


@dataclass(slots=True)
class _Model:
    prefilling: Prefilling
    beat: DecodeInterference
    targets: _Targets = field(default_factory=_Targets)
    """Of the requests that decode."""
    own_targets: _Targets = field(default_factory=_Targets)
    """Of all that its engine has: known before there is something to protect, so that the engine need not be told in
    the middle of its steps."""
    pace: PrefillThrottle = FREE
    prefills_since: float = 0.0
    """While it prefills."""
    prefilled_s: float = 0.0
    """What its prefill steps have taken, ever, without the pauses between them."""

    @property
    def decoding(self) -> Decoding:
        return Decoding(self.beat.step_s, self.targets.least, self.beat.loss)

    @property
    def least_step_s(self) -> float:
        """A decode step alone. Of one request, or of several where these are quicker: then others had the devices when
        the model was measured."""
        return min(self.prefilling.least_s, self.beat.step_s)

    def in_steps(self, lasted_s: float) -> float:
        """Of the first `lasted_s` seconds of a prefill, those in steps: it begins with one, and then keeps its share.
        Prompts of one step see no pause at all."""
        first_s = min(lasted_s, throttle.step_s(self.pace.chunk_tokens, self.prefilling))
        return first_s + self.pace.share * (lasted_s - first_s)


class ThrottleController:
    """Who decodes and who prefills. A model has to be `measured` before anything else is said of it (KeyError)."""

    def __init__(self, rules: ThrottleRules | None = None) -> None:
        self._rules = rules or ThrottleRules()
        self._models: dict[str, _Model] = {}
        self._prefilling: frozenset[str] = frozenset()
        self._counted_to = 0.0
        self._prefilled_s = 0.0
        """By all."""

    def measured(self, model: str, prefill_tokens_per_s: float, decode_step_s: float) -> None:
        """It became active; alone it is that fast (a step with one request; 0: not known)."""
        prefilling = Prefilling(prefill_tokens_per_s, decode_step_s)
        known = self._models.setdefault(model, _Model(prefilling, DecodeInterference(decode_step_s)))
        known.prefilling, known.beat.measured_s = prefilling, decode_step_s

    def forget(self, model: str) -> None:
        """It has no requests, and is not measured any more."""
        self._models.pop(model, None)
        self._prefilling -= {model}

    def started(self, model: str, request_id: str, target_s: float) -> None:
        """The model's engine gets the request."""
        self._models[model].own_targets.put(request_id, target_s)

    def decodes(self, model: str, request_id: str, target_s: float) -> None:
        """The request's first token is out."""
        self._models[model].targets.put(request_id, target_s)

    def ended(self, model: str, request_id: str) -> None:
        """Its engine has it no more; nothing if it never had."""
        known = self._models.get(model)
        if known is None:
            return
        known.own_targets.pop(request_id)
        if known.targets.pop(request_id) and not known.targets:
            known.beat.stopped()

    def step(self, model: str, now: float, steps: int = 1) -> None:
        """A message with tokens of the model came: a step of it ended, or so many since the last."""
        known = self._models[model]
        if known.targets:
            self._count(now)
            known.beat.step(now, self._prefilled_s - known.prefilled_s, steps)

    def prefills(self, models: Collection[str], now: float) -> None:
        """These have a prefill under way, from now on."""
        self._count(now)
        before, self._prefilling = self._prefilling, frozenset(models)
        for name in self._prefilling - before:
            self._models[name].prefills_since = now
        for name, known in self._models.items():
            known.beat.prefills(name in self._prefilling)

    def _count(self, now: float) -> None:
        """What was prefilled until now."""
        for known in (self._models[name] for name in self._prefilling):
            since = known.prefills_since
            more_s = known.in_steps(now - since) - known.in_steps(self._counted_to - since)
            known.prefilled_s += more_s
            self._prefilled_s += more_s
        self._counted_to = now

    def paces(
        self, pressed: bool = False, late: Collection[str] = (), late_by: Callable[[str, float], bool] | None = None
    ) -> dict[str, PrefillThrottle]:
        """Of each model, from now on. `pressed`: first tokens are late for want of time, so that nobody pauses for
        neighbours (`throttle.py`, "Who wins"). `late`: models of which requests wait that are late. `late_by`: whether
        prompts that a model's engine has would be late if they took so many times as long as alone (None: never)."""
        bounds: dict[str, tuple[float, float]] = {}
        for name, known in self._models.items():
            if known.targets and not pressed:
                decoding = known.decoding
                bounds[name] = decoding.bears(self._rules), decoding.step_s
        for name, known in self._models.items():
            others = [bound for other, bound in bounds.items() if other != name] if name in bounds else bounds.values()
            at_once = len(self._prefilling) + (name not in self._prefilling)
            known.pace = throttle.within(known.prefilling, others, at_once, self._rules) if others else FREE
            if known.pace.pause_ratio > 0 and late_by is not None and late_by(name, known.pace.slowdown):
                known.pace = PrefillThrottle(known.pace.chunk_tokens)
            if known.own_targets:
                # What no step alone keeps is lost; its engine goes by what the others' clients asked for.
                target_s = known.own_targets.least_from(known.least_step_s / self._rules.margin)
                step_s = self._rules.margin * target_s
                known.pace = PrefillThrottle(known.pace.chunk_tokens, known.pace.pause_ratio, step_s, name in late)
        return {name: known.pace for name, known in self._models.items()}
