"""Rates and times left."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loader.policy.rate import WINDOW_S, TransferRate


def seen(*samples):
    pace = TransferRate()
    for now, done in samples:
        pace = pace.seen(now, done)
    return pace


def test_transfer_rate_is_unknown_before_time_has_passed():
    assert TransferRate().per_s() is None and TransferRate().left_s(10) is None
    assert seen((5, 0)).per_s() is None and seen((5, 0)).left_s(10) is None
    assert seen((5, 0), (5, 3)).per_s() is None


def test_steady_transfer_rate_gives_the_time_left():
    pace = seen(*((t / 10, 100 * t / 10) for t in range(30)))
    assert pace.per_s() == pytest.approx(100)
    assert pace.left_s(290 + 50) == pytest.approx(0.5)


def test_transfer_rate_ignores_samples_before_its_window():
    pace = seen((0, 0), (1, 1000), (2, 1010), (3, 1020), (3.5, 1025))
    assert pace.per_s() == pytest.approx(10)


def test_stalled_transfer_has_no_time_left():
    pace = seen((0, 5), (0.5, 5), (1.0, 5))
    assert pace.per_s() == 0 and pace.left_s(10) is None
    assert pace.left_s(5) == 0


def test_transfer_rate_keeps_few_of_many_samples():
    assert len(seen(*((t / 1000, t) for t in range(5000))).samples) <= WINDOW_S / 0.05 + 2


@given(st.lists(st.tuples(st.floats(0, 2), st.integers(0, 1 << 40)), max_size=60))
def test_transfer_rate_is_never_negative_and_covers_about_the_window(steps):
    now = done = 0.0
    pace = TransferRate()
    for dt, more in steps:
        now, done = now + dt, done + more
        pace = pace.seen(now, done)
        assert (pace.per_s() or 0) >= 0 and (pace.left_s(done + 1) or 0) >= 0
        assert all(now - then <= WINDOW_S for then, _ in pace.samples[1:])
        assert pace.samples[-1] == (now, done)
