"""The shared queue: conservation, order, the second queue, time."""

from itertools import count
from math import inf

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gpu_scheduler.policy.queue.backlog import PRESSED_S, TICK, Backlog, BacklogRules, RequestState
from gpu_scheduler.policy.queue.decisions import Drop, Expire, Start, StartRule
from gpu_scheduler.policy.queue.moore_hodgson import Job, schedule
from gpu_scheduler.policy.queue.slack import PrefillSpeed, WaitingRequest

SPEED = 1024.0
"""Tokens per second of every model here, a power of two so that sums are exact: 1024 tokens are one second."""


def backlog(*models, rules=None):
    queue = Backlog(rules)
    for model in models or ("m",):
        queue.add_model(model, PrefillSpeed(SPEED))
        queue.model_active(model)
    return queue


def request(request_id, seconds=1.0, deadline=inf, arrival=0.0, model="m", **facts):
    return WaitingRequest(request_id, model, arrival, deadline, prompt_tokens=round(seconds * SPEED), **facts)


def start(queue, request_id, now, why=StartRule.ON_TIME):
    return queue.start(Start(request_id, why), now)


# --- order ------------------------------------------------------------------------------------------------------------


def test_requests_of_all_models_are_ordered_by_deadline():
    queue = backlog("a", "b")
    queue.add(request("1", deadline=9.0, model="a"), 0.0)
    queue.add(request("2", deadline=5.0, model="b"), 0.0)
    queue.add(request("3", deadline=7.0, model="a"), 0.0)
    assert tuple(queue.plan(0.0).on_time) == ("2", "3", "1")


def test_backlog_is_pressed_while_faster_prefills_could_lately_have_saved_a_request():
    queue = backlog()
    queue.add(request("1", 2.0, deadline=3.0), 0.0)
    queue.plan(0.0)
    assert not queue.pressed
    queue.add(request("2", 2.0, deadline=3.0), 0.0)
    queue.plan(0.0)
    assert queue.pressed
    queue.cancel("2", 0.1)
    queue.plan(0.1)
    assert queue.pressed, "or every plan would say something else"
    queue.plan(0.1 + PRESSED_S)
    assert not queue.pressed
    queue.add(request("3", 2.0, deadline=3.0), 0.2)
    queue.plan(0.2)
    for finished in "13":
        queue.cancel(finished, 0.3)
    queue.plan(0.3)
    assert queue.pressed
    queue.plan(0.2 + PRESSED_S)
    assert not queue.pressed


def test_backlog_is_not_pressed_by_requests_late_already_or_alone_or_by_their_wake_up():
    queue = backlog("awake", "asleep")
    queue.model_waking("asleep", 60.0)
    queue.add(request("its wake-up", deadline=9.0, model="asleep"), 0.0)
    queue.add(request("late", deadline=1.5, model="awake"), 2.0)
    queue.add(request("alone", 2.0, deadline=3.0, model="awake"), 2.0)
    queue.add(request("best effort", model="awake"), 2.0)
    queue.plan(2.0)
    assert not queue.pressed
    queue.model_throttled("awake", 4.0, 128, 0.0)
    queue.add(request("for its pauses", 0.5, deadline=3.0, model="awake"), 2.0)
    queue.plan(2.0)
    assert queue.pressed


def test_backlog_by_arrival_ignores_targets_and_counts_no_request_as_late():
    queue = backlog(rules=BacklogRules(order="arrival"))
    for i, deadline in enumerate([9.0, 0.1, 5.0, inf]):
        queue.add(request(f"{i}", deadline=deadline, arrival=i / 10, drop_late=True), 0.3)
    queue_plan = queue.plan(0.4)
    assert (tuple(queue_plan.on_time), tuple(queue_plan.second), queue_plan.decisions) == ((), ("0", "1", "2", "3"), ())
    start(queue, "0", 0.4)
    queue.requeue("0", 0.5, deadline=0.6)
    assert next(iter(queue.plan(0.7).second)) == "0" and queue.state("0") is RequestState.WAITING


def test_request_that_does_not_fit_is_late_and_kept():
    queue = backlog()
    queue.add(request("long", 3.0, deadline=3.5), 0.0)
    queue.add(request("short", 1.0, deadline=3.75), 0.0)
    queue_plan = queue.plan(0.0)
    assert (tuple(queue_plan.on_time), tuple(queue_plan.second), queue_plan.decisions) == (("short",), ("long",), ())
    assert queue.state("long") is RequestState.LATE
    assert queue.state("short") is RequestState.WAITING


def test_a_late_request_is_on_time_again_when_the_one_before_it_is_cancelled():
    queue = backlog()
    queue.add(request("a", 1.0, deadline=1.0), 0.0)
    queue.add(request("b", 2.0, deadline=2.5), 0.0)
    assert tuple(queue.plan(0.0).second) == ("b",)
    assert queue.cancel("a", 0.25)
    assert tuple(queue.plan(0.25).on_time) == ("b",)


def test_throttled_model_counts_longer_for_prompts_of_several_steps_in_plan_cost_and_slack():
    queue = backlog()
    queue.add(request("long", 2.0, deadline=3.0), 0.0)
    queue.add(request("short", 0.25, deadline=9.0), 0.0)
    queue.model_throttled("m", 2.0, round(0.25 * SPEED), 0.0)
    assert (queue.prefill_cost("long"), queue.slack("long", 0.0)) == (4.0, -1.0)
    assert (queue.prefill_cost("short"), queue.slack("short", 0.0)) == (0.25, 8.75)
    assert tuple(queue.plan(0.0).second) == ("long",)
    queue.model_throttled("m", 1.0, 0, 0.0)
    assert tuple(queue.plan(0.0).on_time) == ("long", "short")


def test_pauses_of_a_throttled_prefill_are_not_learned_as_the_models_speed():
    queue = backlog()
    queue.add(request("long", 2.0), 0.0)
    queue.model_throttled("m", 3.0, 128, 0.0)
    queue.observe("m", round(2.0 * SPEED), 6.0)
    queue.model_throttled("m", 1.0, 0, 0.0)
    queue.plan(0.0)
    assert queue.prefill_cost("long") == pytest.approx(2.0)


def test_pauses_make_a_request_late_whose_time_the_prompts_before_it_would_use_up():
    queue = backlog("m", "other")
    for name, deadline in (("1", 2.5), ("2", 4.75), ("3", 6.5), ("best effort", inf)):
        queue.add(request(name, deadline=deadline), 0.0)
        start(queue, name, 0.0)
    assert not queue.late_by_pauses("m", 2.0, 0.0)
    assert queue.late_by_pauses("m", 2.25, 0.0), "three seconds of prompts"
    assert not queue.late_by_pauses("other", 9.0, 0.0)


def test_prompt_that_comes_during_a_pause_waits_for_its_end():
    queue = backlog()
    queue.add(request("1"), 0.0)
    start(queue, "1", 0.0)
    queue.prefill_finished("1", 1.0)
    queue.add(request("2", 0.25, deadline=2.75), 1.5)
    start(queue, "2", 1.5)
    assert not queue.late_by_pauses("m", 2.0, 1.5), "half a second of pause, and half a second"
    assert queue.late_by_pauses("m", 3.0, 1.5), "one and a half, and three quarters"
    assert not queue.late_by_pauses("m", 3.0, 2.75 + 0.01), "it is late already"


def test_throttle_that_changes_counts_for_the_rest_of_a_prefill_under_way():
    queue = backlog()
    queue.model_throttled("m", 3.0, 128, 0.0)
    for name in "12":
        queue.add(request(name, deadline=3.0), 0.0)
    start(queue, "1", 0.0)
    assert tuple(queue.plan(1.5).second) == ("2",), "half of three seconds is left, and three more"
    queue.model_throttled("m", 1.0, 0, 1.5)
    assert tuple(queue.plan(1.5).on_time) == ("2",), "half a second is left, and one more"


def test_dispatched_work_comes_before_everything_and_shrinks_with_its_progress():
    queue = backlog()
    queue.add(request("big", 4.0, deadline=10.0), 0.0)
    queue.add(request("small", 1.0, deadline=4.5), 0.0)
    start(queue, "big", 0.0)
    assert queue.plan(0.0).start == 4.0
    assert tuple(queue.plan(0.0).second) == ("small",)
    queue.progress("big", 1.0, computed_tokens=round(2.0 * SPEED))  # twice as fast as expected
    queue_plan = queue.plan(1.0)
    assert (queue_plan.start, tuple(queue_plan.on_time)) == (3.0, ("small",))
    assert queue.tokens_in_flight() == round(2.0 * SPEED)
    queue.prefill_finished("big", 2.0)
    assert queue.plan(2.0).start == 2.0


def test_an_overdue_prefill_ends_now_at_the_earliest():
    queue = backlog()
    queue.add(request("a", 1.0, deadline=9.0), 0.0)
    start(queue, "a", 0.0)
    assert queue.plan(5.0).start == 5.0


def test_a_prefix_hit_shortens_dispatched_work_and_is_forgotten_when_the_request_comes_back():
    queue = backlog()
    queue.add(request("a", 4.0, deadline=9.0), 0.0)
    start(queue, "a", 0.0)
    queue.progress("a", 0.0, computed_tokens=0, cached_tokens=round(3.0 * SPEED))
    assert queue.plan(0.0).start == 1.0
    queue.progress("a", 0.25, computed_tokens=round(0.5 * SPEED), cached_tokens=round(3.0 * SPEED))
    assert queue.plan(0.25).start == 0.75
    queue.requeue("a", 0.5)
    assert queue.prefill_cost("a") == 4.0


def test_late_requests_go_by_arrival_and_best_effort_yields_only_for_a_while():
    queue = backlog(rules=BacklogRules(best_effort_yield_s=10.0))
    queue.add(request("patient", arrival=0.0), 20.0)
    queue.add(request("late at 12", arrival=12.0, deadline=13.0), 20.0)
    queue.add(request("late at 5", arrival=5.0, deadline=6.0), 20.0)
    assert tuple(queue.plan(20.0).second) == ("late at 5", "patient", "late at 12")


# --- waking models ----------------------------------------------------------------------------------------------------


def test_a_passed_deadline_is_late_for_good_unless_it_is_given_a_new_one():
    queue = backlog()
    for i, deadline in enumerate([3.0, 2.0]):
        queue.add(request(f"{i}", deadline=deadline, arrival=i / 10), 0.2)
    assert tuple(queue.plan(0.5).on_time) == ("1", "0")
    assert tuple(queue.plan(4.0).second) == ("0", "1")
    assert [waiting.request_id for waiting in queue.waiting()] == ["1", "0"]
    start(queue, "1", 4.0, StartRule.AGED)
    queue.requeue("1", 4.5, deadline=6.0)
    queue_plan = queue.plan(4.5)
    assert (tuple(queue_plan.on_time), tuple(queue_plan.second), queue_plan.least) == (("1",), ("0",), 1.0)
    assert (queue.state("0"), queue.state("1")) == (RequestState.LATE, RequestState.WAITING)


def test_a_request_that_its_wake_up_makes_late_is_late():
    queue = backlog("m", "waking")
    queue.model_waking("waking", ready_at=2.0)
    queue.add(request("hopeless", 1.0, deadline=2.5, model="waking"), 0.0)
    queue.add(request("fine", 1.0, deadline=3.5, model="waking"), 0.0)
    assert tuple(queue.plan(0.0).on_time) == ("fine",)
    assert queue.slack("hopeless", 0.0) == pytest.approx(-0.5)
    assert queue.slack("fine", 0.0) == pytest.approx(0.5)


def test_requests_waiting_for_one_wake_up_are_charged_their_prefills_alone():
    queue = backlog("m", "waking")
    queue.model_waking("waking", ready_at=2.0)
    for i in range(8):
        queue.add(request(f"w{i}", 0.125, deadline=4.0, model="waking"), 0.0)
    queue.add(request("other", 2.0, deadline=3.5), 0.0)
    queue_plan = queue.plan(0.0)
    assert len(queue_plan.on_time) == 9
    assert queue_plan.slack == pytest.approx(1.0)


def test_model_not_expected_at_all_makes_its_requests_with_a_deadline_late():
    queue = backlog("gone")
    queue.model_waking("gone", inf)
    queue.add(request("a", deadline=1e6, model="gone"), 0.0)
    assert tuple(queue.plan(0.0).second) == ("a",)
    queue.model_active("gone")
    assert tuple(queue.plan(0.0).on_time) == ("a",)


# --- what is thrown away ----------------------------------------------------------------------------------------------


def test_counts_of_waiting_and_late_requests_by_model_leave_dropped_ones_out():
    queue = backlog("m", "other")
    for number in range(3):
        queue.add(request(f"dropped {number}", deadline=0.5, drop_late=True), 0.0)
    for number in range(2):
        queue.add(request(f"late {number}", deadline=0.5), 0.0)
    queue.add(request("in time", deadline=50.0), 0.0)
    queue.add(request("any time"), 0.0)
    queue.add(request("of another", deadline=0.5, model="other"), 0.0)
    queue.plan(0.0)
    assert (queue.waiting_of("m"), queue.waiting_of("other"), queue.waiting_of("nobody")) == ((4, 2), (1, 1), (0, 0))
    queue.plan(60.0)
    assert queue.waiting_of("m") == (4, 3)


def test_a_late_request_is_dropped_only_if_its_client_asked():
    queue = backlog()
    queue.add(request("asked", deadline=0.5, drop_late=True), 0.0)
    queue.add(request("did not", deadline=0.5), 0.0)
    queue_plan = queue.plan(0.0)
    assert [(type(d), d.request_id) for d in queue_plan.decisions] == [(Drop, "asked")]
    assert tuple(queue_plan.second) == ("did not",)
    assert queue.state("asked") is None
    assert queue.plan(0.0).decisions == ()


def test_a_request_expires_where_it_waits_but_not_once_it_runs():
    queue = backlog()
    queue.add(request("waits", expires=5.0, arrival=1.0), 1.0)
    queue.add(request("runs", expires=5.0, arrival=1.0), 1.0)
    start(queue, "runs", 1.0)
    assert queue.next_deadline() == 5.0
    assert queue.plan(4.9).decisions == ()
    (decision,) = queue.plan(5.0).decisions
    assert isinstance(decision, Expire)
    assert decision.request_id == "waits"
    assert "4.000 s" in decision.reason
    assert queue.state("runs") is RequestState.DISPATCHED
    queue.requeue("runs", 6.0)
    assert [d.request_id for d in queue.plan(6.0).decisions] == ["runs"]


def test_a_time_out_of_an_earlier_request_with_the_same_id_does_not_count():
    queue = backlog()
    queue.add(request("a", expires=5.0), 0.0)
    queue.cancel("a", 1.0)
    queue.add(request("a", expires=50.0), 1.0)
    assert queue.next_deadline() == 50.0
    assert queue.plan(10.0).decisions == ()


# --- back again -------------------------------------------------------------------------------------------------------


def test_a_retracted_request_keeps_its_arrival():
    queue = backlog()
    queue.add(request("old", 1.0, deadline=2.0, arrival=0.0), 0.0)
    queue.add(request("young late", 1.0, deadline=2.0, arrival=1.0), 1.0)
    start(queue, "old", 1.0)
    queue.prefill_finished("old", 2.0)
    assert queue.state("old") is RequestState.RUNNING
    queue.requeue("old", 5.0, prompt_tokens=2000)
    assert tuple(queue.plan(5.0).second) == ("old", "young late")
    assert queue.request("old").prompt_tokens == 2000


def test_a_retracted_request_may_get_a_new_deadline():
    queue = backlog()
    queue.add(request("a", 1.0, deadline=2.0), 0.0)
    start(queue, "a", 0.0)
    queue.requeue("a", 5.0, deadline=7.0)
    assert tuple(queue.plan(5.0).on_time) == ("a",)


def test_backlog_refuses_calls_that_make_no_sense():
    queue = backlog()
    queue.add(request("a"), 0.0)
    with pytest.raises(ValueError, match="queued already"):
        queue.add(request("a"), 0.0)
    with pytest.raises(KeyError):
        queue.add(request("b", model="unknown"), 0.0)
    with pytest.raises(ValueError, match="a is waiting"):
        queue.requeue("a", 0.0)
    with pytest.raises(ValueError, match="a is waiting"):
        queue.prefill_finished("a", 0.0)
    with pytest.raises(ValueError, match="still has 1 requests"):
        queue.remove_model("m")
    start(queue, "a", 0.0)
    with pytest.raises(ValueError, match="a is dispatched"):
        start(queue, "a", 0.0)
    assert not queue.cancel("never seen", 0.0)
    assert queue.finish("a", 0.0)
    queue.remove_model("m")


def test_a_model_takes_the_place_of_one_that_was_removed():
    queue = backlog("a", "b")
    queue.remove_model("a")
    queue.add_model("c", PrefillSpeed(2 * SPEED))
    queue.model_active("c")
    queue.add(request("1", 1.0, deadline=0.5, model="c"), 0.0)
    queue.add(request("2", 1.0, deadline=1.5, model="b"), 0.0)
    assert tuple(queue.plan(0.0).on_time) == ("1", "2")


# --- time -------------------------------------------------------------------------------------------------------------


def test_next_deadline_of_a_backlog_is_when_its_plan_can_no_longer_be_met():
    queue = backlog()
    assert queue.next_deadline() == inf
    queue.add(request("a", 1.0, deadline=3.0), 0.0)
    queue.add(request("b", 1.0, deadline=3.5), 0.0)
    queue.plan(0.0)
    assert queue.next_deadline() == pytest.approx(1.5 + TICK)
    assert tuple(queue.plan(1.5).second) == ()
    assert tuple(queue.plan(queue.next_deadline()).second) == ("a",)


def test_next_deadline_of_a_backlog_is_when_the_credit_of_a_blocked_late_request_suffices():
    queue = backlog("m", "waking")
    queue.model_waking("waking", 5.0)
    queue.add(request("s", 1.0, deadline=7.0, model="waking"), 0.0)
    queue.add(request("late", 2.0, deadline=1.0), 0.0)
    queue.plan(0.0)
    assert queue.next_deadline() == pytest.approx(2.0 + TICK)
    assert queue.plan(2.0 + TICK).credit == pytest.approx(2.0)
    assert queue.next_deadline() > 2.0 + TICK


def test_backlog_planned_at_its_own_deadlines_comes_to_an_end():
    queue = backlog("m", "waking")
    queue.model_waking("waking", 0.5)
    for i in range(10):
        queue.add(request(f"{i}", 0.3, deadline=0.4 * i, expires=20.0, model="waking" if i % 2 else "m"), 0.0)
    now, turns = 0.0, 0
    queue.plan(now)
    while (wake := queue.next_deadline()) < inf:
        assert wake > now
        now, turns = wake, turns + 1
        queue.plan(now)
    assert turns < 40
    assert len(queue) == 0


# --- conservation -----------------------------------------------------------------------------------------------------


class Conservation(RuleBasedStateMachine):
    """Every added request is in exactly one of: waiting, late, dispatched, running, or gone for a known reason; the
    order is that of Moore-Hodgson over all that waits. Against a model that keeps sets."""

    def __init__(self):
        super().__init__()
        self.queue = backlog("a", "b", "waking")
        self.queue.model_waking("waking", 6.0)
        self.ready = {"waking": 6.0}
        self.now = 0.0
        self.numbers = count()
        self.waiting, self.dispatched, self.running, self.gone = set(), {}, set(), set()

    def some(self, data, ids):
        return data.draw(st.sampled_from(sorted(ids)))

    @rule(step=st.integers(0, 16))
    def pass_time(self, step):
        self.now += step / 16

    @rule(
        model=st.sampled_from(["a", "b", "waking"]),
        tokens=st.integers(1, 2048),
        left=st.one_of(st.just(inf), st.integers(-16, 64).map(lambda n: n / 16)),
        patience=st.one_of(st.just(inf), st.integers(0, 64).map(lambda n: n / 16)),
        drop_late=st.booleans(),
    )
    def arrive(self, model, tokens, left, patience, drop_late):
        added = WaitingRequest(
            f"r{next(self.numbers)}",
            model,
            self.now,
            self.now + left,
            tokens,
            expires=self.now + patience,
            drop_late=drop_late,
        )
        self.queue.add(added, self.now)
        self.waiting.add(added.request_id)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), why=st.sampled_from(StartRule))
    def start(self, data, why):
        chosen = self.some(data, self.waiting)
        start(self.queue, chosen, self.now, why)
        self.waiting.remove(chosen)
        self.dispatched[chosen] = self.queue.request(chosen).uncached_tokens

    @precondition(lambda self: self.dispatched)
    @rule(data=st.data(), cached=st.integers(0, 2048), computed=st.integers(0, 2048))
    def go_on(self, data, cached, computed):
        before = self.queue.tokens_in_flight()
        chosen = self.some(data, self.dispatched)
        cached = min(cached, self.queue.request(chosen).prompt_tokens)
        self.queue.progress(chosen, self.now, computed_tokens=computed, cached_tokens=cached)
        left = max(0, self.queue.request(chosen).uncached_tokens - computed)
        assert self.queue.tokens_in_flight() == before - self.dispatched[chosen] + left
        self.dispatched[chosen] = left

    @precondition(lambda self: self.dispatched)
    @rule(data=st.data())
    def first_token(self, data):
        chosen = self.some(data, self.dispatched)
        self.queue.prefill_finished(chosen, self.now)
        del self.dispatched[chosen]
        self.running.add(chosen)

    @precondition(lambda self: self.dispatched or self.running)
    @rule(data=st.data(), tokens=st.integers(1, 4096))
    def come_back(self, data, tokens):
        chosen = self.some(data, self.running | set(self.dispatched))
        arrival = self.queue.request(chosen).arrival
        self.queue.requeue(chosen, self.now, prompt_tokens=tokens)
        assert self.queue.request(chosen).arrival == arrival
        self.running.discard(chosen)
        self.dispatched.pop(chosen, None)
        self.waiting.add(chosen)

    @precondition(lambda self: self.waiting or self.dispatched or self.running)
    @rule(data=st.data())
    def leave(self, data):
        chosen = self.some(data, self.waiting | self.running | set(self.dispatched))
        assert self.queue.cancel(chosen, self.now)
        self.waiting.discard(chosen)
        self.running.discard(chosen)
        self.dispatched.pop(chosen, None)
        self.gone.add(chosen)

    @precondition(lambda self: self.ready)
    @rule()
    def wake(self):
        self.queue.model_active("waking")
        self.ready = {}

    @rule()
    def plan(self):
        facts = {request_id: self.queue.request(request_id) for request_id in self.waiting}
        queue_plan = self.queue.plan(self.now)
        expired = {request_id for request_id, r in facts.items() if r.expires <= self.now}
        jobs = []
        for waiting in (r for r in self.queue.waiting() if r.deadline < inf):
            jobs.append(self.job(waiting))
        jobs += [self.job(facts[d.request_id]) for d in queue_plan.decisions if isinstance(d, Drop)]
        jobs.sort(key=lambda item: item[0])
        expected = schedule([job for _, job in jobs], queue_plan.start)
        late = set(expected.late)

        assert {d.request_id for d in queue_plan.decisions if isinstance(d, Expire)} == expired
        assert {d.request_id for d in queue_plan.decisions if isinstance(d, Drop)} == {
            r for r in late if facts[r].drop_late
        }
        gone = {d.request_id for d in queue_plan.decisions}
        self.waiting -= gone
        self.gone |= gone
        best_effort = {r for r in self.waiting if facts[r].deadline == inf}
        assert tuple(queue_plan.on_time) == expected.on_time
        assert set(queue_plan.second) == (late - gone) | best_effort
        assert len(queue_plan.second) == len(set(queue_plan.second))
        ages = [facts[r].arrival + (10.0 if r in best_effort else 0.0) for r in queue_plan.second]
        assert ages == sorted(ages)
        assert queue_plan.least <= min((self.queue.prefill_cost(r) for r in queue_plan.second), default=inf)
        for request_id in self.waiting:
            assert self.queue.state(request_id) is (RequestState.LATE if request_id in late else RequestState.WAITING)

    def job(self, waiting):
        cost = waiting.uncached_tokens / SPEED
        hopeless = waiting.model in self.ready and max(self.now, self.ready["waking"]) + cost > waiting.deadline
        order = (waiting.deadline, waiting.arrival, int(waiting.request_id[1:]))
        return order, Job(waiting.request_id, waiting.deadline, inf if hopeless else cost)

    @invariant()
    def everyone_is_somewhere(self):
        assert len(self.queue) == len(self.waiting) + len(self.dispatched) + len(self.running)
        waiting = list(self.queue.waiting())
        assert {r.request_id for r in waiting} == self.waiting
        by_model = {name: sum(r.model == name for r in waiting) for name in ("a", "b", "waking")}
        assert self.queue.waiting_by_model() == by_model
        assert [r.deadline for r in waiting] == sorted(r.deadline for r in waiting)
        assert [r.request_id for r in self.queue.in_flight()] == list(self.dispatched)
        for request_id in self.running:
            assert self.queue.state(request_id) is RequestState.RUNNING
        for request_id in self.gone:
            assert self.queue.state(request_id) is None
        for request_id in self.waiting:
            assert self.queue.state(request_id) in (RequestState.WAITING, RequestState.LATE)


TestConservation = Conservation.TestCase
TestConservation.settings = settings(max_examples=60, stateful_step_count=40)


def test_prompts_that_end_in_one_step_share_its_time_in_the_learned_speed():
    """Else the first of them would seem to take the whole step, and its neighbours nothing that counts."""
    queue = Backlog()
    queue.add_model("m", PrefillSpeed(1000.0, weight=1.0))
    queue.model_active("m")
    for i in range(4):
        queue.add(WaitingRequest(f"{i}", "m", 0.0, 50.0, 500), 0.0)
        queue.start(Start(f"{i}", StartRule.ON_TIME), 0.0)
    for i in range(4):
        queue.observe("m", 500, queue.prefill_finished(f"{i}", 0.4))
    queue.plan(0.4)
    queue.add(WaitingRequest("next", "m", 0.4, 50.0, 500), 0.4)
    assert queue.prefill_cost("next") == pytest.approx(0.1)
    queue.start(Start("next", StartRule.ON_TIME), 0.4)
    queue.observe("m", 500, queue.prefill_finished("next", 0.7))
    queue.plan(0.7)
    queue.add(WaitingRequest("last", "m", 0.7, 50.0, 500), 0.7)
    assert queue.prefill_cost("last") == pytest.approx(0.3)


def test_a_short_prompt_that_ends_with_a_long_one_keeps_the_cost_that_it_has_alone():
    queue = Backlog()
    queue.add_model("m", PrefillSpeed(1000.0, weight=1.0))
    for tokens, seconds in ((50, 0.02), (8000, 0.4)):
        queue.observe("m", tokens, seconds)
        queue.plan(0.0)
    queue.observe("m", 8000, 0.42)
    queue.observe("m", 50, 0.0)
    queue.plan(0.0)
    queue.model_active("m")
    queue.add(WaitingRequest("short", "m", 0.0, 50.0, 50), 0.0)
    assert queue.prefill_cost("short") == pytest.approx(0.02)


# --- what a new request would meet ------------------------------------------------------------------------------------


def test_seconds_before_a_new_request_are_those_under_way_and_those_due_earlier():
    queue = backlog("a", "b")
    queue.add(request("under way", 2.0, deadline=9.0, model="a"), 0.0)
    queue.plan(0.0)
    start(queue, "under way", 0.0)
    queue.add(request("soon", 1.0, deadline=6.0, model="a"), 0.0)
    queue.add(request("later", 4.0, deadline=20.0, model="b"), 0.0)
    queue.add(request("too late", 8.0, deadline=9.0, model="b"), 0.0)
    queue.add(request("best effort", 16.0, model="b"), 0.0)
    queue.plan(0.0)
    assert [queue.seconds_before(deadline, 0.5) for deadline in (5.0, 6.0, 20.0)] == [1.5, 2.5, 6.5]
    assert queue.seconds_before(inf, 0.5) == 1.5 + 1 + 4 + 8 + 16, "one without a target waits for all"


def test_nothing_is_before_a_new_request_of_an_empty_queue():
    assert backlog().seconds_before(1.0, 0.0) == backlog().seconds_before(inf, 0.0) == 0.0
