"""Eviction under demand."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.policy.kvpr import Model, Place
from placement.policy.lifecycle.decisions import GoCold, Hibernate, LifecycleRules, PlacedModel
from placement.policy.lifecycle.model_eviction import evict

PLACE = Place("g", ("d0",))


def resident(name, weights=40, quota=10, idle_s=60.0, **facts):
    model = Model(name, weights=weights, quota=quota, pinned=facts.pop("pinned", False))
    return PlacedModel(model, PLACE, idle_s=idle_s, **facts)


def names(eviction):
    return [(type(d).__name__, d.model) for d in eviction.decisions]


def test_eviction_of_no_bytes_evicts_no_model():
    assert evict([resident("a", idle_s=1e6)], {}).decisions == ()
    assert evict([resident("a", idle_s=1e6)], {"d0": 0}).decisions == ()


def test_eviction_spares_busy_and_pinned_models():
    busy, pinned = resident("busy", idle_s=0.9), resident("pinned", pinned=True)
    eviction = evict([busy, pinned], {"d0": 10})
    assert (eviction.decisions, eviction.short, eviction.enough) == ((), {"d0": 10}, False)
    assert names(evict([resident("idle", idle_s=1.0)], {"d0": 10})) == [("Hibernate", "idle")]


def test_eviction_for_an_engine_sends_one_model_cold_a_sleeping_one_first():
    awake, asleep = resident("awake"), resident("asleep", hibernating=True, idle_s=5.0)
    eviction = evict([awake, asleep], {}, engines_wanted=1)
    assert (names(eviction), eviction.enough) == ([("GoCold", "asleep")], True)
    assert eviction.decisions[0].reason.startswith("hibernating; frees 10 bytes and an engine for others; back in")
    assert names(evict([awake], {}, engines_wanted=1)) == [("GoCold", "awake")]


def test_eviction_for_an_engine_spares_models_that_have_none_or_are_busy_or_pinned():
    residents = [
        resident("buried", has_engine=False),
        resident("busy", idle_s=0.0),
        resident("pinned", pinned=True, hibernating=True),
    ]
    eviction = evict(residents, {}, engines_wanted=1)
    assert (eviction.decisions, eviction.enough, eviction.engines_short) == ((), False, 1)


def test_eviction_of_one_model_may_free_both_the_bytes_and_the_engine():
    residents = [resident("a", idle_s=50.0), resident("b", idle_s=60.0), resident("c", hibernating=True)]
    eviction = evict(residents, {"d0": 40}, engines_wanted=1)
    assert eviction.enough and len(eviction.decisions) <= 2
    assert names(evict(residents[:1], {"d0": 40}, engines_wanted=1)) == [("GoCold", "a")]


def test_eviction_without_idle_or_stay_times_spares_busy_and_starting_models():
    rules = LifecycleRules(idle_s=0.0, stay=0.0)
    assert not evict([resident("busy", idle_s=0.0, stay_s=9.0)], {"d0": 10}, rules).decisions
    assert not evict([resident("coming", idle_s=0.0, stay_s=0.0)], {"d0": 10}, rules).decisions
    assert evict([resident("idle", idle_s=0.01)], {"d0": 10}, rules).enough


def test_eviction_takes_the_model_with_the_least_wake_up_time_per_byte():
    residents = [resident("slow", wake_s=2.0), resident("quick", wake_s=0.5), resident("small", 10, wake_s=0.4)]
    assert names(evict(residents, {"d0": 40})) == [("Hibernate", "quick")]


def test_eviction_among_equal_models_takes_the_longest_idle():
    assert names(evict([resident("a", idle_s=50.0), resident("b", idle_s=70.0)], {"d0": 5})) == [("Hibernate", "b")]


def test_eviction_weighs_wake_up_time_against_idle_time():
    often, seldom = resident("often", idle_s=3.0, wake_s=0.2), resident("seldom", idle_s=90.0, wake_s=0.4)
    assert names(evict([often, seldom], {"d0": 40})) == [("Hibernate", "seldom")]


def test_eviction_spares_a_model_for_several_times_its_wake_up_time():
    rules = LifecycleRules(idle_s=1.0, stay=4.0)
    assert not evict([resident("new", wake_s=2.0, stay_s=7.9)], {"d0": 10}, rules).decisions
    assert evict([resident("new", wake_s=2.0, stay_s=8.0)], {"d0": 10}, rules).enough


@pytest.mark.parametrize(("hibernate", "has_image"), [(False, True), (True, False)])
def test_eviction_spares_a_model_that_would_come_back_cold_for_several_cold_starts(hibernate, has_image):
    rules = LifecycleRules(idle_s=1.0, stay=4.0, hibernate=hibernate)
    takes = {"wake_s": 0.3, "cold_s": 10.0, "has_image": has_image}
    assert not evict([resident("new", stay_s=39.9, **takes)], {"d0": 10}, rules).decisions
    assert evict([resident("new", stay_s=40.0, **takes)], {"d0": 10}, rules).enough


def test_eviction_does_not_spare_a_model_for_its_cold_start_if_it_wakes_quickly():
    rules = LifecycleRules(idle_s=1.0, stay=4.0)
    assert evict([resident("read for a minute", wake_s=0.3, cold_s=60.0, stay_s=1.3)], {"d0": 10}, rules).enough


def test_eviction_takes_a_model_with_an_image_before_one_that_would_read_its_checkpoint():
    bare, slow = resident("bare", wake_s=0.2, cold_s=30.0, has_image=False), resident("slow", wake_s=2.0)
    assert names(evict([bare, slow], {"d0": 40})) == [("Hibernate", "slow")]
    both = evict([bare, slow], {"d0": 80})
    assert sorted(names(both)) == [("Hibernate", "bare"), ("Hibernate", "slow")]
    (told,) = (d.reason for d in both.decisions if d.model == "bare")
    assert told.endswith("back in about 30 s, from its checkpoint: there is no image of its weights")


def test_eviction_restricted_to_hibernation_sends_no_model_cold():
    residents = [resident("idle"), resident("asleep", hibernating=True)]
    eviction = evict(residents, {"d0": 50}, go_cold=False)
    assert names(eviction) == [("Hibernate", "idle")] and eviction.short == {"d0": 10}


def test_eviction_leaves_out_a_model_that_another_makes_needless():
    residents = [resident("small", 30, wake_s=0.1), resident("large", 90, wake_s=1.0)]
    assert names(evict(residents, {"d0": 80})) == [("Hibernate", "large")]


def test_engines_go_cold_only_where_hibernation_is_not_enough():
    residents = [resident("a", 40, quota=10, cold_s=20.0), resident("b", 40, quota=10, cold_s=10.0)]
    assert names(evict(residents, {"d0": 80})) == [("Hibernate", "a"), ("Hibernate", "b")]
    assert names(evict(residents, {"d0": 85})) == [("Hibernate", "a"), ("GoCold", "b")]
    assert names(evict(residents, {"d0": 100})) == [("GoCold", "a"), ("GoCold", "b")]
    assert evict(residents, {"d0": 101}).short == {"d0": 1}


def test_a_sleeping_engine_goes_cold_before_an_idle_model_does():
    asleep = resident("asleep", hibernating=True, quota=30, cold_s=5.0)
    idle = resident("idle", 40, quota=10, cold_s=5.0)
    assert names(evict([asleep, idle], {"d0": 60})) == [("Hibernate", "idle"), ("GoCold", "asleep")]


def test_host_memory_is_freed_by_the_engines_that_sleep():
    asleep = resident("asleep", hibernating=True, host_bytes=100)
    idle = resident("idle", host_bytes=100)
    assert names(evict([asleep, idle], {}, host_wanted=100)) == [("GoCold", "asleep")]
    assert names(evict([asleep, idle], {}, host_wanted=150)) == [("GoCold", "asleep"), ("GoCold", "idle")]
    assert evict([asleep, idle], {}, host_wanted=250).host_short == 50


def test_eviction_takes_only_models_on_a_device_that_is_short():
    here, there = resident("here"), PlacedModel(Model("there", weights=40), Place("g", ("d1",)), idle_s=99.0)
    assert names(evict([here, there], {"d0": 10})) == [("Hibernate", "here")]


def test_a_tensor_parallel_model_frees_a_part_on_each_device():
    tp = PlacedModel(Model("tp", weights=80, parts=2), Place("g", ("d0", "d1")), idle_s=60.0)
    assert evict([tp], {"d0": 40, "d1": 40}).enough
    assert evict([tp], {"d0": 41}).short == {"d0": 1}


def test_eviction_reason_states_the_freed_bytes_the_receiver_and_the_cost():
    (decision,) = evict([resident("a", 40, wake_s=0.3)], {"d0": 40}, for_whom="b").decisions
    assert decision.reason == "idle for 60 s; frees 40 bytes for b; back in about 0.3 s"


residents_of_all_kinds = st.lists(
    st.tuples(
        st.integers(1, 50), st.integers(0, 20), st.booleans(), st.booleans(), st.integers(0, 90), st.integers(1, 9)
    ),
    max_size=6,
)


@given(residents_of_all_kinds, st.integers(0, 200))
def test_eviction_frees_enough_whenever_possible_and_evicts_no_model_in_vain(drawn, wanted):
    residents = [
        resident(f"m{i}", weights, quota, float(idle), hibernating=asleep, pinned=pinned, wake_s=wake / 10)
        for i, (weights, quota, asleep, pinned, idle, wake) in enumerate(drawn)
    ]
    eviction = evict(residents, {"d0": wanted}, LifecycleRules(idle_s=45.0))
    by_name = {r.model.name: r for r in residents}

    def freed(decision):
        r = by_name[decision.model]
        sleep = 0 if r.hibernating else r.model.weights
        return sleep + (r.model.quota if isinstance(decision, GoCold) else 0)

    for decision in eviction.decisions:
        r = by_name[decision.model]
        assert not r.model.pinned
        assert r.hibernating or r.idle_s >= 45.0
        assert isinstance(decision, GoCold) or (isinstance(decision, Hibernate) and not r.hibernating)
    total = sum(freed(d) for d in eviction.decisions)
    most = sum((0 if r.hibernating else r.model.weights) + r.model.quota for r in residents if may_leave(r))
    assert eviction.short == ({"d0": wanted - total} if total < wanted else {})
    assert eviction.enough == (most >= wanted)
    if eviction.enough:
        n = len(eviction.decisions)
        for fewer in combinations(eviction.decisions, n - 1) if n else ():
            assert sum(freed(d) for d in fewer) < wanted
    elif not eviction.enough:
        assert total == most


def may_leave(r):
    return not r.model.pinned and (r.hibernating or r.idle_s >= 45.0)


@pytest.mark.parametrize("wanted", [0, -5])
def test_eviction_of_zero_or_negative_bytes_is_enough(wanted):
    assert evict([], {"d0": wanted}).enough


def test_eviction_without_hibernation_sends_as_few_models_cold_as_suffice():
    residents = [resident("first", weights=30, quota=10, idle_s=90.0), resident("second", weights=60, idle_s=90.0)]
    eviction = evict(residents, {"d0": 35}, LifecycleRules(hibernate=False))
    assert [(type(d), d.model) for d in eviction.decisions] == [(GoCold, "second")]
    eviction = evict(residents, {"d0": 80}, LifecycleRules(hibernate=False))
    assert {(type(d), d.model) for d in eviction.decisions} == {(GoCold, "first"), (GoCold, "second")}
