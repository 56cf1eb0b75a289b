"""The core of a group: events in, decisions out, which scenarios write as words."""

from dataclasses import replace
from math import inf

import pytest
from hypothesis import settings, strategies
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gpu_scheduler.engines.sharing.throttle import FREE
from gpu_scheduler.policy.group_core import KEPT_MODELS, RESUME_S, TOGETHER_S, GroupCore
from gpu_scheduler.policy.group_facts import ArrivedRequest, GroupRules, ModelFacts, Presence
from gpu_scheduler.policy.memory.forecast import ForecastRules
from gpu_scheduler.policy.memory.holdings import DeviceMemory
from gpu_scheduler.policy.memory.kv_shortage import LASTING_S
from gpu_scheduler.policy.memory.request_backoff import AGAIN_S
from gpu_scheduler.policy.queue.admission import PrefillLimits
from gpu_scheduler.policy.queue.decisions import Drop, Expire, NeedMemory, RequestMemory, SetThrottle, Start
from gpu_scheduler.policy.throttle.interference import WINDOW
from kv_kinds.layout import KvLayout, attention, of_tokens, state, window

RULES = GroupRules(PrefillLimits(joint_s=0.1))
UP = ModelFacts(Presence.ACTIVE, kv=of_tokens(10), prefill_tokens_per_s=10_000, decode_step_s=0.01)


class Group:
    """A core, a clock that a scenario moves, and the memory of one device."""

    def __init__(self, *models, rules=RULES, facts=UP):
        self.now = 100.0
        self.core = GroupCore(rules, self.now)
        self.memory = []
        self.throttles = {}
        self.requested = []
        for model in models:
            self.becomes(model, facts)

    def becomes(self, model, facts):
        return self.core.model_changed(model, facts, self.now)

    def arrives(self, request_id, model="a", tokens=100, new=50, ttft_s=inf, **facts):
        deadline = self.now + ttft_s
        self.core.arrived(ArrivedRequest(request_id, model, self.now, tokens, new, deadline, **facts), self.now)

    def ends(self, *request_ids, output_tokens=0):
        for request_id in request_ids:
            self.core.ended(request_id, self.now, output_tokens)

    def first_token(self, *request_ids):
        return [self.core.first_token(request_id, self.now) for request_id in request_ids]

    def holds(self, free, limit=inf):
        self.memory = [DeviceMemory("gpu", 1 << 40, free, limits={"a": limit} if limit < inf else {})]

    def plans(self):
        """The decisions of a plan as words. Throttles are kept in `throttles`, memory requests in `requested`."""
        told = []
        for decision in self.core.plan(self.now, lambda: self.memory):
            match decision:
                case Start(request_id, why):
                    told.append(f"start {request_id} ({why.value})")
                case Drop(request_id):
                    told.append(f"drop {request_id}")
                case Expire(request_id):
                    told.append(f"expire {request_id}")
                case NeedMemory(model, nbytes):
                    told.append(f"{model} needs {nbytes}")
                case RequestMemory(model, nbytes):
                    told.append(f"request {nbytes} for {model}")
                    self.requested.append(decision)
                case SetThrottle(model, throttle):
                    assert not any(word.startswith("start") for word in told), "engines know it before they start"
                    self.throttles[model] = throttle
        return told

    def waits(self, seconds):
        self.now += seconds


# --- requests


def test_a_request_starts_once_and_leaves_nothing_behind():
    group = Group("a")
    group.arrives("r", ttft_s=1.0)
    assert group.core.count("a") == (1, 0, 0)
    assert group.plans() == ["start r (on_time)"]
    assert group.plans() == []
    assert (group.core.count("a"), group.core.model("a", 0).committed) == ((0, 1, 0), (100 + 50) * 10)
    assert group.first_token("r") == [True]
    group.ends("r")
    assert (group.core.count("a"), group.core.model("a", 0).committed, len(group.core)) == ((0, 0, 0), 0, 0)
    assert (group.plans(), group.core.next_plan_at()) == ([], inf)


def test_requests_with_states_start_as_long_as_there_is_room_for_another_state():
    group = Group("a", facts=replace(UP, kv=KvLayout((attention(10), state(4000)))))
    group.holds(free=13_000)
    for name in "rst":
        group.arrives(name, ttft_s=1.0)
    assert group.plans() == ["a needs 5500", "request 5500 for a", "start r (on_time)", "start s (on_time)"]
    assert group.core.model("a", 0).committed == 2 * (4000 + (100 + 50) * 10)
    group.first_token("r")
    group.ends("r")
    assert group.core.model("a", 0).committed == 4000 + (100 + 50) * 10


def test_a_request_longer_than_its_models_window_is_admitted_with_the_windows_bytes_alone():
    group = Group("a", facts=replace(UP, kv=KvLayout((attention(10), window(90, 40, 20)))))
    group.holds(free=6900)
    group.arrives("r", ttft_s=1.0)
    group.arrives("s", ttft_s=1.0)
    assert group.plans() == ["a needs 6900", "request 6900 for a", "start r (on_time)"]
    assert group.core.model("a", 0).committed == (100 + 50) * 10 + (40 + 20) * 90 == 6900


def test_demand_of_a_model_is_counted_by_the_bytes_of_a_long_requests_token():
    group = Group("a", "b", facts=replace(UP, kv=KvLayout((attention(10), window(90, 40, 20), state(4000)))))
    group.becomes("b", UP)
    for model in "ab":
        group.core.tokens(model, 1000, group.now)
    assert group.core.demand("a", group.now) == group.core.demand("b", group.now) > 0


def test_requests_of_a_waking_model_start_when_it_is_up():
    group = Group("a", facts=ModelFacts(Presence.WAKING))
    group.arrives("r", ttft_s=60.0)
    assert group.plans() == []
    group.becomes("a", UP)
    assert group.plans() == ["start r (on_time)"]


def test_a_request_that_came_to_be_late_is_dropped_only_if_its_client_wants_that():
    group = Group("a", facts=ModelFacts(Presence.WAKING))
    group.arrives("wants", ttft_s=10.0, drop_late=True)
    group.arrives("does not", ttft_s=10.0)
    assert group.plans() == []
    group.waits(11.0)
    assert group.plans() == ["drop wants"]
    assert group.core.count("a") == (1, 0, 1)
    group.ends("wants")  # it is forgotten already
    assert len(group.core) == 1


def test_request_expires_at_the_time_that_the_core_named_for_its_next_plan():
    group = Group("a", facts=ModelFacts(Presence.DOWN))
    group.arrives("r", expires=group.now + 3.0)
    assert (group.plans(), group.core.next_plan_at()) == ([], 103.0)
    group.waits(3.0)
    assert (group.plans(), len(group.core)) == (["expire r"], 0)


def test_an_engine_gets_as_many_requests_as_it_runs_and_the_next_when_one_ends_or_comes_back():
    group = Group("a", facts=replace(UP, most_running=1))
    for name in ("first", "second", "third"):
        group.arrives(name)
        group.waits(0.001)
    assert group.plans() == ["start first (room)"]
    group.first_token("first")
    assert group.plans() == []
    group.ends("first")
    assert group.plans() == ["start second (room)"]
    group.core.retracted("second", group.now, prompt_tokens=110, most_new_tokens=40)
    group.ends("third")
    assert group.plans() == ["start second (room)"]


def test_retracted_request_counts_what_it_generated_and_has_a_deadline_to_resume():
    group = Group("a")
    group.arrives("r", ttft_s=5.0, drop_late=True)
    group.plans()
    group.first_token("r")
    group.waits(20.0)
    group.core.retracted("r", group.now, prompt_tokens=130, most_new_tokens=20)
    assert group.core.backlog.request("r").deadline == group.now + RESUME_S
    assert (group.core.model("a", 0).committed, group.core.count("a")) == (0, (1, 0, 0))
    group.waits(2 * RESUME_S)
    assert group.plans() == ["start r (room)"], "late, but its target was met before"
    assert group.core.model("a", 0).committed == (130 + 20) * 10
    assert group.first_token("r") == [None]


def test_a_request_that_was_retracted_before_its_first_token_may_still_be_dropped():
    group = Group("a")
    group.arrives("r", ttft_s=5.0, drop_late=True)
    group.plans()
    group.core.retracted("r", group.now, prompt_tokens=100, most_new_tokens=50)
    group.becomes("a", ModelFacts(Presence.DOWN))
    group.waits(2 * RESUME_S)
    assert group.plans() == ["drop r"]


def test_output_of_a_request_that_expired_counts_as_the_length_of_an_answer():
    group = Group("a", rules=replace(RULES, forecast=ForecastRules(weight=1.0)))
    group.arrives("r", expires=group.now + 3.0)
    group.plans()
    group.first_token("r")
    group.core.retracted("r", group.now, prompt_tokens=107, most_new_tokens=43)
    group.waits(3.0)
    assert (group.plans(), group.core.model("a", 0).forecast.tokens) == (["expire r"], 7)


def test_an_answer_that_goes_on_here_is_not_dropped_for_being_late():
    group = Group("a", facts=ModelFacts(Presence.WAKING))
    group.arrives("r", ttft_s=9.0, resumed=True, drop_late=True)
    assert group.core.backlog.request("r").deadline == group.now + RESUME_S
    group.waits(2 * RESUME_S)
    assert (group.plans(), group.core.count("a")) == ([], (1, 0, 1))


def test_request_ids_unknown_or_taken_are_errors_and_the_end_of_an_unknown_one_is_ignored():
    group = Group("a")
    group.arrives("r")
    with pytest.raises(ValueError):
        group.arrives("r")
    assert group.core.count("a") == (1, 0, 0)
    group.ends("s")
    for event in (group.core.first_token, lambda *given: group.core.retracted(*given, 1, 1)):
        with pytest.raises(KeyError):
            event("s", group.now)


def test_progress_of_a_prefill_counts_until_its_first_token_is_out():
    group = Group("a")
    group.arrives("r", tokens=1000)
    assert not group.core.prefilled("r", group.now, 500), "no engine has it"
    group.plans()
    whole_s = group.core.backlog.prefill_cost("r")
    assert group.core.work_of("a") == (1, whole_s)
    assert group.core.prefilled("r", group.now, 500)
    group.plans()
    assert group.core.queue_plan.start == pytest.approx(group.now + whole_s / 2)
    group.first_token("r")
    assert not group.core.prefilled("r", group.now, 700)
    assert group.core.work_of("a") == (1, 0.0)


def test_a_model_learns_its_speed_from_the_tokens_that_no_cache_had():
    group = Group("a")
    group.arrives("r", tokens=1000)
    group.plans()
    before = group.core.model("a", 0).speed.seconds_per_token
    group.waits(0.02)
    group.core.first_token("r", group.now, cached_tokens=900)
    group.plans()
    bucket = group.core.model("a", 0).speed.bucket(100)
    after = group.core.model("a", 0).speed.seconds_per_token
    assert after[bucket] == pytest.approx(0.75 * before[bucket] + 0.25 * 0.02 / 100)


def test_a_target_is_met_or_missed_by_the_first_token_of_an_answer_that_begins_here():
    group = Group("a")
    group.arrives("hit", ttft_s=2.0)
    group.arrives("missed", ttft_s=1.0)
    group.arrives("no target")
    group.arrives("resumed", ttft_s=1.0, resumed=True)
    group.plans()
    group.waits(1.5)
    assert group.first_token("hit", "missed", "no target", "resumed") == [True, False, None, None]
    model = group.core.model("a", 0)
    assert (model.ttft_met, model.ttft_missed) == (1, 1)


# --- streams that follow their model


def test_streams_whose_kv_came_with_the_model_are_planned_together():
    group = Group("a", rules=replace(RULES, limits=PrefillLimits(chunk_tokens=16)))
    facts = {"tokens": 40, "ttft_s": 9.0, "resumed": True, "cached_tokens": 36}
    group.arrives("r1", **facts)
    assert group.core.next_plan_at() == group.now + TOGETHER_S
    group.waits(TOGETHER_S / 2)
    group.arrives("r2", **facts)
    assert group.core.next_plan_at() == pytest.approx(group.now + TOGETHER_S / 2), (
        "the first one waits no longer for the second"
    )
    group.waits(TOGETHER_S / 2)
    assert group.plans() == ["start r1 (on_time)", "start r2 (on_time)"]
    assert group.core.next_plan_at() > group.now + TOGETHER_S


# --- memory


def test_request_without_memory_has_it_requested_once_and_starts_when_it_is_there():
    group = Group("a")
    group.holds(free=500)
    group.arrives("r", ttft_s=9.0)
    assert group.plans() == ["a needs 1500", "request 1500 for a"]
    assert group.plans() == ["a needs 1500"], "the request is under way"
    group.holds(free=1500)
    group.core.memory_answered(group.requested[0], True, group.now)
    assert group.plans() == ["start r (on_time)"]


def test_memory_that_was_granted_and_does_not_suffice_is_requested_again_after_a_pause():
    group = Group("a")
    group.holds(free=500)
    group.arrives("r", ttft_s=9.0)
    group.plans()
    group.core.memory_answered(group.requested[0], True, group.now)
    assert group.plans() == ["a needs 1500"]
    assert group.core.next_plan_at() == group.now + AGAIN_S
    group.waits(AGAIN_S)
    assert group.plans() == ["a needs 1500", "request 1500 for a"]
    assert group.core.next_plan_at() > group.now


def test_a_shortage_ends_with_the_last_request_that_waits():
    group = Group("a")
    group.holds(free=500)
    group.arrives("r")
    group.plans()
    group.waits(LASTING_S)
    group.plans()
    assert group.core.shortages.of("a", group.now) == 1000
    group.ends("r")
    group.plans()
    assert not group.core.shortages


def test_memory_is_looked_at_only_where_a_request_could_start():
    group = Group("a")
    group.arrives("r")
    group.becomes("a", ModelFacts(Presence.DOWN))
    assert group.core.plan(group.now, lambda: pytest.fail("nothing could start")) == [SetThrottle("a", FREE)]


def test_memory_that_was_not_granted_is_requested_again_with_the_next_plan():
    group = Group("a")
    group.holds(free=500)
    group.arrives("r")
    group.plans()
    group.core.memory_answered(group.requested[0], False, group.now)
    assert group.plans() == ["a needs 1500", "request 1500 for a"]


def test_memory_of_a_started_request_is_reserved_for_it_until_it_ends():
    group = Group("a")
    group.holds(free=2000)
    group.arrives("runs")
    group.arrives("waits")
    assert group.plans() == ["a needs 1500", "request 1500 for a", "start runs (room)"]
    group.ends("runs")
    assert group.plans() == ["start waits (room)"]


def test_a_request_is_admitted_with_the_length_that_answers_of_its_model_had():
    group = Group("a", rules=replace(RULES, forecast=ForecastRules(first=8, weight=1.0)))
    group.arrives("r1", tokens=20)
    group.plans()
    assert group.core.model("a", 0).committed == (20 + 8) * 10
    group.ends("r1", output_tokens=30)
    group.arrives("r2", tokens=20)
    group.plans()
    assert group.core.model("a", 0).committed == (20 + 30) * 10
    group.ends("r2")
    assert group.core.model("a", 0).forecast.tokens == 30, "a request without an answer says nothing"


def test_memory_bounds_no_request_before_a_device_was_heard_of():
    group = Group("a")
    group.arrives("r", tokens=10**9)
    assert group.plans() == ["start r (room)"]


# --- throttles


def decoding(group, model="a", tpot_s=0.012):
    group.arrives(f"{model} decodes", model, tpot_s=tpot_s)
    group.plans()
    group.first_token(f"{model} decodes")


def test_a_neighbours_prefill_is_throttled_while_a_model_decodes():
    group = Group("a", "b")
    decoding(group)
    group.arrives("long", "b", tokens=5000)
    assert group.plans() == ["start long (room)"]
    assert group.throttles["b"].pause_ratio > 0 and group.throttles["a"].pause_ratio == 0
    group.ends("a decodes", "long")
    assert group.plans() == []
    assert group.throttles == {"a": FREE, "b": FREE}


def test_throttle_is_sent_when_it_changes_and_to_an_engine_that_has_none():
    group = Group("a", "b")
    decoding(group)
    group.plans()
    group.throttles.clear()
    group.plans()
    assert group.throttles == {}
    group.becomes("b", UP)
    group.plans()
    assert group.throttles.keys() == {"b"}


def test_steps_that_take_longer_beside_a_prefill_lengthen_its_pauses():
    group = Group("a", "b")
    decoding(group, tpot_s=0.02)
    group.arrives("long", "b", tokens=50_000)
    group.plans()
    before = group.throttles["b"].pause_ratio
    for _ in range(WINDOW + 1):
        group.waits(0.03)
        group.core.step_ended("a", group.now)
    group.plans()
    assert group.throttles["b"].pause_ratio > before > 0


def test_throttles_are_not_set_where_decodes_are_not_protected():
    group = Group("a", "b", rules=replace(RULES, throttles=False))
    decoding(group)
    group.arrives("long", "b", tokens=5000)
    assert (group.plans(), group.throttles) == (["start long (room)"], {})


# --- models


def test_a_model_that_comes_back_cold_is_expected_after_its_last_cold_start():
    group = Group(facts=UP)
    group.becomes("a", replace(UP, cold_s=20.0))
    group.becomes("a", ModelFacts(Presence.GONE))
    group.becomes("a", ModelFacts(Presence.WAKING))
    group.arrives("too soon", ttft_s=19.0, drop_late=True)
    group.arrives("in time", ttft_s=21.0, drop_late=True)
    assert group.plans() == ["drop too soon"]


def test_a_model_is_expected_after_its_last_wake_up_and_by_a_setting_where_there_was_none():
    group = Group()
    group.becomes("woken before", ModelFacts(Presence.WAKING, up_s=0.5, cold_s=20.0))
    group.becomes("new", ModelFacts(Presence.WAKING))
    for model in ("woken before", "new"):
        group.arrives(f"{model}, 1 s", model, ttft_s=1.0, drop_late=True)
        group.arrives(f"{model}, 6 s", model, ttft_s=6.0, drop_late=True)
    assert group.plans() == ["drop new, 1 s"]


def test_the_speed_that_an_engine_measured_counts_once():
    group = Group()
    assert group.core.model("a", 0).speed.cost(2048) == pytest.approx(2048 / RULES.prefill_tokens_per_s)
    group.becomes("a", replace(UP, prefill_tokens_per_s=20_000, prefill_chunk_tokens=2048))
    assert group.core.model("a", 0).speed.cost(2048) == pytest.approx(2048 / 20_000)
    group.becomes("a", replace(UP, prefill_tokens_per_s=40_000, prefill_chunk_tokens=2048))
    assert group.core.model("a", 0).speed.cost(2048) == pytest.approx(2048 / 20_000)


def test_the_first_prompts_of_a_model_are_expected_to_take_what_its_engine_measured():
    group = Group("long", "short", facts=replace(UP, prefill_tokens_per_s=20_000))
    group.arrives("long", "long", tokens=8000, ttft_s=2.0)
    group.arrives("short", "short", tokens=1000, ttft_s=0.12)
    group.arrives("late", "short", tokens=1000, ttft_s=0.04)
    assert group.plans() == ["start short (on_time)"]


def test_models_that_left_are_remembered_if_among_the_last_or_with_requests():
    group = Group("busy")
    group.arrives("r", "busy")
    forgotten = group.becomes("busy", ModelFacts(Presence.GONE))
    for number in range(KEPT_MODELS + 2):
        group.becomes(f"m{number}", UP)
        forgotten += group.becomes(f"m{number}", ModelFacts(Presence.GONE))
    assert forgotten == ["m0", "m1"]
    group.ends("r")
    assert group.becomes("last", ModelFacts(Presence.GONE)) == ["busy", "m2"]


def test_a_model_is_idle_since_its_last_request_and_its_demand_follows_its_tokens():
    group = Group("a", "b")
    assert group.core.demand("a", group.now) == 0
    group.arrives("r", tpot_s=0.05)
    group.waits(5.0)
    assert group.core.idle_s("a", group.now) == 0
    group.plans()
    group.first_token("r")
    assert group.core.demand("a", group.now) > 0, "prompts count, too"
    group.core.step_ended("a", group.now)
    group.core.tokens("a", 100, group.now)
    both = group.core.demand("a", group.now)
    group.ends("r")
    group.waits(7.0)
    assert group.core.idle_s("a", group.now) == 7.0
    assert 0 < group.core.demand("a", group.now) < both
    group.core.tokens("b", 200, group.now)
    assert group.core.demand("b", group.now, tpot_s=0.1) == 2 * group.core.demand("b", group.now, tpot_s=0.2)


# --- conservation

MODELS = ("a", "b", "c")
model_names = strategies.sampled_from(MODELS)
FACTS = replace(UP, most_running=3)


LAYOUTS = (of_tokens(10), KvLayout((attention(10), window(20, 300, 50), state(3000))))


class Conservation(RuleBasedStateMachine):
    """Whatever happens, in any order: a request waits, or an engine has it, or it has ended, and it ends once."""

    def __init__(self):
        super().__init__()
        self.group = Group(*MODELS, facts=FACTS)
        self.waiting, self.running, self.prefilling = {}, {}, set()
        self.number = 0

    def plan(self):
        group = self.group
        for decision in group.core.plan(group.now, lambda: group.memory):
            match decision:
                case Start(request_id):
                    self.running[request_id] = self.waiting.pop(request_id)
                    self.prefilling.add(request_id)
                case Drop(request_id) | Expire(request_id):
                    del self.waiting[request_id]
                case RequestMemory():
                    group.requested.append(decision)

    @rule(
        model=model_names,
        tokens=strategies.integers(1, 4000),
        new=strategies.integers(0, 500),
        ttft_s=strategies.sampled_from([0.01, 0.3, 2.0, inf]),
        lasts_s=strategies.sampled_from([0.5, inf]),
        drop_late=strategies.booleans(),
        resumed=strategies.booleans(),
    )
    def arrive(self, model, tokens, new, ttft_s, lasts_s, drop_late, resumed):
        self.number += 1
        name = f"r{self.number}"
        facts = {"expires": self.group.now + lasts_s, "drop_late": drop_late, "resumed": resumed}
        self.group.arrives(name, model, tokens, new, ttft_s, **facts)
        self.waiting[name] = model

    @rule(seconds=strategies.sampled_from([0.0, 0.001, 0.2, 3.0]))
    def time_passes(self, seconds):
        self.group.waits(seconds)
        self.plan()

    @precondition(lambda self: self.prefilling)
    @rule(data=strategies.data())
    def first_token(self, data):
        name = data.draw(strategies.sampled_from(sorted(self.prefilling)))
        self.prefilling.discard(name)
        self.group.first_token(name)
        self.plan()

    @precondition(lambda self: self.running)
    @rule(data=strategies.data(), tokens=strategies.integers(1, 4000))
    def retract(self, data, tokens):
        name = data.draw(strategies.sampled_from(sorted(self.running)))
        self.group.core.retracted(name, self.group.now, tokens, 10)
        self.waiting[name] = self.running.pop(name)
        self.prefilling.discard(name)

    @precondition(lambda self: self.running or self.waiting)
    @rule(data=strategies.data(), output_tokens=strategies.integers(0, 300))
    def end(self, data, output_tokens):
        name = data.draw(strategies.sampled_from(sorted(self.running | self.waiting)))
        for _ in range(2):  # the second end is ignored
            self.group.ends(name, output_tokens=output_tokens)
        self.running.pop(name, None)
        self.waiting.pop(name, None)
        self.prefilling.discard(name)
        self.plan()

    @rule(model=model_names, presence=strategies.sampled_from(Presence), kv=strategies.sampled_from(LAYOUTS))
    def model_changes(self, model, presence, kv):
        self.group.becomes(model, replace(FACTS, presence=presence, kv=kv))

    @rule(free=strategies.sampled_from([0, 5_000, 50_000]), known=strategies.booleans())
    def memory_changes(self, free, known):
        if known:
            self.group.holds(free)
        else:
            self.group.memory = []

    @precondition(lambda self: self.group.requested)
    @rule(granted=strategies.booleans())
    def memory_is_answered(self, granted):
        self.group.core.memory_answered(self.group.requested.pop(), granted, self.group.now)

    @invariant()
    def every_request_is_in_one_place(self):
        core = self.group.core
        assert len(core) == len(self.waiting) + len(self.running)
        for model in MODELS:
            waiting, running, late = core.count(model)
            assert sorted(core.waiting_of(model)) == sorted(r for r, name in self.waiting.items() if name == model)
            assert waiting == sum(name == model for name in self.waiting.values()) >= late
            assert running == sum(name == model for name in self.running.values()) <= FACTS.most_running
            assert (core.model(model, self.group.now).committed > 0) == (running > 0)

    def teardown(self):
        """With every model up, memory enough and engines that end what they have, nothing waits for ever."""
        self.group.memory = []
        for model in MODELS:
            self.group.becomes(model, FACTS)
        while self.waiting:
            before = len(self.waiting)
            self.plan()
            if not self.running and len(self.waiting) == before:
                assert self.group.core.next_plan_at() < inf, f"{self.waiting} wait for nothing"
                self.group.now = max(self.group.now, self.group.core.next_plan_at())
            self.group.ends(*self.running)
            self.running.clear()


TestConservation = Conservation.TestCase
TestConservation.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def test_group_core_counts_missed_times_per_token_and_returns():
    """a's first request makes eleven tokens in two seconds with a target of 0.1 s, its second in half a second."""
    group = Group("a")
    for request_id, seconds in (("1", 2.0), ("2", 0.5)):
        group.now += 5.0
        group.arrives(request_id, ttft_s=3.0, tpot_s=0.1)
        group.plans()
        group.first_token(request_id)
        group.now += seconds
        group.ends(request_id, output_tokens=11)
    group.arrives("3", tpot_s=0.1)
    model = group.core.model("a", group.now)
    assert (model.tpot_missed, model.returns, model.ttft_s) == (1, 2, pytest.approx(3.0))
    assert model.arrived == 3
