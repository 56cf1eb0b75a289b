"""The room that an engine needs for adapters."""

import pytest

from loader.policy.adapter_pool import MODULES, MOST_SLOTS, Linear, pool

LINEARS = [Linear(name, 64, 32) for name in MODULES]


@pytest.mark.parametrize(("count", "slots"), [(1, 2), (2, 3), (3, 5), (4, 5), (5, 9), (8, 9), (100, 1 + MOST_SLOTS)])
def test_slots_are_rounded_up_and_bounded_with_one_more_for_the_base(count, slots):
    assert pool([4] * count, ["q_proj"], LINEARS, 2, 4).slots == slots


def test_pool_has_the_largest_rank_and_all_layers_that_engines_join():
    found = pool([8, 2], ["k_proj", "down_proj"], LINEARS, 3, 2)
    assert (found.rank, found.modules) == (8, ("q_proj", "k_proj", "v_proj", "down_proj"))
    joined, alone = (3 * 8 * 32, 8 * 3 * 64), (8 * 32, 8 * 64)
    assert found.nbytes == 3 * 3 * 2 * sum(joined + alone)
