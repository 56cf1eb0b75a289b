"""Each model's share of the demand on a group, by which the balloon policy compares models when running decodes have to
give up memory.

    w = tokens/s * KV bytes per token / TPOT target        (bytes/s^2, the same measure as placement's demand)

Tokens per second decay exponentially, so that a burst counts at once and its weight halves every `HALF_LIFE_S` seconds.
"""

from __future__ import annotations

from math import exp, log

HALF_LIFE_S = 10.0


class TokenRate:
    """Tokens per second of one model, as an exponentially decaying average."""

    def __init__(self, half_life_s: float = HALF_LIFE_S) -> None:
        self._decay = log(2) / half_life_s
        self._mass = 0.0
        self._at = 0.0

    def observe(self, tokens: int, now: float) -> None:
        """Records that `tokens` were processed by `now` (seconds; never earlier than before)."""
        self._mass = self._left(now) + tokens
        self._at = now

    def rate(self, now: float) -> float:
        """Tokens per second; the average of a steady rate is that rate."""
        return self._left(now) * self._decay

    def _left(self, now: float) -> float:
        return self._mass * exp(-self._decay * max(0.0, now - self._at))


def weight(tokens_per_s: float, kv_bytes_per_token: int, tpot_ms: float) -> float:
    """The demand w of one model, in bytes/s^2. `kv_bytes_per_token`: of a token of a long request, as placement's
    demand has it; `tpot_ms`: its TPOT target; 0: 100 ms."""
    return tokens_per_s * kv_bytes_per_token / ((tpot_ms or 100.0) / 1e3)


def changed(old: dict[str, float], new: dict[str, float], share: float = 0.1) -> bool:
    """Whether a model came or went, or any model's share of demand differs by more than `share` of all demand. Smaller
    changes are not worth a report."""
    total_old, total_new = sum(old.values()), sum(new.values())
    names = old.keys() | new.keys()
    part = {n: old.get(n, 0.0) / total_old if total_old else 0.0 for n in names}
    fresh = {n: new.get(n, 0.0) / total_new if total_new else 0.0 for n in names}
    return old.keys() != new.keys() or any(abs(part[n] - fresh[n]) > share for n in names)
