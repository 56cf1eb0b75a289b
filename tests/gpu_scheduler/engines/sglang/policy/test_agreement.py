import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_scheduler.engines.sglang.policy.agreement import RankFacts, RanksDisagree, StepAgreement, agree, common

facts = st.builds(
    RankFacts,
    news=st.booleans(),
    wanted=st.integers(0, 1 << 40),
    limit=st.one_of(st.none(), st.integers(0, 1 << 40)),
    arrived=st.integers(0, 1 << 20),
    slow=st.frozensets(st.sampled_from("abc")),
)
ranks = st.lists(facts, min_size=1, max_size=4)
offers = st.lists(st.sets(st.integers(0, 60)), min_size=1, max_size=4)


@given(ranks)
def test_agreement_of_ranks_is_what_every_rank_can_keep_to(told):
    agreed = agree(told)
    for one in told:
        assert one.limit is None or (agreed.limit is not None and agreed.limit <= one.limit)
        assert agreed.arrived <= one.arrived
        assert agreed.wanted >= one.wanted
        assert agreed.news or not one.news
        assert agreed.slow >= one.slow


@given(ranks)
def test_agreement_of_ranks_has_only_values_that_a_rank_reported(told):
    agreed = agree(told)
    assert agreed.limit in {one.limit for one in told}
    assert agreed.arrived in {one.arrived for one in told}
    assert agreed.wanted in {one.wanted for one in told}
    assert all(any(name in one.slow for one in told) for name in agreed.slow)


@given(ranks, st.randoms(use_true_random=False))
def test_agreement_of_ranks_does_not_depend_on_their_order(told, random):
    shuffled = list(told)
    random.shuffle(shuffled)
    assert agree(shuffled) == agree(told)


def test_agreement_of_one_rank_is_its_own_facts():
    assert agree([RankFacts(True, 5, 100, 3)]) == StepAgreement(True, 5, 100, 3)


def test_ranks_that_decided_differently_are_found_out():
    agree([RankFacts(mark=("a", 1)), RankFacts(mark=("a", 1))])
    with pytest.raises(RanksDisagree, match="parted"):
        agree([RankFacts(mark=("a", 1)), RankFacts(mark=("a", 2))])


@given(offers, st.integers(0, 70))
def test_growth_takes_only_what_every_rank_offers_and_no_more_than_is_wanted(offered, count):
    taken = common([sorted(offer) for offer in offered], count)
    assert all(set(taken) <= offer for offer in offered)
    assert len(taken) == min(count, len(set.intersection(*offered)))
    assert taken == sorted(taken)


@given(offers, st.integers(0, 70))
def test_growth_takes_the_lowest_extents_that_every_rank_offers(offered, count):
    taken = common([sorted(offer) for offer in offered], count)
    left = set.intersection(*offered) - set(taken)
    assert not left or not taken or max(taken) < min(left)
