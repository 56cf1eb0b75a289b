"""Prefill steps go before the decode steps of neighbours: engines that share devices then behave as one engine does by
itself, first tokens first.

The driver gives processes on a GPU equal slices. A prefill step of P seconds beside k engines that decode thus takes (k
+ 1) P, while they go at k / (k + 1) of their speed: they lose P in all, and a first token waits k times as long as the
work takes. If they stand still instead they lose the same P, and the first token is out after P. On an H200 equal
slices are worse than that: a prefill step of a small model is bound by the host, which leaves gaps between kernels, and
each gap costs a slice. First tokens of models of 1B to 8B took 2 to 2.7 times as long beside one engine that decoded,
and 4.4 times beside two (docs/lab/gpu-runs.md).

**It is not for every prefill.** All decoding requests pay for the wait, and each prompt that is prefilled or queued
behind that at its engine gains as much. So an engine that decodes more than `prefill_priority_batch` requests for each
of these prompts does not wait: where many requests decode beside single prompts, they would pay with one or two
hundredths of their speed (smaller prefill steps, and idle gaps on the devices between them), which buys less than they
lose (docs/lab/tuning.md has both).

An engine waits for `prefill_priority_s` at most and then makes a step, so that claims of engines that died, or prefills
in an unbroken row, stop no decodes. The prefills' share of the time in the long run is the throttle's concern
(`throttle.py`); it learns what steps they cost (`interference.py`).
"""

from __future__ import annotations


def worth(prompts: int, requests: int, batch: int) -> bool:
    """Whether an engine's decode steps, of `requests` requests, wait for a prefill step that `prompts` prompts wait
    for. `batch`: most requests for each prompt; 0: any number."""
    return prompts > 0 and (batch == 0 or requests <= batch * prompts)
