"""The throttle controller of a group: which models decode with what targets, which prefill, and the prefill throttle of
each that follows (`throttle.py`, `interference.py`).

Times are seconds on the caller's clock.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from math import inf

from gpu_scheduler.engines.sharing.throttle import (
    FREE,
    Decoding,
    Prefilling,
    PrefillThrottle,
    ThrottleRules,
    prefill_step_s,
    throttle_beside,
)
from gpu_scheduler.policy.throttle.interference import DecodeInterference


@dataclass(slots=True)
class _Targets:
    """TPOT targets, in seconds, of a model's requests. There are many requests and few different targets, and every
    plan needs the least."""

    of: dict[str, float] = field(default_factory=dict)
    """Target by request id."""
    counts: dict[float, int] = field(default_factory=dict)
    """Number of requests by target."""
    least: float = inf

    def __bool__(self) -> bool:
        return bool(self.of)

    def least_from(self, target_s: float) -> float:
        """The least target that is not below `target_s`; the least of all if there is none."""
        return min((target for target in self.counts if target >= target_s), default=self.least)

    def put(self, request_id: str, target_s: float) -> None:
        self.pop(request_id)
        self.of[request_id] = target_s
        self.counts[target_s] = self.counts.get(target_s, 0) + 1
        self.least = min(self.least, target_s)

    def pop(self, request_id: str) -> bool:
        """Removes a request. False if it was not here."""
        target_s = self.of.pop(request_id, None)
        if target_s is None:
            return False
        self.counts[target_s] -= 1
        if not self.counts[target_s]:
            del self.counts[target_s]
            self.least = min(self.counts, default=inf)
        return True


@dataclass(slots=True)
class _ThrottledModel:
    prefilling: Prefilling
    interference: DecodeInterference
    targets: _Targets = field(default_factory=_Targets)
    """Targets of the requests that decode."""
    own_targets: _Targets = field(default_factory=_Targets)
    """Targets of all requests that the engine has. They are known before there are decodes to protect, so that the
    throttle need not change in the middle of the engine's steps."""
    throttle: PrefillThrottle = FREE
    prefills_since: float = 0.0
    """When the prefill under way began; has no meaning while the model does not prefill."""
    prefilled_s: float = 0.0
    """Seconds that the model's prefill steps have taken ever, without the pauses between them."""

    @property
    def decoding(self) -> Decoding:
        return Decoding(self.interference.step_s, self.targets.least, self.interference.loss)

    @property
    def least_step_s(self) -> float:
        """Seconds of a decode step alone: with one request, or with several where these were quicker, because other
        models used the devices when the model was measured."""
        return min(self.prefilling.least_s, self.interference.step_s)

    def in_steps(self, lasted_s: float) -> float:
        """Seconds spent in steps during the first `lasted_s` seconds of a prefill: it begins with a step, and then
        keeps its share. Prompts of one step see no pause at all."""
        first_s = min(lasted_s, prefill_step_s(self.throttle.chunk_tokens, self.prefilling))
        return first_s + self.throttle.share * (lasted_s - first_s)


class ThrottleController:
    """Which models of a group decode and prefill, and the throttles that follow. Call `measured` for a model before any
    other method that names it (else KeyError)."""

    def __init__(self) -> None:
        self._rules = ThrottleRules()
        self._models: dict[str, _ThrottledModel] = {}
        self._prefilling: frozenset[str] = frozenset()
        self._counted_to = 0.0
        self._prefilled_s = 0.0
        """Seconds that all models' prefill steps have taken ever."""

    def measured(self, model: str, prefill_tokens_per_s: float, decode_step_s: float) -> None:
        """The model became active. Its speed alone: prefilled tokens per second, and seconds of a decode step with one
        request (0: unknown)."""
        prefilling = Prefilling(prefill_tokens_per_s, decode_step_s)
        known = self._models.setdefault(model, _ThrottledModel(prefilling, DecodeInterference(decode_step_s)))
        known.prefilling, known.interference.measured_s = prefilling, decode_step_s

    def forget(self, model: str) -> None:
        """Removes a model that has no requests; it has to be measured again before it is used."""
        self._models.pop(model, None)
        self._prefilling -= {model}

    def started(self, model: str, request_id: str, target_s: float) -> None:
        """The model's engine gets the request. `target_s`: the request's TPOT target."""
        self._models[model].own_targets.put(request_id, target_s)

    def decodes(self, model: str, request_id: str, target_s: float) -> None:
        """The request's first token is out: it decodes from now on. `target_s`: its TPOT target."""
        self._models[model].targets.put(request_id, target_s)

    def ended(self, model: str, request_id: str) -> None:
        """The model's engine no longer has the request. No effect if it never had it."""
        known = self._models.get(model)
        if known is None:
            return
        known.own_targets.pop(request_id)
        if known.targets.pop(request_id) and not known.targets:
            known.interference.stopped()

    def step(self, model: str, now: float, steps: int = 1) -> None:
        """A message with tokens of the model came: `steps` decode steps ended since the last."""
        known = self._models[model]
        if known.targets:
            self._count(now)
            known.interference.step(now, self._prefilled_s - known.prefilled_s, steps)

    def prefills(self, models: Collection[str], now: float) -> None:
        """Sets the models that have a prefill under way from now on."""
        self._count(now)
        before, self._prefilling = self._prefilling, frozenset(models)
        for name in self._prefilling - before:
            self._models[name].prefills_since = now
        for name, known in self._models.items():
            known.interference.prefills(name in self._prefilling)

    def _count(self, now: float) -> None:
        """Adds up the prefill time until now."""
        for known in (self._models[name] for name in self._prefilling):
            since = known.prefills_since
            more_s = known.in_steps(now - since) - known.in_steps(self._counted_to - since)
            known.prefilled_s += more_s
            self._prefilled_s += more_s
        self._counted_to = now

    def throttles(
        self, pressed: bool = False, late: Collection[str] = (), late_by: Callable[[str, float], bool] | None = None
    ) -> dict[str, PrefillThrottle]:
        """The prefill throttle of each model from now on. `pressed`: first tokens are late for want of prefill time, so
        that no engine pauses for its neighbours (`throttle.py`, "Who wins"). `late`: models with waiting requests that
        are late. `late_by`: whether prompts at a model's engine would be late if they took that many times as long as
        alone (None: never)."""
        bounds: dict[str, tuple[float, float]] = {}
        for name, known in self._models.items():
            if known.targets and not pressed:
                decoding = known.decoding
                bounds[name] = decoding.tolerates(self._rules), decoding.step_s
        for name, known in self._models.items():
            others = [bound for other, bound in bounds.items() if other != name] if name in bounds else bounds.values()
            at_once = len(self._prefilling) + (name not in self._prefilling)
            known.throttle = throttle_beside(known.prefilling, others, at_once, self._rules) if others else FREE
            if known.throttle.pause_ratio > 0 and late_by is not None and late_by(name, known.throttle.slowdown):
                known.throttle = PrefillThrottle(known.throttle.chunk_tokens)
            if known.own_targets:
                # A target that not even a step alone keeps is given up; the engine goes by the targets of its other
                # requests.
                target_s = known.own_targets.least_from(known.least_step_s / self._rules.margin)
                step_s = self._rules.margin * target_s
                known.throttle = PrefillThrottle(
                    known.throttle.chunk_tokens, known.throttle.pause_ratio, step_s, name in late
                )
        return {name: known.throttle for name, known in self._models.items()}
