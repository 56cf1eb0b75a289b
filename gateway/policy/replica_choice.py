"""Which of the groups that serve a model gets its next request.

First those where its first token would be on time, then those that do not have clearly more of the model's requests
than another, then the one that has most of the prompt in its cache, then the one with the fewest requests. So a cached
prefix decides only while its group is not late and not clearly busier: what it saves is counted in the seconds until
the first token. A request without a target counts as on time as long as it would begin within PATIENT_S, or where no
other group would begin it sooner.

The number of requests stands for what seconds of prefill do not show: KV memory, and the size of the decoding batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

AHEAD, AHEAD_SHARE = 4, 0.25
"""Requests of the model, and their share, that a group may have more than the least busy one and still get a request
whose prefix it has."""
PATIENT_S = 1.0
"""Seconds until the first token within which a group is not too busy for a request without a target."""


@dataclass(frozen=True, slots=True)
class GroupOutlook:
    """What a new request of a model meets at one of its groups."""

    requests: int
    """The model's requests there, waiting and running."""
    queue_s: float = 0.0
    """Seconds of prefill that come before the request's; 0 if they are not known."""
    tokens_per_s: float = inf
    """Prompt tokens that the model prefills there in a second; +inf if it is not known."""
    cached_tokens: int = 0
    """Tokens at the beginning of its prompt that the group has probably cached."""

    def first_token_s(self, prompt_tokens: int) -> float:
        """Seconds until the first token of a prompt of so many tokens."""
        return self.queue_s + max(1, prompt_tokens - self.cached_tokens) / self.tokens_per_s


@dataclass(slots=True)
class SentWork:
    """Seconds of prefill that were sent to a group and that its last outlook does not count. The group works them off
    as time passes, whether or not it tells another outlook: an outlook that is the same as before is not told again."""

    seconds: float = 0.0
    """Seconds of prefill that were left to do at the time `at`."""
    at: float = 0.0
    """Time at which `seconds` were left, in seconds of the caller's clock."""

    def left_s(self, now: float) -> float:
        """Seconds of prefill that are left to do at the time `now`."""
        return max(0.0, self.seconds - max(0.0, now - self.at))

    def add(self, seconds: float, now: float) -> None:
        """Adds seconds of prefill that are sent to the group at the time `now`."""
        self.seconds, self.at = self.left_s(now) + seconds, now


def choose(outlooks: Sequence[GroupOutlook], prompt_tokens: int, left_s: float = inf) -> int:
    """The number of the group that gets the request. `left_s`: seconds until its first token is late; +inf: it has no
    target."""
    soonest = min(each.first_token_s(prompt_tokens) for each in outlooks)
    bound_s = left_s if left_s < inf else max(PATIENT_S, soonest)
    calm = min(each.requests for each in outlooks)
    most = calm + max(AHEAD, AHEAD_SHARE * calm)

    def badness(number: int) -> tuple[bool, bool, int, int, float]:
        each = outlooks[number]
        first_s = each.first_token_s(prompt_tokens)
        return first_s > bound_s, each.requests > most, -each.cached_tokens, each.requests, first_s

    return min(range(len(outlooks)), key=badness)
