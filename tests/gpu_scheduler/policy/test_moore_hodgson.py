"""Moore-Hodgson against all subsets."""

from itertools import combinations
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_scheduler.policy.moore_hodgson import Job, late_indices, schedule

# Sixteenths add up exactly, so that the tests compare without a tolerance.
sixteenths = st.integers(min_value=-32, max_value=160).map(lambda n: n / 16)
costs = st.integers(min_value=0, max_value=64).map(lambda n: n / 16)


@st.composite
def job_lists(draw, most=8):
    drawn = draw(st.lists(st.tuples(sixteenths, costs), max_size=most))
    return [Job(f"r{i}", deadline, cost) for i, (deadline, cost) in enumerate(drawn)]


def all_meet(jobs, start):
    """Whether the jobs, in order of deadline, all end in time: if any order does, that one does."""
    end = start
    for job in sorted(jobs, key=lambda job: job.deadline):
        end += job.cost
        if end > job.deadline:
            return False
    return True


def most_on_time(jobs, start):
    return max(n for n in range(len(jobs) + 1) for some in combinations(jobs, n) if all_meet(some, start))


@given(job_lists(), sixteenths)
def test_no_subset_has_more_requests_on_time(jobs, start):
    plan = schedule(jobs, start)
    assert len(plan.on_time) == most_on_time(jobs, start)


@given(job_lists(most=40), sixteenths)
def test_what_it_keeps_meets_every_deadline_and_nothing_is_lost(jobs, start):
    plan = schedule(jobs, start)
    by_id = {job.request_id: job for job in jobs}
    kept = [by_id[request_id] for request_id in plan.on_time]
    assert all_meet(kept, start)
    assert [job.deadline for job in kept] == sorted(job.deadline for job in kept)
    assert sorted(plan.on_time + plan.late) == sorted(by_id)


@given(job_lists(most=40), sixteenths)
def test_a_request_that_no_order_can_save_costs_no_other_its_place(jobs, start):
    hopeless = Job("hopeless", deadline=start + 1.0, cost=1.0625)
    assert set(schedule([*jobs, hopeless], start).on_time) == set(schedule(jobs, start).on_time)


@given(st.lists(st.tuples(costs, st.integers(-16, 32)), max_size=60))
def test_long_queues_with_deadlines_about_where_they_end_are_settled_as_on_paper(drawn):
    """The algorithm as it is written down: a list, the longest of it found by looking at all."""
    jobs, end = [], 0.0
    for i, (cost, spare) in enumerate(drawn):
        end += cost / 2
        jobs.append(Job(f"r{i}", end + spare / 16, cost))
    kept, time = [], 0.0
    for job in sorted(jobs, key=lambda job: job.deadline):
        kept.append(job)
        time += job.cost
        if time > job.deadline:
            longest = max(kept, key=lambda job: job.cost)
            kept.remove(longest)
            time -= longest.cost
    assert schedule(jobs, 0.0).on_time == tuple(job.request_id for job in kept)


SCENARIOS = """
    case                                  start  jobs (id deadline cost)                     on time    late
    nothing waits                         0      -                                           -          -
    all fit                               0      a 2 1, b 4 2, c 6 2                         a b c      -
    the order is by deadline              0      a 9 1, b 3 1, c 6 1                         b c a      -
    ending at the deadline is in time     0      a 1 1, b 2 1                                a b        -
    the longest goes, not the last        0      a 3 3, b 4 1, c 4.5 1                       b c        a
    one long one for two short ones       0      long 5 4, s 6 2, t 7 3                      s t        long
    dispatched work comes first           2      a 2.5 1, b 9 1                              b          a
    a deadline that has passed            5      a 4 1, b 9 1                                b          a
    best effort never is late             0      a inf 99, b 1 1, c inf 1                    b a c      -
    equally long: the earlier deadline    0      a 1 1, b 1.5 1, c 2.5 1                     b c        a
"""


def scenarios():
    for line in SCENARIOS.strip().splitlines()[1:]:
        yield [field.strip() for field in line.split("  ") if field.strip()]


@pytest.mark.parametrize(("case", "start", "jobs", "on_time", "late"), list(scenarios()))
def test_scenario(case, start, jobs, on_time, late):
    parsed = [job.split() for job in jobs.split(",")] if jobs != "-" else []
    plan = schedule([Job(name, float(deadline), float(cost)) for name, deadline, cost in parsed], float(start))
    assert " ".join(plan.on_time) == on_time.strip("-")
    assert " ".join(plan.late) == late.strip("-")


def test_an_infinite_cost_is_late_and_delays_nobody():
    assert late_indices([1.0, 2.0, 3.0, inf], [1.0, inf, 1.0, inf], 0.0) == [1]
    assert late_indices([0.5, 2.0, 3.0], [1.0, inf, 1.0], 0.0) == [0, 1]
