"""When a model gets a further group, and when it loses one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from placement.policy.replication import Replica, Replication, ReplicationRules

RULES = ReplicationRules(most=3, late_s=2.0, share=0.5, calm=0.7, stay_s=60.0, again_s=10.0)
LATE, ON_TIME = Replica(0.9, waiting_late=4, busy=9), Replica(0.9, busy=0)


def hot(*groups: str, now: float = 0.0) -> Replication:
    """A model "m" that is late on these groups."""
    replication = Replication(RULES)
    for group in groups:
        replication.heard(group, {"m": LATE}, now)
    return replication


def test_replication_model_late_on_its_group_for_long_enough_is_short_of_groups() -> None:
    replication = hot("a")
    assert replication.short(1.9) == []
    assert replication.short(2.0) == ["m"]


def test_replication_moment_without_late_requests_begins_the_time_anew() -> None:
    replication = hot("a")
    replication.heard("a", {"m": ON_TIME}, 1.5)
    replication.heard("a", {"m": LATE}, 1.6)
    assert replication.short(3.5) == [] and replication.short(3.6) == ["m"]


def test_replication_model_whose_first_tokens_are_late_is_short_though_none_of_its_requests_waits() -> None:
    """Its group sends them all to the engine."""
    replication = Replication(RULES)
    replication.heard("a", {"m": Replica(1.0, met=100, missed=10, busy=9)}, 0.0)
    replication.heard("a", {"m": Replica(1.0, met=101, missed=12, busy=9)}, 1.0)
    replication.heard("a", {"m": Replica(1.0, met=101, missed=12, busy=9)}, 2.0)
    assert replication.short(3.0) == ["m"], "nothing new was said of first tokens"
    replication.heard("a", {"m": Replica(1.0, met=103, missed=13, busy=9)}, 3.1)
    assert replication.short(99.0) == []


def test_replication_model_without_requests_is_not_short() -> None:
    replication = hot("a")
    replication.heard("a", {"m": Replica(0.9)}, 1.0)
    assert replication.short(99.0) == []


def test_replication_model_that_shares_its_group_with_others_demand_is_not_short() -> None:
    """It moves, or they do."""
    replication = Replication(RULES)
    replication.heard("a", {"m": Replica(0.4, waiting_late=4), "n": Replica(0.6)}, 0.0)
    assert replication.short(100.0) == []


def test_replication_model_on_time_on_one_of_its_groups_is_not_short() -> None:
    replication = hot("a", "b")
    assert replication.short(9.0) == ["m"]
    replication.heard("b", {"m": ON_TIME}, 9.0)
    assert replication.short(99.0) == []


def test_replication_granted_model_is_not_short_again_before_its_group_could_come_up() -> None:
    replication = hot("a")
    replication.granted("m", 1000.0, 2.0)
    assert replication.short(11.9) == [] and replication.short(12.0) == ["m"]


def test_replication_stops_at_the_most_groups_that_a_model_may_have() -> None:
    assert hot("a", "b").short(9.0) == ["m"]
    assert hot("a", "b", "c").short(9.0) == []


def test_replication_model_keeps_its_groups_at_the_rate_at_which_it_was_short_and_loses_one_far_below() -> None:
    replication = hot("a")
    replication.granted("m", 1000.0, 2.0)
    replication.heard("a", {"m": Replica(0.9, met=1, busy=3)}, 5.0)
    replication.heard("b", {"m": Replica(1.0, busy=2)}, 5.0)
    assert replication.surplus(1000.0, lambda _: 1000.0) == []
    assert replication.surplus(1000.0, lambda _: 701.0) == []
    assert replication.surplus(64.9, lambda _: 100.0) == [], "it came up 59.9 s ago"
    assert replication.surplus(65.0, lambda _: 700.0) == [("m", "b")], "the one with fewer requests"
    replication.heard("b", {}, 66.0)
    assert replication.surplus(1000.0, lambda _: 0.0) == [], "it has one left"


def test_replication_forgets_the_models_of_a_lost_group() -> None:
    replication = hot("a")
    replication.heard("a", {}, 1.0)
    assert (replication.groups("m"), replication.short(100.0)) == ([], [])


_STEPS = st.lists(
    st.tuples(
        st.sampled_from("abcd"),
        st.dictionaries(
            st.sampled_from("mn"),
            st.builds(Replica, st.sampled_from([0.2, 1.0]), st.integers(0, 2), st.integers(0, 3), st.integers(0, 3)),
        ),
        st.floats(0.0, 5.0),
        st.floats(0.0, 2000.0),
    ),
    max_size=30,
)


@given(_STEPS)
def test_replication_decisions_keep_to_the_bounds_whatever_is_heard(steps: list) -> None:
    replication, there, now = Replication(RULES), dict[str, dict[str, Replica]](), 0.0
    for group, replicas, pause_s, rate in steps:
        now += pause_s
        replication.heard(group, replicas, now)
        there[group] = replicas
        on = {name: [each for each, models in there.items() if name in models] for name in "mn"}
        assert all(sorted(replication.groups(name)) == sorted(groups) for name, groups in on.items())
        for name in replication.short(now):
            assert 0 < len(on[name]) < RULES.most
            assert all(there[each][name].share >= RULES.share for each in on[name])
            replication.granted(name, rate, now)
        for name, group in replication.surplus(now, lambda _, rate=rate: rate):
            assert group in on[name] and len(on[name]) > 1 and name not in replication.short(now)
