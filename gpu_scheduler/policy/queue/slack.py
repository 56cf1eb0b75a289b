"""The prefill cost of a request, and the time it has left.

    e     = uncached prompt tokens / prefill speed * slowdown + the rest of the model's wake-up    (seconds)
    slack = deadline - e - now                                                                     (seconds)

The *latest start* of a request is `deadline - e`: slack reaches zero there. A request without a target is best effort
and has the deadline +inf. The cost follows the Prism paper's request arbitration (e_r = p_r / c_r); the paper takes one
c for a model, here it depends on the size of the chunk, because small chunks leave the device half empty.

Times are seconds on the clock of the gpu_scheduler; speeds are seconds per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import inf

BUCKETS = 18
"""Chunk sizes by power of two: bucket b holds chunks of 2^(b-1)+1 .. 2^b tokens; the last one all above 65,536."""


@dataclass(frozen=True, slots=True)
class WaitingRequest:
    """The facts about one request of the shared queue."""

    request_id: str
    model: str
    arrival: float
    """When the request entered the system; kept when it is retracted or replayed."""
    deadline: float = inf
    """When the first token is due: arrival + TTFT target; +inf for best effort."""
    prompt_tokens: int = 1
    cached_tokens: int = 0
    """Tokens of the prompt that the engine reported as a prefix hit, once it runs."""
    decode_tokens: int = 0
    """Forecast of the tokens that the request will generate; counted for memory alone, not for time."""
    expires: float = inf
    """When the request times out: it is thrown away if it still waits then; +inf: never."""
    drop_late: bool = False
    """True if the client asked (`x-slo-drop: late`) that the request be thrown away instead of served late."""

    @property
    def uncached_tokens(self) -> int:
        """Tokens to prefill; at least one, because the last token is always computed."""
        return max(1, self.prompt_tokens - self.cached_tokens)


def bucket_of(tokens: int) -> int:
    """The bucket of a chunk of `tokens` tokens."""
    return min((tokens - 1).bit_length(), BUCKETS - 1) if tokens > 1 else 0


class PrefillSpeed:
    """How fast one model prefills on this group: an assumed start value, the value that its engine measures of itself
    in place of that, then a moving average for each chunk size.

    A bucket without a value of its own borrows that of the nearest one that has one (the larger of two equally near),
    or the assumed value while there is none.
    """

    def __init__(self, tokens_per_s: float, *, chunk_tokens: int = 8192, weight: float = 0.25) -> None:
        """`tokens_per_s`: the assumed speed; `chunk_tokens`: most tokens of a chunk that a prompt is cut into;
        `weight`: how much a new observation counts in the moving average (0.25: the last 8 chunks make 90 % of it).
        Raises ValueError if a number is out of its range."""
        if not tokens_per_s > 0 or not chunk_tokens > 0 or not 0 < weight <= 1:
            raise ValueError(f"bad prefill speed: {tokens_per_s=} {chunk_tokens=} {weight=}")
        self.chunk_tokens = chunk_tokens
        self._weight = weight
        self._observed: dict[int, float] = {}
        self._nearest: list[int] = []
        """For each bucket, the observed bucket that it borrows from."""
        self.seconds_per_token: tuple[float, ...] = (1.0 / tokens_per_s,) * BUCKETS
        """Seconds per token by bucket; always complete, so that a queue can cost all its requests without a call for
        each."""

    def __repr__(self) -> str:
        seen = {1 << b: round(1 / s) for b, s in sorted(self._observed.items())}
        at_best = 1 / self.seconds_per_token[self.bucket(self.chunk_tokens)]
        return f"PrefillSpeed({at_best:.0f} tokens/s, observed={seen})"

    def bucket(self, tokens: int) -> int:
        """The bucket that decides the cost of a prompt of `tokens` uncached tokens."""
        return bucket_of(min(tokens, self.chunk_tokens))

    def cost(self, tokens: int) -> float:
        """Seconds to prefill `tokens` tokens."""
        return tokens * self.seconds_per_token[self.bucket(tokens)]

    def observe(self, tokens: int, seconds: float) -> None:
        """Records that a chunk of `tokens` tokens took `seconds`. Ignores values that cannot be a measurement."""
        if tokens <= 0 or not 0 < seconds < inf:
            return
        before = self.seconds_per_token[self.bucket(tokens)]
        self._believe(tokens, before + self._weight * (seconds / tokens - before))

    def measured(self, tokens: int, seconds: float) -> None:
        """Records that the engine measured `seconds` of itself for a chunk of `tokens` tokens. Nothing that was only
        assumed counts beside it; beside a value that the chunk's bucket has already it is one observation more."""
        if self.bucket(tokens) in self._observed:
            self.observe(tokens, seconds)
        elif tokens > 0 and 0 < seconds < inf:
            self._believe(tokens, seconds / tokens)

    def _believe(self, tokens: int, seconds_per_token: float) -> None:
        """Sets the value of the bucket of chunks of `tokens` tokens."""
        b = self.bucket(tokens)
        is_new = b not in self._observed
        self._observed[b] = seconds_per_token
        if is_new:
            known = sorted(self._observed, reverse=True)
            self._nearest = [min(known, key=partial(_distance, other)) for other in range(BUCKETS)]
        self.seconds_per_token = tuple(map(self._observed.__getitem__, self._nearest))


def _distance(a: int, b: int) -> int:
    return abs(a - b)


def cost(request: WaitingRequest, speed: PrefillSpeed, wake_rest: float = 0.0, slowdown: float = 1.0) -> float:
    """The cost e in seconds. `wake_rest`: what is left of the model's wake-up (0 for an active model); `slowdown`:
    factor by which its prefill takes longer than `speed` says."""
    return speed.cost(request.uncached_tokens) * slowdown + wake_rest


def latest_start(request: WaitingRequest, e: float) -> float:
    """The last moment at which the request may start and still meet its deadline."""
    return request.deadline - e


def slack(request: WaitingRequest, e: float, now: float) -> float:
    """Seconds until the latest start; negative once the deadline can no longer be met."""
    return request.deadline - e - now
