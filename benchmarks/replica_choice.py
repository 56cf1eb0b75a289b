"""Which group a request goes to, where prompts begin alike: on time, by the rule of `gateway/policy/replica_choice.py`,
by the rule before (the prefix first, unless its group has clearly more requests), and by the soonest first token.

    python benchmarks/replica_choice.py

A toy, since simulated engines have no cached prefixes: the groups of one model prefill 8,000 tokens a second, one
prompt after the other, and keep the beginnings of prompts that were used last. Outlooks are told every 0.1 s.
"""

from __future__ import annotations

import random
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gateway.policy.replica_choice import AHEAD, AHEAD_SHARE, GroupOutlook, choose

SPEED = 8000.0
TOLD_S = 0.1
TTFT_S = 2.0
DECODE_S = 5.0
"""Mean seconds of an answer after its first token."""
REQUESTS, SEEDS = 6000, (1, 2, 3)
Rule = Callable[[Sequence[GroupOutlook], int, float], int]


def prefix_first(outlooks: Sequence[GroupOutlook], prompt_tokens: int, left_s: float) -> int:
    calm = min(each.requests for each in outlooks)
    most = calm + max(AHEAD, AHEAD_SHARE * calm)
    numbers = range(len(outlooks))
    return min(numbers, key=lambda i: (outlooks[i].requests > most, -outlooks[i].cached_tokens, outlooks[i].requests))


def soonest(outlooks: Sequence[GroupOutlook], prompt_tokens: int, left_s: float) -> int:
    return min(range(len(outlooks)), key=lambda i: outlooks[i].first_token_s(prompt_tokens))


@dataclass(frozen=True, slots=True)
class PromptMix:
    """How prompts begin: `beginnings` of `shared` tokens, the first the most common, with `own` tokens behind them, and
    of how many beginnings a group has room for the KV."""

    beginnings: int
    kept: int
    shared: int
    own: int


class ToyGroup:
    def __init__(self) -> None:
        self.free_at = 0.0
        self.told = (0.0, 0.0)
        """Second of the last outlook, and seconds of prefill in it."""
        self.sent_s = 0.0
        self.cached: OrderedDict[int, None] = OrderedDict()
        self.ends: list[float] = []

    def tell(self, now: float) -> None:
        self.told, self.sent_s = (now, max(0.0, self.free_at - now)), 0.0

    def outlook(self, now: float, beginning: int, mix: PromptMix) -> GroupOutlook:
        while self.ends and self.ends[0] < now:
            heappop(self.ends)
        at, queue_s = self.told
        cached = mix.shared if beginning in self.cached else 0
        return GroupOutlook(len(self.ends), max(0.0, queue_s - (now - at)) + self.sent_s, SPEED, cached)

    def take(self, now: float, beginning: int, seconds: float, decode_s: float, kept: int) -> float:
        """The seconds until the first token."""
        self.sent_s += seconds
        self.cached[beginning] = None
        self.cached.move_to_end(beginning)
        while len(self.cached) > kept:
            self.cached.popitem(last=False)
        self.free_at = max(self.free_at, now) + seconds
        heappush(self.ends, self.free_at + decode_s)
        return self.free_at - now


def on_time(rule: Rule, mix: PromptMix, groups: int, rate: float, seed: int) -> float:
    """Share of the requests whose first token came in TTFT_S."""
    drawn, now, told_at, met = random.Random(seed), 0.0, 0.0, 0
    weights = [1 / (number + 1) for number in range(mix.beginnings)]
    there, tokens = [ToyGroup() for _ in range(groups)], mix.shared + mix.own
    for _ in range(REQUESTS):
        now += drawn.expovariate(rate)
        if now - told_at > TOLD_S:
            told_at = now
            for group in there:
                group.tell(now)
        (beginning,) = drawn.choices(range(mix.beginnings), weights)
        outlooks = [group.outlook(now, beginning, mix) for group in there]
        chosen = rule(outlooks, tokens, TTFT_S)
        seconds = (tokens - outlooks[chosen].cached_tokens) / SPEED
        decode_s = DECODE_S * drawn.uniform(0.5, 1.5)
        met += there[chosen].take(now, beginning, seconds, decode_s, mix.kept) <= TTFT_S
    return met / REQUESTS


MIXES = {
    "12,000 of 40 kinds and 500": (PromptMix(40, 20, 12_000, 500), ((2, 3.0), (2, 5.0), (2, 6.0), (4, 10.0))),
    "4,000 of one kind and 4,000": (PromptMix(1, 1, 4_000, 4_000), ((2, 2.0), (2, 3.0))),
}
"""Tokens of prompts -> the mix, and numbers of groups with requests a second."""


def main() -> None:
    print("| prompts, groups, requests/s | prefix first | soonest | choose |\n|---|---|---|---|")
    for name, (mix, loads) in MIXES.items():
        for groups, rate in loads:
            shares = [
                100 * sum(on_time(rule, mix, groups, rate, seed) for seed in SEEDS) / len(SEEDS)
                for rule in (prefix_first, soonest, choose)
            ]
            print(f"| {name}, {groups}, {rate:g} | " + " | ".join(f"{share:.1f}" for share in shares) + " |")


if __name__ == "__main__":
    main()
