"""Nobody starves: what a late or best-effort request waits at most, under a load that is stated.

**Load.** Requests that are or may become late, and best effort, bring at most `sigma + rate * T` seconds of prefill in
any T seconds, and each has its deadline within D of its arrival or none. What else comes is free: S may be full at
every moment for ever, which no server of any size can keep up with.

**Bound.** Let phi be the second queue's share of a busy turn, c the least cost of its requests, and B the longest
that a turn lasts once it has to be passed on (a chunk and one request that joined just before). Its head waits until
credit for its cost is earned, then until the turn is free: cost / phi + B; and the next one's credit begins then. So
w seconds of work are started within kappa * w, kappa = 1 / phi + B / c. From a moment at which the second queue is
empty, T seconds bring it at most sigma + rate * (D + T), because a request enters it no later than D after its arrival.
It is therefore empty again within

    T = kappa * (sigma + rate * D) / (1 - kappa * rate)        if kappa * rate < 1,

in whatever order it serves, and nobody waits longer than D + T.
"""

from collections import deque
from math import inf

from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_scheduler.policy.queue.admission import AdmissionMemory, ModelKv, PrefillLimits, admit
from gpu_scheduler.policy.queue.backlog import Backlog, BacklogRules
from gpu_scheduler.policy.queue.decisions import Start
from gpu_scheduler.policy.queue.slack import PrefillSpeed, WaitingRequest

SPEED = 1024.0
"""Tokens per second: sums are exact."""
MODELS = ("a", "b")
MEMORY = AdmissionMemory({model: ModelKv(limit=1 << 40, held=0) for model in MODELS})
CHUNK_S = 0.25
LEAST, MOST = 0.25, 0.5
"""Seconds of prefill of a request."""

SHARE = 0.25
SIGMA = 1.0
D = 1.0
KAPPA = 1 / SHARE + (CHUNK_S + MOST) / LEAST
RATE = 0.5 / KAPPA
BOUND = D + KAPPA * (SIGMA + RATE * D) / (1 - KAPPA * RATE)

seconds = st.integers(4, 8).map(lambda n: n / 16)


@st.composite
def arrivals(draw, rate, sigma, slacks, most=24):
    """Requests in order of arrival that bring at most sigma + rate * T in any T seconds: each comes when a bucket of
    sigma, which fills at `rate`, holds its cost."""
    made, now, level = [], 0.0, sigma
    for i in range(draw(st.integers(1, most))):
        cost = draw(seconds)
        gap = max(draw(st.sampled_from([0.0, 0.0, 0.0, 0.25, 3.0])), (cost - level) / rate)
        now += gap
        level = min(sigma, level + rate * gap) - cost
        slack = draw(slacks)
        model = draw(st.sampled_from(MODELS))
        made.append(WaitingRequest(f"r{i}", model, now, now + slack, round(cost * SPEED)))
    return made


def waits(requests, flood, share, joint_s=0.0):
    """Seconds from arrival to start of each of `requests`, under a turn whose prefills take as long as they cost.
    `flood`: cost and spare time of further requests, of which one is added at every event, over and over, tight and
    thrown away if it cannot be on time."""
    queue = Backlog(BacklogRules(late_share=share))
    for model in MODELS:
        queue.add_model(model, PrefillSpeed(SPEED))
        queue.model_active(model)
    coming, running = deque(requests), deque()
    waited, now, end, number = {}, 0.0, inf, 0
    while len(waited) < len(requests):
        now = min(end, coming[0].arrival if coming else inf)
        assert now < inf, "something waits, nothing runs, nothing comes"
        if now > 40 * BOUND:
            return {request.request_id: waited.get(request.request_id, inf) for request in requests}
        if now == end:
            done = running.popleft()
            queue.prefill_finished(done, now)
            queue.finish(done, now)
        while coming and coming[0].arrival <= now:
            queue.add(coming.popleft(), now)
        if flood:
            cost, spare = flood[number % len(flood)]
            busy = sum(queue.prefill_cost(request_id) for request_id in running)
            deadline = now + busy + cost + spare
            queue.add(WaitingRequest(f"s{number}", "b", now, deadline, round(cost * SPEED), drop_late=True), now)
            number += 1
        for decision in admit(queue.plan(now), queue, MEMORY, PrefillLimits(round(CHUNK_S * SPEED), joint_s=joint_s)):
            if isinstance(decision, Start):
                request = queue.start(decision, now)
                running.append(request.request_id)
                if request.request_id[0] == "r":
                    waited[request.request_id] = now - request.arrival
        if not running:
            end = inf
        elif end <= now or end == inf:
            end = now + queue.prefill_cost(running[0])
    return waited


slacks_of_the_second_queue = st.sampled_from([-1.0, -1.0, inf, 0.25, 0.5, D])
joint = st.sampled_from([0.0, 0.25, CHUNK_S + MOST])
"""No more than a turn may last anyway."""
floods = st.lists(st.tuples(seconds, st.sampled_from([0.0, 0.0, 1.0])), min_size=1, max_size=6)


@settings(max_examples=150)
@given(arrivals(RATE, SIGMA, slacks_of_the_second_queue), floods, joint)
def test_late_and_best_effort_requests_start_within_the_bound_whatever_timely_ones_come(requests, flood, joint_s):
    for request_id, waited in waits(requests, flood, SHARE, joint_s).items():
        assert waited <= BOUND, request_id


def test_late_request_without_a_share_of_the_turn_starves():
    """The property above can fail: the flood alone is enough for that."""
    hopeless = WaitingRequest("r0", "a", 0.0, -1.0, round(LEAST * SPEED))
    assert waits([hopeless], [(LEAST, 0.0)], share=0.0) == {"r0": inf}
    assert waits([hopeless], [(LEAST, 0.0)], share=SHARE)["r0"] <= LEAST / SHARE + CHUNK_S + MOST


OFFERED = 0.8


@settings(max_examples=150)
@given(arrivals(OFFERED, 2.0, st.sampled_from([-1.0, 0.3, 0.5, 1.0, 4.0, inf]), most=40), joint)
def test_requests_below_saturation_start_before_the_turn_is_idle_again(requests, joint_s):
    """All requests together bring sigma + 0.8 T in any T seconds, with any deadlines: the turn is never idle while one
    waits, so that it is idle again sigma / (1 - 0.8) after it began, and everybody has started by then."""
    for request_id, waited in waits(requests, [], SHARE, joint_s).items():
        assert waited <= 2.0 / (1 - OFFERED), request_id
