import pytest

from gpu_scheduler.engines.sglang.base.errors import NoMemory
from gpu_scheduler.engines.sglang.policy.quota import SPARE_BYTES, booked, left_to_torch

GIB = 1 << 30
MIB = 1 << 20


def test_quota_stated_in_the_catalogue_is_booked_if_it_is_enough():
    assert booked("m", 2 * GIB, 3 * GIB) == 3 * GIB
    assert booked("m", 2 * GIB, 2 * GIB) == 2 * GIB


def test_quota_not_stated_is_booked_as_measured_and_some_more():
    assert booked("m", 2 * GIB, 0) == 2 * GIB + SPARE_BYTES


def test_quota_smaller_than_measured_is_refused_with_both_numbers():
    with pytest.raises(NoMemory) as refusal:
        booked("m", 2 * GIB + GIB // 10, GIB)
    assert str(refusal.value) == (
        "m needs 2.10 GiB of its device beside weights and KV, its quota is 1.00 GiB: raise quota_bytes"
    )


def test_torch_may_take_as_much_as_it_took_where_the_stated_quota_is_hardly_larger():
    assert left_to_torch(2000 * MIB, 2000 * MIB, 700 * MIB) == 1300 * MIB
    assert left_to_torch(2010 * MIB, 2000 * MIB, 700 * MIB) == 1300 * MIB
    assert left_to_torch(2128 * MIB, 2000 * MIB, 700 * MIB) == 1364 * MIB
