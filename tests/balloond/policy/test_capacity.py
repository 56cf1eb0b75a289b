from dataclasses import replace

import pytest

from balloond.policy import capacity
from balloond.policy.capacity import DeviceHardware
from services.errors import Refused, Unmet

GIB = 1 << 30
PAGE = 2 << 20
H200 = DeviceHardware(
    model="NVIDIA H200",
    driver="580.1",
    total_bytes=140 * GIB,
    free_bytes=139 * GIB,
    page_bytes=PAGE,
    shares_memory=True,
    partitioned=False,
)


def test_a_gpu_that_can_be_managed_is_passed():
    capacity.check("cuda:0", H200, PAGE)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"partitioned": True}, "cuda:0 (NVIDIA H200) is partitioned: MIG has to be off"),
        ({"shares_memory": False}, "cuda:0 (NVIDIA H200) with driver 580.1 cannot hand memory over"),
        ({"page_bytes": 2 * PAGE}, f"cuda:0 (NVIDIA H200) maps pages of {2 * PAGE} bytes, not of {PAGE}"),
    ],
)
def test_a_gpu_that_cannot_be_managed_is_refused_in_one_line(change, line):
    with pytest.raises(Unmet) as refused:
        capacity.check("cuda:0", replace(H200, **change), PAGE)
    assert str(refused.value).startswith(line)
    assert "\n" not in str(refused.value)


def test_capacity_not_configured_is_free_memory_less_the_reserve_in_whole_pages():
    assert capacity.fresh("cuda:0", H200, None, GIB, PAGE) == 138 * GIB
    uneven = replace(H200, free_bytes=139 * GIB - 1)
    assert capacity.fresh("cuda:0", uneven, None, GIB, PAGE) == 138 * GIB - PAGE


def test_capacity_that_is_configured_is_used_unchanged():
    assert capacity.fresh("cuda:0", H200, 139 * GIB, GIB, PAGE) == 139 * GIB


def test_a_capacity_that_other_processes_took_is_refused_with_their_names():
    busy = replace(H200, free_bytes=60 * GIB, processes=((7, GIB), (8, 79 * GIB)))
    with pytest.raises(Refused) as refused:
        capacity.fresh("cuda:0", busy, 100 * GIB, GIB, PAGE)
    assert str(refused.value) == (
        f"cuda:0: capacity_bytes is {100 * GIB}, but {60 * GIB} of {140 * GIB} bytes are free, {80 * GIB} taken"
        f" (process 8: {79 * GIB}, 7: {GIB})"
    )


def test_a_full_gpu_is_refused():
    with pytest.raises(Refused, match="cuda:0: nothing is left to give out: 1000 of"):
        capacity.fresh("cuda:0", replace(H200, free_bytes=1000), None, GIB, PAGE)


def test_capacity_given_out_is_less_by_the_spares():
    assert capacity.given_out("cuda:0", 100, 30) == 70
    with pytest.raises(Refused, match="cuda:0: its capacity of 30 bytes is less than the 30 of spares"):
        capacity.given_out("cuda:0", 30, 30)


def test_descriptors_are_needed_one_for_each_extent_of_a_device():
    assert capacity.descriptors(140 * GIB, 8 << 20) == 17920
    capacity.check_descriptors("balloond", 17920, 20000)
    with pytest.raises(Refused, match="the keeper may open 4096 descriptors, and 18176 are needed"):
        capacity.check_descriptors("the keeper", 17920, 4096)
