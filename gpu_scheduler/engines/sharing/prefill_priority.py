"""Prefill steps go before the decode steps of neighbours: engines that share devices then do what one engine does by
itself, first tokens first.

The driver gives processes on a GPU equal slices. A prefill step of P seconds beside k engines that decode thus takes
(k + 1) P, while they go at k / (k + 1) of their speed: they lose P in all, and a first token waits for that k times as
long as the work takes. If they stand still instead they lose the same P, and the first token is out after P. On an H200
it is worse than equal slices: a prefill step of a small model is bound by the host, which leaves gaps between kernels,
and each gap costs a slice. First tokens of models of 1B to 8B took 2 to 2.7 times as long beside one engine that
decoded, and 4.4 times beside two (docs/lab/gpu-runs.md).

**It is not for every prefill.** What standing still costs, all that decode pay, and of what it spares, as much goes to
each prompt that is prefilled or waits behind that at its engine. So nobody stands still who decodes for more than
`precedence_batch` requests for each of them: where many decode beside single prompts, they would pay with one or two
hundredths of their pace (smaller prefill steps, and the devices with nothing to do between them), which buys less than
they lose (docs/lab/tuning.md has both).

Whoever decodes stands still for `precedence_s` at most and then makes a step, so that claims of engines that died, or
prefills that follow one another, stop nobody. What prefills may take of the time in the long run is the pace's matter
(`throttle.py`); it learns what steps they cost (`interference.py`).
"""

from __future__ import annotations

from math import inf


def worth(prompts: int, requests: int, batch: int) -> bool:
    """Whether decode steps of so many `requests` wait for a prefill step that so many `prompts` wait for. `batch`: the
    most requests for each prompt; 0: however many."""
    return prompts > 0 and (batch == 0 or requests <= batch * prompts)


class PrefillPriority:
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
