"""How long an engine's own decodes may stand still behind its own prefills.

An engine prefills or decodes, never both, and SGLang prefills as long as there is something to prefill: behind a queue
that does not end, what has its first token never gets the second. Neighbours are protected from that by pauses
(`pace.py`), of which each is a share of the step before. Here the loss is exactly 1, and the engine itself sees every
step, so that it needs to know nothing but the mean step that its tightest target allows, `step_s` (`Pace.step_s`).

**The lead** is how far decodes are ahead of one step each `step_s`: it grows by `step_s` with every decode step and
falls with the time that passes. While it is above zero everything is as without it: prefill first. Then decode steps
come first until it is above zero again, at least one. Prefills that never end thus get 1 - s / step_s of the time,
where s is a decode step, and decodes a mean of step_s.

It has a bound, `lead_s`: what has just got its first token has decoded nothing yet, and is protected with the others. A
time that it stands still is spread over all of its tokens, so that the bound is a step for every twelve tokens that
nearly all requests of the model come to (`OutputForecast.least`), and one where they are fewer.

So has the debt: that lead and the prefill step before. It is never more where the target can be kept, since each step
is then made good before the next one. Where it cannot, what is beyond was lost by requests that have ended by and by:
later ones get nothing for it, and first tokens would wait a third longer until all of it were paid.

**At most** a third of what the prefill step before took is spent on that (`PaceRules.own_least_share`), more than one
step only within it. Neighbours get three quarters, their prefills one. Here that costs more than it brings: where even
an engine that did nothing else could not keep the target, because its neighbours decode too, every first token would
wait for nothing.
"""

from __future__ import annotations

from gpu_scheduler.policy.pace import Pace, PaceRules


class Lead:
    """Of one engine. Seconds, on the caller's clock."""

    def __init__(self, rules: PaceRules | None = None) -> None:
        self._hold_ratio = 1 / (rules or PaceRules()).own_least_share - 1
        self._ahead_s: float | None = None
        """At `_at`. None: nothing has begun to decode since `alone`, or nothing bounded."""
        self._at = 0.0
        self._most_behind_s = 0.0
        self._hold_until = 0.0

    def alone(self) -> None:
        """A prefill step begins while nothing decodes."""
        self._ahead_s = None

    def prefilled(self, now: float, took_s: float, pace: Pace) -> None:
        """A prefill step ended. Where nothing decoded before, what does now has all of the lead."""
        self._hold_until = now + self._hold_ratio * took_s
        self._most_behind_s = pace.lead_s + took_s
        if self._ahead_s is None and pace.step_s > 0:
            self._ahead_s, self._at = pace.lead_s, now

    def decoded(self, began: float, now: float, pace: Pace, steps: int = 1) -> None:
        """So many decode steps began at `began`, of which the last ends `now`. For one that only begins both are the
        same."""
        if pace.step_s == 0:
            self._ahead_s = None
        elif self._ahead_s is not None:
            most_s = pace.lead_s - (now - began) / steps
            ahead_s = self._ahead_s - (now - self._at) + steps * pace.step_s
            self._ahead_s, self._at = max(-self._most_behind_s, min(most_s, ahead_s)), now

    def ahead_s(self, now: float) -> float:
        """Below 0: decodes are behind. 0 where there is no lead."""
        return 0.0 if self._ahead_s is None else max(-self._most_behind_s, self._ahead_s - (now - self._at))

    def hold_s(self, now: float) -> float:
        """For how long decode steps come before the next prefill step, unless the lead is there before. Decode steps
        are not broken off: one that began in time runs to its end."""
        return max(0.0, self._hold_until - now) if self.ahead_s(now) < 0 else 0.0
