"""When a model that waits has to be looked at again."""

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.policy.kvpr import Device, Group, Model, Place
from placement.policy.lifecycle.decisions import LifecycleRules, PlacedModel
from placement.policy.lifecycle.eligibility import eligibility_fingerprint, holds_s

GROUP = Group("g", (Device("d0", 100),))
RULES = LifecycleRules(idle_s=2.0, kv_idle_s=5.0, stay=4.0, quantum_s=7.0)
SECONDS = st.one_of(st.just(0.0), st.floats(0.01, 30.0))


def on(name="m", **facts):
    model = Model(name, facts.pop("demand", 1.0), 40, pinned=facts.pop("pinned", False))
    return PlacedModel(model, Place("g", ("d0",)), **facts)


def test_footing_of_a_group_is_not_changed_by_the_load_of_a_busy_model():
    before = on(stay_s=60.0, claims=1, kv_used=5)
    after = on(stay_s=61.0, claims=9, kv_used=30, kv_lacking=8, demand=7.0)
    assert eligibility_fingerprint(GROUP, [before], RULES) == eligibility_fingerprint(GROUP, [after], RULES)


@pytest.mark.parametrize(
    "other",
    [
        [],
        [on(stay_s=60.0, hibernating=True)],
        [on(stay_s=60.0, idle_s=2.0)],
        [on(stay_s=6.9)],
        [replace(on(stay_s=60.0), model=Model("m", 1.0, 41))],
    ],
)
def test_footing_of_a_group_changes_when_a_model_leaves_sleeps_idles_comes_or_has_another_size(other):
    assert eligibility_fingerprint(GROUP, [on(stay_s=60.0)], RULES) != eligibility_fingerprint(GROUP, other, RULES)


def test_footing_of_a_group_changes_with_the_size_of_a_device():
    assert eligibility_fingerprint(GROUP, [], RULES) != eligibility_fingerprint(
        Group("g", (Device("d0", 101),)), [], RULES
    )


@pytest.mark.parametrize(
    ("resident", "seconds"),
    [
        (on(stay_s=60.0, idle_s=0.5), 1.5),
        (on(stay_s=60.0, idle_s=2.0), 3.0),
        (on(stay_s=60.0, idle_s=5.0), inf),
        (on(stay_s=60.0), inf),
        (on(stay_s=1.0, wake_s=0.5), 1.0),
        (on(stay_s=2.0, wake_s=0.5), 5.0),
        (on(stay_s=7.0, wake_s=0.5, cold_s=9.0), inf),
        (on(stay_s=7.0, wake_s=0.5, cold_s=9.0, has_image=False), 29.0),
        (on(idle_s=0.5, pinned=True), inf),
        (on(idle_s=0.5, hibernating=True), inf),
        (on(), inf),
    ],
)
def test_footing_holds_until_a_model_has_been_idle_or_awake_for_long_enough(resident, seconds):
    assert holds_s([resident], RULES) == seconds


@given(st.lists(st.tuples(SECONDS, SECONDS, st.floats(0.1, 3.0)), max_size=4), st.floats(0.0, 0.999))
def test_footing_does_not_change_by_time_alone_while_it_holds(drawn, share):
    here = [on(f"m{i}", stay_s=stay, idle_s=min(idle, stay), wake_s=wake) for i, (stay, idle, wake) in enumerate(drawn)]
    holds = holds_s(here, RULES)
    passed = min(holds, 100.0) * share
    later = [replace(r, stay_s=r.stay_s + passed, idle_s=r.idle_s + passed if r.idle_s else 0.0) for r in here]
    assert eligibility_fingerprint(GROUP, later, RULES) == eligibility_fingerprint(GROUP, here, RULES)
