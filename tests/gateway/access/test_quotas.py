"""What a key may use in a minute."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.access.keys import Key
from gateway.access.quota_storage import MINUTE_S, QuotaStorage, Window
from gateway.access.quotas import Quota
from gateway.errors import OverLimit


def key(**limits: int) -> Key:
    return Key(name="ann", hash="sha256:" + "0" * 64, **limits)


class Clock:
    """What `limits` takes for the time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 60_000.0  # a minute begins
        monkeypatch.setattr("time.time", lambda: self.now_s)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture
def quota(clock: Clock) -> Quota:
    return Quota(QuotaStorage(), "ann")


async def test_quota_requests_above_the_limit_are_refused_until_a_minute_has_passed(quota: Quota, clock: Clock) -> None:
    two = key(requests_per_minute=2)
    await quota.take_request(two)
    clock.now_s += 30
    await quota.take_request(two)
    with pytest.raises(OverLimit) as refused:
        await quota.take_request(two)
    assert (refused.value.kind, refused.value.retry_after_s) == ("requests", 60)
    clock.now_s += 60
    await quota.take_request(two)


async def test_quota_used_requests_stay_when_the_limit_changes(quota: Quota) -> None:
    for _ in range(3):
        await quota.take_request(key(requests_per_minute=3))
    with pytest.raises(OverLimit, match="Limit 2, Used 3"):
        await quota.take_request(key(requests_per_minute=2))
    await quota.take_request(key(requests_per_minute=4))
    await quota.take_request(key())


async def test_quota_tokens_are_reserved_while_an_answer_runs_and_counted_as_used_after(quota: Quota) -> None:
    thousand = key(tokens_per_minute=1000)
    first = await quota.hold(thousand, prompt=100, answers=800, answers_said=True)
    with pytest.raises(OverLimit, match="Limit 1000, Used 900, Requested 110"):
        await quota.hold(thousand, prompt=10, answers=100, answers_said=True)
    await first._settle(quota._tokens, 150)
    headers = dict(await quota.headers(thousand))
    assert (headers[b"x-ratelimit-limit-tokens"], headers[b"x-ratelimit-remaining-tokens"]) == (b"1000", b"850")
    await quota.hold(thousand, prompt=50, answers=800, answers_said=True)


async def test_quota_request_above_the_limit_is_refused_as_too_large(quota: Quota) -> None:
    with pytest.raises(OverLimit, match="too large") as refused:
        await quota.hold(key(tokens_per_minute=100), prompt=50, answers=51, answers_said=True)
    assert refused.value.retry_after_s is None


async def test_quota_answer_without_a_limit_reserves_what_is_left_of_a_small_quota(quota: Quota) -> None:
    small = key(tokens_per_minute=100)
    charge = await quota.hold(small, prompt=60, answers=512, answers_said=False)
    await charge._settle(quota._tokens, 400)  # it has happened, so it counts
    with pytest.raises(OverLimit):
        await quota.hold(small, prompt=1, answers=0, answers_said=False)


@given(
    previous=st.integers(0, 1000),
    into_s=st.floats(0, 59.9),
    current=st.integers(0, 1000),
    limit=st.integers(1, 1000),
    share=st.floats(0.001, 1),
)
def test_quota_window_fits_after_its_wait_and_not_before(
    previous: int, into_s: float, current: int, limit: int, share: float
) -> None:
    def after(wait_s: float) -> Window:
        """Of the same use, later."""
        at = into_s + wait_s
        if at < MINUTE_S:
            return Window(previous, MINUTE_S - at if previous else 0.0, current, 2 * MINUTE_S - at)
        return Window(current, max(0.0, 2 * MINUTE_S - at), 0, MINUTE_S)

    amount = max(1, int(limit * share))
    wait_s = after(0).wait_s(amount, limit)
    assert 0 <= wait_s <= 2 * MINUTE_S
    assert after(wait_s).used + amount <= limit + 1e-6
    if wait_s > 0.01:
        assert after(wait_s - 0.01).used + amount > limit
