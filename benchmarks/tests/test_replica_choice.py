"""The toy of groups with cached prefixes."""

from __future__ import annotations

from benchmarks.replica_choice import SPEED, TTFT_S, PromptMix, ToyGroup, on_time
from gateway.policy.replica_choice import choose

MIX = PromptMix(beginnings=3, kept=2, shared=8000, own=800)


def test_toy_group_prefills_one_prompt_after_the_other_and_keeps_the_beginnings_used_last() -> None:
    group = ToyGroup()
    firsts = [group.take(0.0, beginning, 1.0, 5.0, MIX.kept) for beginning in (0, 1, 2)]
    assert firsts == [1.0, 2.0, 3.0]
    group.tell(0.5)
    told = [group.outlook(1.0, beginning, MIX) for beginning in (0, 1, 2)]
    assert [each.cached_tokens for each in told] == [0, 8000, 8000]
    assert {(each.requests, each.queue_s, each.tokens_per_s) for each in told} == {(3, 2.0, SPEED)}


def test_every_first_token_is_on_time_where_requests_are_rare_and_none_where_they_are_too_many() -> None:
    rare, many = (on_time(choose, MIX, 2, rate, seed=1) for rate in (0.01, 1000.0))
    assert rare == 1.0 and many < 0.01
    assert MIX.shared + MIX.own < SPEED * TTFT_S
