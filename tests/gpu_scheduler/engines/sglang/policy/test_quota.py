import pytest

from gpu_scheduler.engines.sglang.base.errors import NoMemory
from gpu_scheduler.engines.sglang.policy.quota import SPARE_BYTES, booked, left_to_torch, prefix_bytes

GIB = 1 << 30
MIB = 1 << 20


def test_quota_stated_in_the_catalogue_is_booked_if_it_is_enough():
    assert booked("m", 2 * GIB, 3 * GIB, MIB) == 3 * GIB
    assert booked("m", 2 * GIB, 2 * GIB, MIB) == 2 * GIB


def test_quota_not_stated_is_booked_as_measured_and_some_more():
    assert booked("m", 2 * GIB, 0, 3 * MIB) == 2 * GIB + SPARE_BYTES + 3 * MIB


def test_prefixes_take_a_number_for_each_token_that_the_device_can_cache():
    assert prefix_bytes(140 * GIB, [128 << 10]) == 8 * 140 * GIB // (128 << 10)
    assert prefix_bytes(140 * GIB, [64 << 10, 7 << 10]) == 8 * (140 * GIB // (7 << 10)), "most tokens of any mixture"


def test_quota_smaller_than_measured_is_refused_with_both_numbers():
    with pytest.raises(NoMemory) as refusal:
        booked("m", 2 * GIB + GIB // 10, GIB, MIB)
    assert str(refusal.value) == (
        "m needs 2.10 GiB of its device beside weights and KV, its quota is 1.00 GiB: raise quota_bytes"
    )


def test_torch_may_take_as_much_as_it_took_where_the_stated_quota_is_hardly_larger():
    assert left_to_torch(2000 * MIB, 2000 * MIB, 700 * MIB) == 1300 * MIB
    assert left_to_torch(2010 * MIB, 2000 * MIB, 700 * MIB) == 1300 * MIB
    assert left_to_torch(2128 * MIB, 2000 * MIB, 700 * MIB) == 1364 * MIB
