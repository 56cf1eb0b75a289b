"""Idle models make way for KV."""

from hypothesis import given
from hypothesis import strategies as st

from placement.policy.decisions import Hibernate, LifecycleRules, Resident
from placement.policy.kvpr import Device, Group, Model, Place
from placement.policy.relief import lacking, relieve

GROUP = Group("g", (Device("d0", 1000),))
RULES = LifecycleRules(kv_idle_s=1.0, headroom=0.2, stay=0.0)


def on(name, weights, **facts):
    model = Model(name, 1.0, weights, quota=10, kept=10, pinned=facts.pop("pinned", False))
    return Resident(model, Place("g", ("d0",)), **facts)


def leave(*residents, rules=RULES):
    return [d.model for d in relieve(GROUP, residents, rules).decisions]


def test_nobody_leaves_while_running_requests_leave_their_share_free():
    busy, idle = on("busy", 290, kv_used=320), on("idle", 290, idle_s=60.0)  # 400 for KV, of which 80 stay free
    assert leave(busy, idle) == []
    assert lacking(GROUP, [busy, idle], RULES) == {}


def test_the_idle_model_whose_wake_up_costs_least_sleeps_where_more_runs():
    busy = on("busy", 190, kv_used=330)
    slow, quick = on("slow", 190, idle_s=60.0, wake_s=2.0), on("quick", 190, idle_s=60.0, wake_s=0.2)
    assert leave(busy, slow, quick) == ["quick"]


def test_what_waiting_requests_lack_counts_and_no_more_leave_than_that_takes():
    idle = [on(f"i{n}", 90, idle_s=60.0 + n) for n in range(3)]
    assert leave(on("busy", 290, kv_used=290, kv_lacking=85), *idle) == ["i2"]
    assert leave(on("busy", 290, kv_used=290, kv_lacking=285), *idle) == ["i2", "i1", "i0"]


def test_a_reason_says_whose_kv_lacks_memory():
    (decision,) = relieve(
        GROUP, [on("busy", 490, kv_used=300, kv_lacking=50), on("idle", 290, idle_s=60.0)], RULES
    ).decisions
    assert decision == Hibernate("idle", "g", "idle for 60 s; frees 290 bytes for KV of busy; back in about 1 s")


def test_who_is_busy_pinned_or_asleep_stays():
    hungry = on("hungry", 290, kv_used=300, kv_lacking=500)
    assert leave(hungry, on("busy", 90, idle_s=0.5), on("pinned", 90, idle_s=9.0, pinned=True)) == []
    assert leave(hungry, on("asleep", 90, idle_s=9.0, hibernating=True)) == []


@given(
    st.lists(st.tuples(st.integers(0, 200), st.integers(0, 9), st.integers(0, 200), st.booleans()), max_size=6),
    st.integers(0, 400),
)
def test_what_leaves_is_needed_and_idle_and_suffices_whenever_it_can(drawn, more):
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
