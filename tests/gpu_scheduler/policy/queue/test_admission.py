"""Who may start: order, turn, memory, and the bound on waiting in the second queue."""

from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_scheduler.policy.queue.admission import AdmissionMemory, ModelKv, PrefillLimits, admit
from gpu_scheduler.policy.queue.backlog import Backlog, BacklogRules, RequestState
from gpu_scheduler.policy.queue.decisions import NeedMemory, Start, StartRule
from gpu_scheduler.policy.queue.slack import PrefillSpeed, WaitingRequest
from kv_kinds.layout import KvLayout, attention, of_tokens, state, window

SPEED = 1024.0
"""Tokens per second; one token is one byte of KV in these tests."""


def backlog(*models, rules=None):
    queue = Backlog(rules)
    for model in models or ("a", "b"):
        queue.add_model(model, PrefillSpeed(SPEED))
        queue.model_active(model)
    return queue


def plenty(*models):
    return AdmissionMemory({model: ModelKv(limit=1 << 40, held=0) for model in models or ("a", "b")})


def add(queue, request_id, model, seconds, deadline=inf, arrival=0.0, decode=0, now=0.0):
    queue.add(WaitingRequest(request_id, model, arrival, deadline, round(seconds * SPEED), decode_tokens=decode), now)


def decide(queue, now=0.0, memory=None, chunk_tokens=1 << 30, slack_share=0.5):
    return admit(queue.plan(now), queue, memory or plenty(), PrefillLimits(chunk_tokens, slack_share))


def started(decisions):
    return [d.request_id for d in decisions if isinstance(d, Start)]


def carry_out(queue, decisions, now):
    for decision in decisions:
        if isinstance(decision, Start):
            queue.start(decision, now)
    return decisions


# --- the turn ---------------------------------------------------------------------------------------------------------


def test_prefills_are_admitted_to_one_engine_at_a_time():
    queue = backlog()
    add(queue, "1", "a", 0.1, deadline=5.0)
    add(queue, "2", "a", 0.1, deadline=6.0)
    add(queue, "3", "b", 0.1, deadline=7.0)
    add(queue, "4", "a", 0.1, deadline=8.0)
    decisions = decide(queue)
    assert decisions == [Start("1", StartRule.ON_TIME), Start("2", StartRule.ON_TIME)]
    carry_out(queue, decisions, 0.0)
    assert decide(queue) == []  # 3 is next, so 4 does not keep the turn with a
    queue.prefill_finished("1", 0.1)
    assert decide(queue, 0.1) == []
    queue.prefill_finished("2", 0.2)
    assert started(decide(queue, 0.2)) == ["3"]


def test_requests_of_one_model_join_until_the_chunk_is_full():
    queue = backlog()
    for i in range(5):
        add(queue, f"{i}", "a", 0.25, deadline=5.0 + i)
    decisions = decide(queue, chunk_tokens=512)
    assert started(decisions) == ["0", "1"]
    carry_out(queue, decisions, 0.0)
    assert decide(queue, chunk_tokens=512) == []
    queue.progress("0", 0.1, computed_tokens=256)
    assert started(decide(queue, 0.1, chunk_tokens=512)) == ["2"]


def test_a_prompt_longer_than_a_chunk_goes_alone():
    queue = backlog()
    add(queue, "long", "a", 10.0, deadline=50.0)
    add(queue, "next", "a", 0.1, deadline=60.0)
    assert started(decide(queue, chunk_tokens=512)) == ["long"]


def decide_jointly(queue, now=0.0):
    return admit(queue.plan(now), queue, plenty("a", "b", "c"), PrefillLimits(512, 0.5, joint_s=0.75))


def test_short_prompts_of_several_models_go_side_by_side():
    queue = backlog("a", "b", "c")
    add(queue, "1", "a", 0.25, deadline=5.0)
    add(queue, "2", "b", 0.2, deadline=6.0)
    add(queue, "3", "c", 0.25, deadline=7.0)
    assert started(carry_out(queue, decide_jointly(queue), 0.0)) == ["1", "2", "3"]
    add(queue, "4", "a", 0.25, deadline=8.0)
    assert decide_jointly(queue, 0.1) == []  # 0.6 s are left of those under way
    queue.prefill_finished("1", 0.2)
    assert started(decide_jointly(queue, 0.2)) == ["4"]


def test_short_prompts_of_one_model_join_beyond_a_chunk_as_those_of_several_do():
    queue = backlog()
    for i in range(4):
        add(queue, f"{i}", "a", 0.25, deadline=5.0 + i)
    limits = PrefillLimits(100, 0.5, joint_s=0.75)
    assert started(carry_out(queue, admit(queue.plan(0.0), queue, plenty("a"), limits), 0.0)) == ["0", "1", "2"]
    queue.prefill_finished("0", 0.25)
    assert started(admit(queue.plan(0.25), queue, plenty("a"), limits)) == ["3"]


def test_silent_engine_gets_no_more_requests_however_long_it_takes():
    queue = backlog()
    for i in range(9):
        add(queue, f"{i}", "a", 0.25, deadline=90.0 + i)
    limits = PrefillLimits(100, 0.5, joint_s=0.75)
    assert started(carry_out(queue, admit(queue.plan(0.0), queue, plenty("a"), limits), 0.0)) == ["0", "1", "2"]
    assert started(admit(queue.plan(60.0), queue, plenty("a"), limits)) == []


def test_silent_engine_gets_no_more_requests_beside_another_one_either():
    queue = backlog("a", "b")
    add(queue, "b", "b", 0.25, deadline=80.0)
    for i in range(9):
        add(queue, f"{i}", "a", 0.25, deadline=90.0 + i)
    assert started(carry_out(queue, decide_jointly(queue), 0.0)) == ["b", "0", "1"]
    assert started(carry_out(queue, decide_jointly(queue, 60.0), 60.0)) == ["2"]
    assert started(decide_jointly(queue, 120.0)) == []


def test_a_long_prompt_has_the_device_for_itself_until_little_of_it_is_left():
    queue = backlog("a", "b")
    add(queue, "long", "a", 10.0, deadline=50.0)
    add(queue, "short", "b", 0.1, deadline=60.0)
    assert started(carry_out(queue, decide_jointly(queue), 0.0)) == ["long"]
    queue.progress("long", 9.0, computed_tokens=round(9.2 * SPEED))
    assert decide_jointly(queue, 9.0) == []
    add(queue, "long, too", "b", 9.0, deadline=55.0)
    queue.progress("long", 9.6, computed_tokens=round(9.6 * SPEED))
    assert decide_jointly(queue, 9.6) == []  # it is next
    queue.cancel("long, too", 9.6)
    assert started(decide_jointly(queue, 9.6)) == ["short"]


def test_requests_with_memory_all_start_where_prefills_are_not_limited():
    queue = backlog()
    add(queue, "1", "a", 10.0, deadline=50.0)
    add(queue, "2", "b", 10.0, deadline=60.0)
    add(queue, "3", "a", 10.0, deadline=70.0)
    decisions = admit(queue.plan(0.0), queue, plenty(), PrefillLimits(chunk_tokens=512, joint_s=inf))
    assert started(decisions) == ["1", "2", "3"]


def test_requests_of_a_model_that_is_not_active_do_not_start_and_hold_up_no_other_model():
    queue = backlog("a", "b")
    queue.model_waking("a", 1.0)
    add(queue, "1", "a", 0.1, deadline=5.0)
    add(queue, "2", "b", 0.1, deadline=6.0)
    assert started(decide(queue)) == ["2"]
    queue.model_active("a")
    assert started(decide(queue)) == ["1"]


# --- memory -----------------------------------------------------------------------------------------------------------


def test_bytes_of_a_request_are_those_of_its_prompt_and_forecast_output():
    memory = ModelKv(limit=0, held=0, kv=of_tokens(100))
    assert memory.bytes_for(WaitingRequest("r", "a", 0.0, prompt_tokens=16, decode_tokens=2)) == 1800


def test_bytes_of_a_request_are_the_sum_over_the_kinds_of_its_model():
    memory = ModelKv(limit=0, held=0, kv=KvLayout((attention(100), window(50, 8, 2), state(7000, 3))))
    assert memory.bytes_for(WaitingRequest("r", "a", 0.0, prompt_tokens=16, decode_tokens=2)) == 1800 + 500 + 21000


MEMORY_TABLE = """
    limit  held  reclaimable  growth  free  | lacks
    1024   0     0            0       -     | 0
    1023   0     0            0       -     | 1
    1024   512   0            0       -     | 512
    1024   512   512          0       -     | 0
    2048   512   0            1024    -     | 512
    4096   0     0            0       1024  | 0
    4096   0     0            0       1000  | 24
    4096   3000  1000         0       24    | 0
    4096   3000  1000         0       0     | 24
    4096   0     0            500     1024  | 500
    4096   1000  1000         500     100   | 424
"""


@pytest.mark.parametrize("row", MEMORY_TABLE.strip().splitlines()[1:])
def test_request_without_enough_memory_needs_all_that_its_model_does_not_have(row):
    facts, lacks = row.split("|")
    limit, held, reclaimable, growth, free = (None if f == "-" else int(f) for f in facts.split())
    model = ModelKv(limit, held, reclaimable, growth, devices=("d0",))
    memory = AdmissionMemory({"a": model}, {} if free is None else {"d0": free})
    queue = backlog("a")
    add(queue, "r", "a", 1.0, deadline=3.0)
    asked = 1024 - max(0, reclaimable - growth)
    on_devices = 0 if free is None else int(lacks)
    expected = [NeedMemory("a", asked, "r", 2.0, on_devices)] if int(lacks) else [Start("r", StartRule.ON_TIME)]
    assert decide(queue, memory=memory) == expected


def test_timely_request_without_memory_is_passed_over_but_by_none_of_its_own_model():
    queue = backlog()
    add(queue, "large", "a", 2.0, deadline=10.0)
    add(queue, "small", "a", 0.1, deadline=11.0)
    add(queue, "other", "b", 0.1, deadline=12.0)
    memory = AdmissionMemory({"a": ModelKv(limit=1024, held=0), "b": ModelKv(limit=1024, held=0)})
    decisions = decide(queue, memory=memory)
    assert decisions == [NeedMemory("a", 2048, "large", 8.0), Start("other", StartRule.ON_TIME)]


def test_memory_claimed_by_a_timely_request_stays_free_on_its_device():
    queue = backlog()
    add(queue, "large", "a", 2.0, deadline=10.0)
    add(queue, "other", "b", 0.5, deadline=12.0)
    models = {model: ModelKv(limit=1 << 20, held=0, devices=("d0",)) for model in "ab"}
    decisions = decide(queue, memory=AdmissionMemory(models, {"d0": 1024}))
    assert decisions == [NeedMemory("a", 2048, "large", 8.0, 1024), NeedMemory("b", 512, "other", 11.5, 512)]


def test_a_tensor_parallel_model_needs_room_on_all_of_its_devices():
    queue = backlog("a")
    add(queue, "r", "a", 1.0, deadline=10.0)
    memory = AdmissionMemory({"a": ModelKv(limit=4096, held=0, devices=("d0", "d1"))}, {"d0": 4096, "d1": 1000})
    assert decide(queue, memory=memory) == [NeedMemory("a", 1024, "r", 9.0, 24)]


def test_memory_is_requested_while_another_engine_has_the_prefill_turn():
    queue = backlog()
    add(queue, "1", "a", 0.1, deadline=5.0)
    carry_out(queue, decide(queue), 0.0)
    add(queue, "2", "b", 1.0, deadline=6.0)
    memory = AdmissionMemory({"a": ModelKv(limit=1 << 20, held=0), "b": ModelKv(limit=0, held=0)})
    assert [type(d) for d in decide(queue, memory=memory)] == [NeedMemory]


@given(st.data())
def test_admission_never_grants_more_memory_than_there_is(data):
    queue = backlog("a", "b")
    number = st.integers(0, 4096)
    models = {
        name: ModelKv(
            limit=data.draw(number),
            held=(held := data.draw(number)),
            reclaimable=data.draw(st.integers(0, held)),
            growth=data.draw(st.integers(0, 512)),
            kv=data.draw(st.sampled_from([of_tokens(1), KvLayout((attention(1), window(2, 300, 20), state(100)))])),
            devices=("d0",),
        )
        for name in "ab"
    }
    free = data.draw(number)
    for i in range(data.draw(st.integers(0, 12))):
        deadline = data.draw(st.one_of(st.just(inf), st.integers(0, 8).map(float)))
        add(queue, f"{i}", data.draw(st.sampled_from("ab")), data.draw(st.integers(1, 32)) / 16, deadline)
    granted = {"a": 0, "b": 0}
    decisions = decide(queue, memory=AdmissionMemory(models, {"d0": free}))
    needs = [d.model for d in decisions if isinstance(d, NeedMemory)]
    for request_id in started(decisions):
        request = queue.request(request_id)
        granted[request.model] += models[request.model].bytes_for(request)
    for name, model in models.items():
        if granted[name]:
            assert granted[name] <= model.limit - model.held + model.reclaimable - model.growth
    new = sum(max(0, granted[name] + m.growth - m.reclaimable) for name, m in models.items() if granted[name])
    assert new <= free
    assert len(needs) == len(set(needs))
    assert len({queue.request(request_id).model for request_id in started(decisions)}) <= 1


# --- the second queue -------------------------------------------------------------------------------------------------


def test_second_queue_runs_oldest_first_while_no_request_can_be_on_time():
    queue = backlog()
    add(queue, "young", "a", 5.0, arrival=3.0)
    add(queue, "old", "a", 5.0, arrival=1.0)
    assert decide(queue) == [Start("old", StartRule.SLACK), Start("young", StartRule.SLACK)]


def test_late_request_goes_first_where_timely_ones_leave_room_for_it():
    queue = backlog()
    add(queue, "late", "a", 1.0, deadline=0.5)
    add(queue, "s", "a", 1.0, deadline=4.0)
    assert decide(queue, slack_share=0.5)[0] == Start("late", StartRule.SLACK)
    assert started(decide(queue, slack_share=0.25)) == ["s"]


def test_room_left_by_timely_requests_is_used_by_one_late_request_only():
    queue = backlog()
    add(queue, "late 1", "a", 1.0, deadline=0.5)
    add(queue, "late 2", "a", 1.0, deadline=0.5)
    add(queue, "s", "a", 1.0, deadline=4.0)
    assert started(decide(queue, slack_share=0.5)) == ["late 1", "s"]


def test_memory_for_late_requests_is_requested_only_while_no_timely_one_waits():
    queue = backlog()
    add(queue, "late", "a", 1.0, deadline=0.5)
    memory = AdmissionMemory({"a": ModelKv(limit=0, held=0), "b": ModelKv(limit=1 << 20, held=0)})
    assert decide(queue, memory=memory) == [NeedMemory("a", 1024, "late", inf)]
    add(queue, "s", "b", 1.0, deadline=9.0)
    assert decide(queue, memory=memory) == [Start("s", StartRule.ON_TIME)]


def test_credit_for_late_requests_belongs_to_the_oldest_and_younger_ones_do_not_spend_it():
    queue = backlog(rules=BacklogRules(late_share=0.5))
    add(queue, "s0", "b", 1.0, deadline=1.0)
    carry_out(queue, decide(queue), 0.0)
    add(queue, "old and large", "a", 1.0, deadline=0.5, arrival=0.0)
    add(queue, "young and small", "a", 0.25, deadline=0.5, arrival=0.1)
    queue.plan(0.0)
    queue.prefill_finished("s0", 1.0)  # one second of S earned half a second
    add(queue, "s1", "b", 1.0, deadline=2.0, now=1.0)
    assert queue.plan(1.0).credit == 0.5
    decisions = decide(queue, 1.0)
    assert started(decisions) == ["s1"]
    carry_out(queue, decisions, 1.0)
    queue.prefill_finished("s1", 2.0)
    add(queue, "s2", "b", 1.0, deadline=3.0, now=2.0)
    assert decide(queue, 2.0) == [Start("old and large", StartRule.AGED)]


def test_the_turn_passes_to_an_aged_request_of_another_model():
    queue = backlog(rules=BacklogRules(late_share=0.5))
    add(queue, "s0", "b", 2.0, deadline=2.0)
    carry_out(queue, decide(queue), 0.0)
    add(queue, "late", "a", 1.0, deadline=0.5)
    queue.plan(0.0)
    add(queue, "s1", "b", 1.0, deadline=3.0, now=2.0)
    assert decide(queue, 2.0) == []  # s0 is still under way: late is next, s1 must not join
    queue.prefill_finished("s0", 2.0)
    assert started(decide(queue, 2.0)) == ["late"]


SHARE = 0.2


@settings(max_examples=40)
@given(
    lates=st.lists(st.integers(1, 32).map(lambda n: n / 16), min_size=1, max_size=6),
    flood=st.lists(st.integers(1, 16).map(lambda n: n / 16), min_size=1, max_size=8),
)
def test_second_queue_request_starts_within_its_bound_under_a_flood_of_timely_ones(lates, flood):
    """S gets a new tight request whenever its turn is free. Each late one starts within the bound of `ageing.py`."""
    queue = backlog(rules=BacklogRules(late_share=SHARE))
    for i, seconds in enumerate(lates):
        add(queue, f"late {i}", "a", seconds, deadline=-1.0, arrival=i / 16)
    bound = sum(seconds / SHARE + seconds + max(flood) for seconds in lates)
    now, number, starts = 0.0, 0, []
    while len(starts) < len(lates):
        cost = flood[number % len(flood)]
        queue.add(WaitingRequest(f"s{number}", "b", now, now + cost, round(cost * SPEED), drop_late=True), now)
        number += 1
        decisions = decide(queue, now)
        assert decisions
        carry_out(queue, decisions, now)
        for request in queue.in_flight():
            if request.model == "a":
                starts.append(request.request_id)
            now += queue.prefill_cost(request.request_id)
            queue.prefill_finished(request.request_id, now)
            queue.finish(request.request_id, now)
        assert now <= bound, (starts, bound)
    assert starts == sorted(starts)
    # and S kept its share: only the work that the last credit paid for may stand out
    assert sum(lates) - max(lates) <= SHARE * now


def test_admission_starts_every_request_in_the_end():
    queue = backlog()
    for i in range(50):
        add(queue, f"{i}", "ab"[i % 2], 0.1 + i / 100, deadline=inf if i % 5 == 0 else i / 10, arrival=i / 100)
    now = 0.0
    while queue.plan(now).on_time or queue.plan(now).second:
        decisions = decide(queue, now, chunk_tokens=256)
        assert decisions
        carry_out(queue, decisions, now)
        for request in queue.in_flight():
            now += queue.prefill_cost(request.request_id)
            queue.prefill_finished(request.request_id, now)
            assert queue.state(request.request_id) is RequestState.RUNNING
    assert len(queue) == 50


# --- by arrival -------------------------------------------------------------------------------------------------------


def test_admission_by_arrival_serves_each_model_in_order_past_one_without_memory():
    queue = backlog(rules=BacklogRules(order="arrival"))
    add(queue, "long", "a", 4.0, deadline=0.1, arrival=0.0)
    add(queue, "short", "a", 1.0, deadline=9.0, arrival=0.1, now=0.1)
    add(queue, "other", "b", 1.0, deadline=0.2, arrival=0.2, now=0.2)
    memory = AdmissionMemory({"a": ModelKv(2 << 10, 0, devices=("d",)), "b": ModelKv(2 << 10, 0, devices=("d",))})
    decisions = admit(queue.plan(0.2), queue, memory, PrefillLimits(joint_s=inf))
    assert started(decisions) == ["other"]
    # Nothing that runs is stopped for it: it has no slack.
    assert [(d.for_request, d.slack) for d in decisions if isinstance(d, NeedMemory)] == [("long", inf)]


# --- places -----------------------------------------------------------------------------------------------------------


def test_engine_gets_no_more_requests_than_it_runs_and_the_rest_keep_their_order():
    queue = backlog()
    for number in range(4):
        add(queue, f"a{number}", "a", 0.1, deadline=9.0 - number)
    add(queue, "b0", "b", 0.1, deadline=20.0)
    limits = PrefillLimits(1 << 30, 0.5, joint_s=inf)
    decisions = admit(queue.plan(0.0), queue, plenty(), limits, {"a": 2})
    assert started(carry_out(queue, decisions, 0.0)) == ["a3", "a2", "b0"], "the first of a, and all of b"
    add(queue, "a4", "a", 0.1, deadline=1.0)
    assert admit(queue.plan(0.0), queue, plenty(), limits, {"a": 0}) == []
    assert started(admit(queue.plan(0.0), queue, plenty(), limits, {"a": 1})) == ["a4"]


def test_memory_is_not_requested_for_an_engine_without_a_free_place():
    queue = backlog()
    add(queue, "1", "a", 0.1, deadline=5.0)
    add(queue, "2", "a", 0.1)
    none = AdmissionMemory({name: ModelKv(limit=0, held=0) for name in ("a", "b")})
    assert any(isinstance(d, NeedMemory) for d in admit(queue.plan(0.0), queue, none, PrefillLimits()))
    assert admit(queue.plan(0.0), queue, none, PrefillLimits(), {"a": 0}) == []
