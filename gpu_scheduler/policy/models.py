"""The models of a group as arbitration sees them: how fast each prefills, and since or from when it is active.

Each model has an index; a *class* is an index and a chunk-size bucket in one number, so that the queue costs a request
by one look-up and one multiplication.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from gpu_scheduler.policy.slack import BUCKETS, PrefillSpeed, Waiting

_NO_RATES = (0.0,) * BUCKETS


@dataclass(slots=True)
class Model:
    """One model; times in seconds."""

    index: int
    speed: PrefillSpeed
    active: bool = False
    ready_at: float = inf
    """When it is expected to be active; -inf when it is."""
    requests: int = 0
    """Requests in the backlog, in any state."""
    waiting: int = 0
    """Of them, those that wait."""
    stretch: float = 1.0
    """How many times as long its prefills take now (`pace.py`), those that a single step is too small for."""
    step_tokens: int = 0
    """Prompt tokens of a step, where `stretch` is not 1."""
    _stretched: tuple[tuple[object, float, int], tuple[float, ...]] | None = None
    """The last `rates`, and what they were made of."""

    def wake_rest(self, now: float) -> float:
        """Seconds of its wake-up that are left."""
        return max(0.0, self.ready_at - now)

    def prefill_cost(self, request: Waiting) -> float:
        """Seconds of the prefill turn, without any wake-up."""
        tokens = request.uncached_tokens
        return tokens * self.rates()[self.speed.bucket(tokens)]

    def stretched(self, tokens: int) -> float:
        """How many times as long a prefill of so many tokens takes now. One number for each bucket."""
        return self.stretch if 1 << self.speed.bucket(tokens) > self.step_tokens else 1.0

    def rates(self) -> tuple[float, ...]:
        """Seconds per token by bucket."""
        alone = self.speed.seconds_per_token
        if self.stretch == 1.0:
            return alone
        of = (alone, self.stretch, self.step_tokens)
        if self._stretched is None or self._stretched[0] != of:
            rates = [
                rate * (self.stretch if 1 << bucket > self.step_tokens else 1.0) for bucket, rate in enumerate(alone)
            ]
            self._stretched = of, tuple(rates)
        return self._stretched[1]

    def class_of(self, request: Waiting) -> int:
        """Index and bucket in one number."""
        return self.index * BUCKETS + self.speed.bucket(request.uncached_tokens)


class Models:
    """The models by name. An unknown name raises KeyError."""

    def __init__(self) -> None:
        self._by_name: dict[str, Model] = {}
        self._by_index: list[Model | None] = []

    def __getitem__(self, name: str) -> Model:
        return self._by_name[name]

    def add(self, name: str, speed: PrefillSpeed) -> None:
        """A new model, not active yet."""
        if name in self._by_name:
            raise ValueError(f"model {name} is known already")
        index = self._by_index.index(None) if None in self._by_index else len(self._by_index)
        model = Model(index, speed)
        self._by_index[index : index + 1] = [model]
        self._by_name[name] = model

    def remove(self, name: str) -> None:
        """Forget a model whose requests are gone."""
        model = self._by_name[name]
        if model.requests:
            raise ValueError(f"model {name} still has {model.requests} requests")
        del self._by_name[name]
        self._by_index[model.index] = None

    def waiting(self) -> dict[str, int]:
        """Requests that wait, by model."""
        return {name: model.waiting for name, model in self._by_name.items()}

    def rates(self) -> list[float]:
        """Seconds per token by class."""
        rates: list[float] = []
        for model in self._by_index:
            rates += model.rates() if model else _NO_RATES
        return rates

    def ready(self, now: float) -> list[float] | None:
        """When requests may start, by class: now or later. None if that is now for all of them."""
        by_index = [now if model is None else max(now, model.ready_at) for model in self._by_index]
        if all(at == now for at in by_index):
            return None
        return [at for at in by_index for _ in range(BUCKETS)]
