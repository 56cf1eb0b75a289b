"""When a model gets a further group, and when it loses one."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from placement.policy.replication import Replica, Replication, ReplicationRules

RULES = ReplicationRules(most=3)
UP_S = RULES.window_s
"""When a model that came up at 0 s is judged."""
LATE, ON_TIME = Replica(share=0.9, waiting_late=4, busy=9), Replica(share=0.9, busy=3)


def late(*groups: str) -> Replication:
    """A model "m" that has been late on these groups from UP_S on, and came up there at 0 s."""
    replication = Replication(RULES)
    for now in (0.0, UP_S):
        for group in groups:
            replication.heard(group, {"m": LATE}, now)
    return replication


def test_replication_model_late_on_its_group_for_long_enough_is_short_of_groups() -> None:
    replication = late("a")
    assert replication.short(UP_S + 1.9) == []
    assert replication.short(UP_S + 2.0) == ["m"]


def test_replication_model_that_came_up_is_not_judged_by_what_waited_for_it() -> None:
    replication = Replication(RULES)
    for second in range(5):
        replication.heard("a", {"m": Replica(share=1.0, waiting_late=50 - 10 * second, missed=10 * second)}, second)
    for second in range(5, 12):
        replication.heard("a", {"m": Replica(share=1.0, missed=40, met=second, busy=1)}, second)
        assert replication.short(second) == []


def test_replication_one_late_request_does_not_make_a_model_short() -> None:
    replication = Replication(RULES)
    for second in range(30):
        replication.heard("a", {"m": Replica(share=1.0, missed=1, busy=1)}, second)
    assert replication.short(30.0) == []


def test_replication_most_first_tokens_late_make_a_model_short_though_none_waits_and_some_are_on_time() -> None:
    """Its group sends all requests to the engine."""
    replication, met, missed = Replication(RULES), 0, 0
    for tenth in range(0, 150):
        met, missed = met + (tenth % 5 == 0), missed + (tenth % 5 > 0)
        replication.heard("a", {"m": Replica(share=1.0, met=met, missed=missed, busy=2)}, tenth / 10)
    assert missed > met > 0
    assert replication.short(15.0) == ["m"]


def test_replication_moment_without_late_requests_begins_the_time_anew() -> None:
    replication = late("a")
    replication.heard("a", {"m": ON_TIME}, UP_S + 1.5)
    replication.heard("a", {"m": LATE}, UP_S + 1.6)
    assert replication.short(UP_S + 3.5) == [] and replication.short(UP_S + 3.6) == ["m"]


def test_replication_model_that_shares_its_group_with_others_demand_is_not_short() -> None:
    """It moves, or they do."""
    replication = Replication(RULES)
    for now in (0.0, 10.0):
        replication.heard("a", {"m": replace(LATE, share=0.4), "n": Replica(share=0.6)}, now)
    assert replication.short(100.0) == []
    replication.heard("a", {"m": replace(LATE, share=0.6), "n": Replica(share=0.4)}, 100.0)
    assert replication.short(102.0) == ["m"]


def test_replication_model_on_time_on_one_of_its_groups_is_not_short() -> None:
    replication = late("a", "b")
    assert replication.short(9.0) == ["m"]
    replication.heard("b", {"m": ON_TIME}, 9.0)
    assert replication.short(99.0) == []


def test_replication_pauses_after_a_grant_and_twice_as_long_after_each_that_brought_nothing() -> None:
    replication, now = late("a"), UP_S + 2.0
    for pause_s in (10.0, 20.0, 40.0):
        assert replication.short(now) == ["m"]
        replication.granted("m", 1000.0, now)
        assert replication.short(now + pause_s - 0.1) == []
        now += pause_s
    assert replication.short(now) == ["m"]


def test_replication_stops_at_the_most_groups_that_a_model_may_have() -> None:
    assert late("a", "b").short(9.0) == ["m"]
    assert late("a", "b", "c").short(9.0) == []


def grown() -> Replication:
    """A model that was short at 1,000 tokens/s on "a", and came up on "b" at 10 s."""
    replication = late("a")
    replication.granted("m", 1000.0, 9.0)
    replication.heard("b", {"m": Replica(share=1.0, busy=2)}, 10.0)
    replication.heard("a", {"m": ON_TIME}, 10.0)
    return replication


def test_replication_model_keeps_its_groups_at_the_rate_at_which_it_was_short_and_leaves_one_far_below() -> None:
    replication = grown()
    assert replication.surplus(1e6, lambda _: 1000.0) == replication.surplus(1e6, lambda _: 701.0) == []
    assert replication.surplus(69.9, lambda _: 100.0) == [], "it came up 59.9 s ago"
    assert replication.surplus(70.0, lambda _: 700.0) == [("m", "b")], "the one with fewer requests"
    assert replication.surplus(70.0, lambda _: 700.0, going={"a"}) == [("m", "a")], "the one that is to be emptied"
    replication.heard("b", {}, 71.0)
    assert replication.surplus(1e6, lambda _: 0.0) == [], "it has one left"


def test_replication_remembers_the_rate_while_a_group_is_away() -> None:
    replication = grown()
    replication.heard("b", {}, 20.0)
    replication.heard("b", {"m": Replica(share=1.0)}, 21.0)
    assert replication.surplus(1e6, lambda _: 701.0) == []
    assert replication.surplus(81.0, lambda _: 700.0) == [("m", "b")]


def test_replication_model_of_unknown_rate_leaves_a_group_after_a_long_time_without_being_short() -> None:
    """As after a restart of placement."""
    replication = Replication(RULES)
    for group in "ab":
        replication.heard(group, {"m": ON_TIME}, 0.0)
    assert replication.surplus(599.9, lambda _: 500.0) == []
    assert replication.surplus(600.0, lambda _: 500.0) == [("m", "a")]


def test_replication_model_that_is_held_leaves_no_group_though_one_was_away() -> None:
    replication = Replication(RULES)
    for group in ("a", "b"):
        replication.heard(group, {"m": ON_TIME}, 0.0)
    replication.hold("m", True)
    assert replication.surplus(10_000.0, lambda name: 0.0) == []
    replication.hold("m", False)
    assert replication.surplus(10_000.0, lambda name: 0.0) != []
    replication.hold("m", True)
    replication.heard("b", {}, 10_000.0)
    assert replication.surplus(10_000.0, lambda name: 0.0) == [], "it has one group"
    replication.heard("b", {"m": ON_TIME}, 10_000.0)
    assert replication.surplus(20_000.0, lambda name: 0.0) == []
    replication.keep(["m"])
    assert replication.surplus(20_000.0, lambda name: 0.0) == []
    replication.keep([])
    assert replication.surplus(20_000.0, lambda name: 0.0) != [], "another model may have come under the name"


def test_replication_model_on_more_groups_than_it_may_have_leaves_one_at_once_though_it_is_short_or_held() -> None:
    replication = late("a", "b", "c")
    replication.hold("m", True)
    assert replication.surplus(UP_S, lambda _: 1e6, most=lambda _: 3) == []
    assert replication.surplus(UP_S, lambda _: 1e6, most=lambda _: 2) == [("m", "a")]
    assert replication.surplus(UP_S, lambda _: 1e6, going={"c"}, most=lambda _: 1) == [("m", "c")]
    replication.heard("d", {"m": LATE}, UP_S)
    assert len(replication.groups("m")) > RULES.most
    assert replication.surplus(UP_S, lambda _: 1e6) == [("m", "a")], "the bound of the rules"


def test_replication_forgets_the_models_of_a_lost_group() -> None:
    replication = late("a")
    replication.heard("a", {}, 6.0)
    assert (replication.groups("m"), replication.short(100.0)) == ([], [])


_COUNT = st.integers(0, 6)
_STEPS = st.lists(
    st.tuples(
        st.sampled_from("abcd"),
        st.dictionaries(
            st.sampled_from("mn"), st.builds(Replica, st.sampled_from([0.2, 1.0]), _COUNT, _COUNT, _COUNT, _COUNT)
        ),
        st.floats(0.0, 5.0),
        st.floats(0.0, 2000.0),
    ),
    max_size=40,
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
        short = replication.short(now)
        for name in short:
            assert 0 < len(on[name]) < RULES.most
            assert any(there[each][name].share >= RULES.share for each in on[name])
            replication.granted(name, rate, now)
        assert replication.short(now) == []
        for name, group in replication.surplus(now, lambda _, rate=rate: rate):
            assert group in on[name] and len(on[name]) > 1
            assert name not in short or len(on[name]) > RULES.most
