"""The models of a group as arbitration sees them: how fast each prefills, and since or from when it is active.

Each model has an index; a *class* is an index and a chunk-size bucket in one number, so that the queue costs a request
by one look-up and one multiplication.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

from gpu_scheduler.policy.queue.slack import BUCKETS, PrefillSpeed, WaitingRequest

_NO_RATES = (0.0,) * BUCKETS


@dataclass(slots=True)
class QueuedModel:
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
    slowdown: float = 1.0
    """How many times as long its prefills take now (`throttle.py`), those that a single step is too small for."""
    step_tokens: int = 0
    """Prompt tokens of a step, where `slowdown` is not 1."""
    prefilled_at: float = -inf
    prefilled_s: float = 0.0
    """When a prompt of it ended last, and what it had taken alone."""
    _stretched: tuple[tuple[object, float, int], tuple[float, ...]] | None = None
    """The last `rates`, and what they were made of."""

    def wake_rest(self, now: float) -> float:
        """Seconds of its wake-up that are left."""
        return max(0.0, self.ready_at - now)

    def prefill_cost(self, request: WaitingRequest) -> float:
        """Seconds of the prefill turn, without any wake-up."""
        tokens = request.uncached_tokens
        return tokens * self.rates()[self.speed.bucket(tokens)]

    def stretched(self, tokens: int) -> float:
        """How many times as long a prefill of so many tokens takes now. One number for each bucket."""
        return self.slowdown if 1 << self.speed.bucket(tokens) > self.step_tokens else 1.0

    def rates(self) -> tuple[float, ...]:
        """Seconds per token by bucket."""
        alone = self.speed.seconds_per_token
        if self.slowdown == 1.0:
            return alone
        of = (alone, self.slowdown, self.step_tokens)
        if self._stretched is None or self._stretched[0] != of:
            rates = [
                rate * (self.slowdown if 1 << bucket > self.step_tokens else 1.0) for bucket, rate in enumerate(alone)
            ]
            self._stretched = of, tuple(rates)
        return self._stretched[1]

    def class_of(self, request: WaitingRequest) -> int:
        """Index and bucket in one number."""
        return self.index * BUCKETS + self.speed.bucket(request.uncached_tokens)


class QueuedModels:
    """The models by name. An unknown name raises KeyError."""

    def __init__(self) -> None:
        self._by_name: dict[str, QueuedModel] = {}
        self._by_index: list[QueuedModel | None] = []
        self._rates: tuple[list[tuple[float, ...]], NDArray[np.float64]] = [], np.zeros(0)
        """What the last answer of `rates` was made of, and it."""

    def __getitem__(self, name: str) -> QueuedModel:
        return self._by_name[name]

    def add(self, name: str, speed: PrefillSpeed) -> None:
        """A new model, not active yet."""
        if name in self._by_name:
            raise ValueError(f"model {name} is known already")
        index = self._by_index.index(None) if None in self._by_index else len(self._by_index)
        model = QueuedModel(index, speed)
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

    def waiting_of(self, name: str) -> int:
        """Of one; none of one that is not known."""
        model = self._by_name.get(name)
        return 0 if model is None else model.waiting

    def counted(self, classes: NDArray[np.int64]) -> dict[str, int]:
        """How many of these are of each model; who has none is left out."""
        counts = np.bincount(classes // BUCKETS, minlength=len(self._by_index)).tolist()
        return {name: counts[model.index] for name, model in self._by_name.items() if counts[model.index]}

    def rates(self) -> NDArray[np.float64]:
        """Seconds per token by class. The same array as long as they are the same."""
        by_index = [model.rates() if model else _NO_RATES for model in self._by_index]
        if by_index != self._rates[0]:
            self._rates = by_index, np.array(by_index).ravel()
        return self._rates[1]

    def ready(self, now: float) -> NDArray[np.float64] | None:
        """When requests may start, by class: now or later. None if that is now for all of them."""
        waking = [model for model in self._by_index if model is not None and model.ready_at > now]
        if not waking:
            return None
        ready = np.full((len(self._by_index), BUCKETS), now)
        for model in waking:
            ready[model.index] = model.ready_at
        return ready.ravel()
