"""Idle models make way for KV."""

from hypothesis import given, settings
from hypothesis import strategies as st

from placement.policy.kvpr import Device, Group, Model, Place
from placement.policy.lifecycle.decisions import Hibernate, LifecycleRules, PlacedModel
from placement.policy.lifecycle.kv_pressure import lacking, relieve

GROUP = Group("g", (Device("d0", 1000),))
RULES = LifecycleRules(kv_idle_s=1.0, headroom=0.2, stay=0.0)


def on(name, weights, **facts):
    model = Model(name, 1.0, weights, quota=10, kept=10, pinned=facts.pop("pinned", False))
    return PlacedModel(model, Place("g", ("d0",)), **facts)


def leave(*residents, rules=RULES):
    return [d.model for d in relieve(GROUP, residents, rules).decisions]


def test_relief_is_none_while_running_requests_leave_the_headroom_free():
    busy, idle = on("busy", 290, kv_used=320), on("idle", 290, idle_s=60.0)  # 400 for KV, of which 80 stay free
    assert leave(busy, idle) == []
    assert lacking(GROUP, [busy, idle], RULES) == {}


def test_relief_hibernates_the_idle_model_with_the_shortest_wake_up():
    busy = on("busy", 190, kv_used=330)
    slow, quick = on("slow", 190, idle_s=60.0, wake_s=2.0), on("quick", 190, idle_s=60.0, wake_s=0.2)
    assert leave(busy, slow, quick) == ["quick"]


def test_relief_hibernates_as_many_models_as_cover_the_kv_of_waiting_requests():
    idle = [on(f"i{n}", 90, idle_s=60.0 + n) for n in range(3)]
    assert leave(on("busy", 290, kv_used=290, kv_lacking=85), *idle) == ["i2"]
    assert leave(on("busy", 290, kv_used=290, kv_lacking=285), *idle) == ["i2", "i1", "i0"]


def test_relief_counts_missing_kv_even_if_little_is_in_use():
    """Floors of idle models hold it."""
    hungry, idle = on("hungry", 290, kv_used=10, kv_lacking=20), on("idle", 290, idle_s=60.0)
    assert lacking(GROUP, [hungry, idle], RULES) == {"d0": 20}
    assert leave(hungry, idle) == ["idle"]


def test_relief_reason_names_the_model_whose_kv_is_short():
    (decision,) = relieve(
        GROUP, [on("busy", 490, kv_used=300, kv_lacking=50), on("idle", 290, idle_s=60.0)], RULES
    ).decisions
    assert decision == Hibernate("idle", "g", "idle for 60 s; frees 290 bytes for KV of busy; back in about 1 s")


def test_relief_spares_busy_pinned_and_sleeping_models():
    hungry = on("hungry", 290, kv_used=300, kv_lacking=500)
    assert leave(hungry, on("busy", 90, idle_s=0.5), on("pinned", 90, idle_s=9.0, pinned=True)) == []
    assert leave(hungry, on("asleep", 90, idle_s=9.0, hibernating=True)) == []


@given(
    st.lists(st.tuples(st.integers(0, 200), st.integers(0, 9), st.integers(0, 200), st.booleans()), max_size=6),
    st.integers(0, 400),
)
def test_relief_takes_only_needed_idle_models_and_suffices_whenever_possible(drawn, more):
    residents = [
        on(f"m{i}", weights, idle_s=0.0 if used else float(idle), kv_used=used, pinned=pinned)
        for i, (weights, idle, used, pinned) in enumerate(drawn)
    ] + [on("hungry", 100, kv_lacking=more)]
    relief = relieve(GROUP, residents, RULES)
    by_name = {r.model.name: r for r in residents}
    left = [by_name[d.model] for d in relief.decisions]
    assert all(r.idle_s >= 1.0 and not r.model.pinned for r in left)
    short = lacking(GROUP, residents, RULES).get("d0", 0)
    freed = sum(r.model.weights for r in left)
    could = sum(r.model.weights for r in residents if r.idle_s >= 1.0 and not r.model.pinned)
    assert freed >= min(short, could)
    assert all(freed - r.model.weights < short for r in left)


LOOK_S = 0.1


class BackAndForth:
    """A group that always lacks KV, and a model on it that is asked for as soon as it sleeps: the most that relief and
    its requests can make of each other. It comes up in `wake_s`, the first time cold."""

    def __init__(self, rules, wake_s, cold_s, serves_s):
        self.rules, self.wake_s, self.cold_s, self.serves_s = rules, wake_s, cold_s, serves_s
        self.slept_at = []

    def run(self, seconds):
        active_at = self.cold_s
        for look in range(1, round(seconds / LOOK_S) + 1):
            now = look * LOOK_S
            stay_s = max(0.0, now - active_at)
            idle_s = max(0.0, stay_s - self.serves_s)
            facts = {"stay_s": stay_s, "idle_s": idle_s, "wake_s": self.wake_s, "cold_s": self.cold_s}
            if leave(on("hungry", 290, kv_lacking=900), on("m", 290, **facts), rules=self.rules):
                self.slept_at.append(now)
                active_at = now + self.wake_s
        return self

    def most_a_minute(self):
        return max((sum(at <= each < at + 60.0 for each in self.slept_at) for at in self.slept_at), default=0)


def most_moves(rules, wake_s, serves_s=0.0, seconds=60.0):
    """How often a model may be sent to sleep in that time: each time it has come, and stayed for its least."""
    stays_s = max(serves_s + rules.kv_idle_s, rules.stay * wake_s)
    return 1 + seconds / (wake_s + stays_s)


@settings(max_examples=40)
@given(
    st.sampled_from([0.0, 0.2, 1.0, 5.0]),
    st.sampled_from([0.0, 1.0, 4.0, 16.0]),
    st.floats(0.1, 3.0),
    st.floats(0.0, 2.0),
)
def test_relief_hibernates_a_model_in_constant_demand_at_a_bounded_rate(kv_idle_s, stay, wake_s, serves_s):
    rules = LifecycleRules(kv_idle_s=kv_idle_s, stay=stay)
    world = BackAndForth(rules, wake_s, 3.0, serves_s).run(60.0)
    assert world.most_a_minute() <= most_moves(rules, wake_s, serves_s)
    assert world.slept_at[0] >= 3.0 + stay * wake_s - LOOK_S


def test_relief_by_default_costs_a_model_a_fifth_of_its_time_in_wake_ups():
    rules = LifecycleRules()
    world = BackAndForth(rules, 0.33, 0.33, 0.0).run(120.0)
    assert 30 <= world.most_a_minute() <= most_moves(rules, 0.33) < 38
    assert len(world.slept_at) * 0.33 <= 120.0 / 5
