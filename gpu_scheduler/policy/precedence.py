"""Prefill steps go before the decode steps of neighbours: engines that share devices then do what one engine does by
itself, first tokens first.

The driver gives processes on a GPU equal slices. A prefill step of P seconds beside k engines that decode thus takes
(k + 1) P, while they go at k / (k + 1) of their speed: they lose P in all, and a first token waits for that k times as
long as the work takes. If they stand still instead they lose the same P, and the first token is out after P. On an H200
it is worse than equal slices: a prefill step of a small model is bound by the host, which leaves gaps between kernels,
and each gap costs a slice. First tokens of models of 1B to 8B took 2 to 2.7 times as long beside one engine that
decoded, and 4.4 times beside two (docs/gpu.md).

Whoever decodes stands still for `precedence_s` at most and then makes a step, so that claims of engines that died, or
prefills that follow one another, stop nobody. What prefills may take of the time in the long run is the pace's matter
(`pace.py`); it learns what steps they cost (`beat.py`).
"""

from __future__ import annotations

from math import inf


class Precedence:
    """Of one engine's decode steps behind prefill steps of others. Seconds, on the caller's clock."""

    def __init__(self) -> None:
        self._since = inf

    def waits(self, claimed: bool, now: float, most_s: float) -> bool:
        """Whether the next decode step waits. `claimed`: a prefill step of another engine is under way. What was
        waited counts until there is a step: between two claims there may be time to look and none to make one."""
        if claimed:
            self._since = min(self._since, now)
        return claimed and now - self._since < most_s

    def stepped(self) -> None:
        """A step goes to the device."""
        self._since = inf
