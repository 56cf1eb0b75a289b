"""The models of a group as the shared queue sees them: how fast each prefills, and since or from when it is active.

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
    """One model of the queue; times in seconds."""

    index: int
    speed: PrefillSpeed
    active: bool = False
    ready_at: float = inf
    """When the model is expected to be active; -inf while it is active."""
    requests: int = 0
    """Requests of the model in the backlog, in any state."""
    waiting: int = 0
    """Requests of the model that wait."""
    slowdown: float = 1.0
    """Factor by which the throttle lengthens the model's prefills that take more than one step (`throttle.py`)."""
    step_tokens: int = 0
    """Most prompt tokens of a step, where `slowdown` is not 1."""
    prefilled_at: float = -inf
    prefilled_s: float = 0.0
    """End time and solo duration of the model's last prefill."""
    _stretched: tuple[tuple[object, float, int], tuple[float, ...]] | None = None
    """The last result of `rates`, behind the values that it was computed from."""

    def wake_rest(self, now: float) -> float:
        """Seconds left of the model's wake-up."""
        return max(0.0, self.ready_at - now)

    def prefill_cost(self, request: WaitingRequest) -> float:
        """Seconds of the prefill turn that a request takes, without any wake-up."""
        tokens = request.uncached_tokens
        return tokens * self.rates()[self.speed.bucket(tokens)]

    def stretched(self, tokens: int) -> float:
        """Factor by which the throttle lengthens a prefill of `tokens` tokens now. The same for all of a bucket."""
        return self.slowdown if 1 << self.speed.bucket(tokens) > self.step_tokens else 1.0

    def rates(self) -> tuple[float, ...]:
        """Seconds per token by bucket, as throttled now."""
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
        """The class of a request: the model's index and the request's bucket in one number."""
        return self.index * BUCKETS + self.speed.bucket(request.uncached_tokens)


class QueuedModels:
    """The models by name. An unknown name raises KeyError."""

    def __init__(self) -> None:
        self._by_name: dict[str, QueuedModel] = {}
        self._by_index: list[QueuedModel | None] = []
        self._rates: tuple[list[tuple[float, ...]], NDArray[np.float64]] = [], np.zeros(0)
        """The values that the last result of `rates` was computed from, and that result."""

    def __getitem__(self, name: str) -> QueuedModel:
        return self._by_name[name]

    def add(self, name: str, speed: PrefillSpeed) -> None:
        """Adds a model that is not active yet. Raises ValueError if the name is known already."""
        if name in self._by_name:
            raise ValueError(f"model {name} is known already")
        index = self._by_index.index(None) if None in self._by_index else len(self._by_index)
        model = QueuedModel(index, speed)
        self._by_index[index : index + 1] = [model]
        self._by_name[name] = model

    def remove(self, name: str) -> None:
        """Removes a model whose requests are gone. Raises ValueError if it has any."""
        model = self._by_name[name]
        if model.requests:
            raise ValueError(f"model {name} still has {model.requests} requests")
        del self._by_name[name]
        self._by_index[model.index] = None

    def waiting(self) -> dict[str, int]:
        """Waiting requests by model."""
        return {name: model.waiting for name, model in self._by_name.items()}

    def waiting_of(self, name: str) -> int:
        """Waiting requests of one model; 0 if the model is unknown."""
        model = self._by_name.get(name)
        return 0 if model is None else model.waiting

    def counted(self, classes: NDArray[np.int64]) -> dict[str, int]:
        """Counts `classes` by model; models without any are left out."""
        counts = np.bincount(classes // BUCKETS, minlength=len(self._by_index)).tolist()
        return {name: counts[model.index] for name, model in self._by_name.items() if counts[model.index]}

    def rates(self) -> NDArray[np.float64]:
        """Seconds per token by class. Returns the same array object while the numbers are the same."""
        by_index = [model.rates() if model else _NO_RATES for model in self._by_index]
        if by_index != self._rates[0]:
            self._rates = by_index, np.array(by_index).ravel()
        return self._rates[1]

    def ready(self, now: float) -> NDArray[np.float64] | None:
        """When requests may start, by class: `now` or later. None if that is `now` for all of them."""
        waking = [model for model in self._by_index if model is not None and model.ready_at > now]
        if not waking:
            return None
        ready = np.full((len(self._by_index), BUCKETS), now)
        for model in waking:
            ready[model.index] = model.ready_at
        return ready.ravel()
