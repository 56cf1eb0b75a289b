"""Moore-Hodgson against all orders, all subsets, and a dynamic program.

What "every instance" means below: times are integers, the start is 0 (moving all times changes nothing), and requests
come by deadline, those with the same deadline in every order: `schedule` sorts first, and its sort keeps that order.

    n <= 4   costs 0..3, deadlines 0..4    against all orders of all requests         10,626 instances
    n <= 6   costs 1..3, deadlines 1..5    against all subsets        190,474 instances
    n <= 8   costs 1..3, deadlines 2 4 6   against all subsets        401,041 instances
    n = 7, 8 costs 0..12, deadlines 0..40  against all subsets         50,000 drawn from a fixed seed
    n <= 300                               against the dynamic program, drawn
"""

import random
from itertools import combinations, combinations_with_replacement, permutations, product
from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_scheduler.policy.queue.moore_hodgson import (
    Job,
    ascending,
    dropped,
    few_late,
    late_indices,
    many_late,
    schedule,
)

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
def test_schedule_has_as_many_requests_on_time_as_the_best_subset(jobs, start):
    plan = schedule(jobs, start)
    assert len(plan.on_time) == most_on_time(jobs, start)


def on_time(jobs):
    """How many (deadline, cost) end in time if all of them run in this order, from 0."""
    end = met = 0
    for deadline, cost in jobs:
        end += cost
        met += end <= deadline
    return met


def test_schedule_of_up_to_four_requests_has_as_many_on_time_as_the_best_order():
    kinds = list(product(range(5), range(4)))
    for n in range(5):
        for jobs in combinations_with_replacement(kinds, n):
            deadlines, costs = [deadline for deadline, _ in jobs], [cost for _, cost in jobs]
            expected = max(map(on_time, permutations(jobs)))
            assert n - len(dropped(deadlines, costs, 0)) == expected, jobs


def instances(deadlines, costs, most):
    """Every instance of up to `most` requests, with the most requests of any of its subsets that can all be on time.

    A tree: each request is added behind those before it. `subsets` are the (number of requests, sum of costs) of all
    subsets that meet their deadlines; with one more request each of them stays, or takes the request in if that ends in
    time. None is ever given up for another: that is all subsets, counted once where number and sum are the same.
    """

    def grow(some, subsets):
        yield [deadline for deadline, _ in some], [cost for _, cost in some], max(n for n, _ in subsets)
        if len(some) == most:
            return
        for deadline in deadlines:
            if some and deadline < some[-1][0]:
                continue
            for cost in costs:
                taken = {(n + 1, end + cost) for n, end in subsets if end + cost <= deadline}
                yield from grow([*some, (deadline, cost)], subsets | taken)

    return grow([], {(0, 0)})


@pytest.mark.parametrize(
    ("deadlines", "costs", "most", "number"),
    [((1, 2, 3, 4, 5), (1, 2, 3), 6, 190_474), ((2, 4, 6), (1, 2, 3), 8, 401_041)],
    ids=["up to six requests", "up to eight requests"],
)
def test_schedule_of_every_small_instance_has_as_many_on_time_as_the_best_subset(deadlines, costs, most, number):
    seen = 0
    for some_deadlines, some_costs, expected in instances(deadlines, costs, most):
        seen += 1
        got = len(some_costs) - len(dropped(some_deadlines, some_costs, 0))
        assert got == expected, (some_deadlines, some_costs)
    assert seen == number


def test_schedule_of_seven_or_eight_requests_has_as_many_on_time_as_the_best_subset():
    draw = random.Random(20260731)
    for _ in range(50_000):
        jobs = sorted((draw.randint(0, 40), draw.randint(0, 12)) for _ in range(draw.choice([7, 8])))
        feasible = {(0, 0)}
        for deadline, cost in jobs:
            feasible |= {(n + 1, end + cost) for n, end in feasible if end + cost <= deadline}
        got = len(jobs) - len(dropped([d for d, _ in jobs], [c for _, c in jobs], 0))
        assert got == max(n for n, _ in feasible), jobs


def most_on_time_by_dynamic_program(jobs):
    """least[k]: the least sum of costs of k requests that are all on time, among those looked at, by deadline. What
    has the least sum leaves the most for those after it, so nothing else has to be remembered. O(n^2)."""
    least = [0]
    for deadline, cost in sorted(jobs):
        ends = [end + cost for end in least]
        least.append(inf)
        for k, end in enumerate(ends, start=1):
            if end <= deadline:
                least[k] = min(least[k], end)
        while least[-1] == inf:
            least.pop()
    return len(least) - 1


@pytest.mark.parametrize("n", [20, 60, 150, 300])
@pytest.mark.parametrize("load", [0.7, 1.0, 1.5, 5.0])
def test_schedule_of_a_long_queue_has_as_many_on_time_as_the_dynamic_program(n, load):
    """`load`: work over the time until the last deadline. Costs of one size, and with a long tail."""
    draw = random.Random(n * 1000 + round(load * 10))
    for tail in (False, True, True, True):
        costs = [max(1, round(draw.lognormvariate(3, 1.2))) if tail else draw.randint(1, 40) for _ in range(n)]
        jobs = [(draw.randint(0, round(sum(costs) / load)), cost) for cost in costs]
        plan = schedule([Job(f"{i}", deadline, cost) for i, (deadline, cost) in enumerate(jobs)], 0)
        assert len(plan.on_time) == most_on_time_by_dynamic_program(jobs)


@given(st.lists(st.tuples(st.integers(0, 400), st.integers(0, 40)), max_size=120))
def test_schedule_of_any_queue_has_as_many_on_time_as_the_dynamic_program(jobs):
    plan = schedule([Job(f"{i}", deadline, cost) for i, (deadline, cost) in enumerate(jobs)], 0)
    assert len(plan.on_time) == most_on_time_by_dynamic_program(jobs)


@given(job_lists(most=40), sixteenths)
def test_schedule_keeps_requests_that_meet_their_deadlines_and_loses_none(jobs, start):
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
def test_schedule_of_a_tight_queue_is_that_of_the_algorithm_as_written_down(drawn):
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
def test_schedule_of_a_scenario_is_the_stated_one(case, start, jobs, on_time, late):
    parsed = [job.split() for job in jobs.split(",")] if jobs != "-" else []
    plan = schedule([Job(name, float(deadline), float(cost)) for name, deadline, cost in parsed], float(start))
    assert " ".join(plan.on_time) == on_time.strip("-")
    assert " ".join(plan.late) == late.strip("-")


@pytest.mark.parametrize("late", [many_late, few_late])
def test_request_of_infinite_cost_is_late_and_delays_no_other(late):
    assert late(np.array([1.0, 2.0, 3.0, inf]), np.array([1.0, inf, 1.0, 1.0]), 0.0).tolist() == [1]
    assert late(np.array([0.5, 2.0, 3.0]), np.array([1.0, inf, 1.0]), 0.0).tolist() == [0, 1]


@given(job_lists(most=40), sixteenths)
def test_late_requests_that_are_few_are_those_that_a_heap_finds(jobs, start):
    jobs.sort(key=lambda job: job.deadline)
    deadlines, costs = np.array([job.deadline for job in jobs]), np.array([job.cost for job in jobs])
    expected = many_late(deadlines, costs, start).tolist()
    assert few_late(deadlines, costs, start).tolist() == expected
    could_be_on_time = [i for i in expected if deadlines[i] >= start]
    least = len(could_be_on_time) - 1
    assert least < 0 or few_late(deadlines, costs, start, least) is None


@given(st.lists(st.tuples(st.floats(0, 400), st.floats(0, 40)), max_size=60), st.floats(1e5, 1e6))
@pytest.mark.parametrize("find", [many_late, few_late])
def test_times_that_do_not_add_up_exactly_are_settled_to_a_rounding(find, drawn, start):
    drawn.sort()
    deadlines, costs = (np.array(each, float) for each in zip(*drawn, strict=True)) if drawn else (np.zeros(0),) * 2
    late = find(start + deadlines, costs, start).tolist()
    end, rounding_s = 0.0, 1e-8
    for i, (deadline, cost) in enumerate(drawn):
        if i not in late:
            end += cost
            assert end <= deadline + rounding_s
    least, most = (
        most_on_time_by_dynamic_program([(deadline + error_s, cost) for deadline, cost in drawn])
        for error_s in (-rounding_s, rounding_s)
    )
    assert least <= len(drawn) - len(late) <= most


@given(st.lists(st.sampled_from([0.1, 0.2, 0.3, 1.0, 7.0, inf]) | st.floats(0, 1), max_size=40), st.integers(1, 20))
def test_costs_in_order_are_those_of_a_stable_sort(costs, times):
    costs *= times
    assert ascending(np.array(costs)).tolist() == sorted(range(len(costs)), key=costs.__getitem__)


@pytest.mark.parametrize("load", [0.7, 0.95, 1.0, 1.05, 1.5])
def test_a_queue_of_thousands_loses_the_same_requests_whichever_way_they_are_looked_for(load):
    draw = random.Random(round(load * 100))
    costs = [draw.randint(1, 4000) / 1024 for _ in range(3000)]
    span = sum(costs) / load
    deadlines = sorted(round(draw.uniform(0, span) * 64) / 64 for _ in costs)
    late = late_indices(np.array(deadlines), np.array(costs), 0.0)
    assert late.tolist() == many_late(np.array(deadlines), np.array(costs), 0.0).tolist()
