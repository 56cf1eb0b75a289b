import threading

from balloond.driver.kv.reports import Reports, coarse
from tests.balloond.conftest import TIMEOUT_S
from tests.balloond.driver.fakes import FakeLease


def test_reports_of_many_prefixes_are_merged_into_few_entries_that_are_not_older():
    cached = [(float(age), 1) for age in range(1000)]
    told = coarse(cached)
    assert len(told) <= 64
    assert sum(nbytes for _, nbytes in told) == 1000
    assert [age for age, _ in told] == sorted((age for age, _ in told), reverse=True)
    assert told[0][0] < 999 and told[-1][0] == 0
    assert coarse([]) == ()


def test_reports_leave_out_unchanged_usage_but_not_an_answer_to_a_reclaim():
    lease = FakeLease()
    reports = Reports(lease, lambda: (30, 10))
    told = threading.Event()
    lease.report = lambda usage: (lease.reports.append(usage), told.set())
    reports.usage(7, [])
    assert told.wait(TIMEOUT_S)
    reports.usage(7, [])
    reports.usage(7, ())
    lease.settle()
    assert [(usage.held, usage.used, usage.reserve) for usage in lease.reports] == [(30, 7, 10)]
    lease.loop.call(lambda: reports.send(reclaim_id=3, returned=5))
    lease.settle()
    assert (lease.reports[-1].reclaim_id, lease.reports[-1].returned) == (3, 5)
    lease.loop.stop()


def test_reports_of_equal_prefix_ages_are_sent_again_because_the_prefixes_were_used_again():
    lease = FakeLease()
    reports = Reports(lease, lambda: (30, 10))
    told = threading.Semaphore(0)
    lease.report = lambda usage: (lease.reports.append(usage), told.release())
    for _ in range(3):
        reports.usage(7, [(0.0, 20)])
        assert told.acquire(timeout=TIMEOUT_S)
    assert [nbytes for usage in lease.reports for _, nbytes in usage.cached] == [20, 20, 20]
    assert all(age_s >= 0 for usage in lease.reports for age_s, _ in usage.cached)
    lease.loop.stop()


def test_reports_of_many_changes_are_few_and_end_with_the_last_state():
    lease = FakeLease()
    reports = Reports(lease, lambda: (0, 0))
    last = threading.Event()
    lease.report = lambda usage: (lease.reports.append(usage), usage.used == 1000 and last.set())
    for used in range(1, 1001):
        reports.usage(used, ())
    assert last.wait(TIMEOUT_S)
    assert len(lease.reports) < 500
    lease.loop.stop()
