"""Models that fit nowhere, with the arithmetic."""

from hypothesis import given
from hypothesis import strategies as st

from placement.policy.kvpr import Books, Device, Group, Model
from placement.policy.lifecycle.refusal import could_hold, refusal

GROUPS = [Group("small", (Device("s0", 1_000),)), Group("large", (Device("l0", 5_000), Device("l1", 3_000)))]


def test_refusal_states_the_sum_against_the_largest_group():
    refused = refusal(Model("m", weights=4_000, floor=1_000, quota=500), GROUPS)
    assert refused.reason == (
        "weights 4,000 + floor 1,000 + engine quota 500 = 5,500 bytes; the largest group, large, has 5,000"
    )


def test_refusal_of_a_tensor_parallel_model_counts_its_part_on_each_device():
    refused = refusal(Model("m", weights=7_000, parts=2), GROUPS)
    assert refused.reason == (
        "weights 3,500 + floor 0 + engine quota 0 = 3,500 bytes on each of 2 devices; "
        "the largest group, large, has 3,000"
    )
    assert refusal(Model("m", weights=6_000, parts=2), GROUPS) is None
    assert refusal(Model("m", parts=4), GROUPS).reason == "it needs 4 devices of one group, the largest group has 2"


def test_refusal_without_a_group_says_that_no_group_is_here():
    assert refusal(Model("m"), []).reason == "no group is here"


@given(st.integers(0, 6_000), st.integers(0, 600), st.integers(0, 600), st.integers(1, 3))
def test_refusal_is_of_models_that_even_an_empty_cluster_cannot_hold(weights, floor, quota, parts):
    model = Model("m", 1.0, weights, floor, quota, parts)
    fits = any(sum(Books([g]).fits(model, d.name) for d in g.devices) >= parts for g in GROUPS)
    assert (refusal(model, GROUPS) is None) == fits == any(could_hold(model, group) for group in GROUPS)
