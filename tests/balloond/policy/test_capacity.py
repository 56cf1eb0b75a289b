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


MIB = 1 << 20
OTHERS = capacity.descriptors([])


def test_descriptors_are_needed_one_for_each_extent_of_each_device_and_some_more():
    assert capacity.descriptors([(140 * GIB, 8 * MIB), (GIB - 1, 512 * MIB)]) == 17920 + 2 + OTHERS
    assert capacity.most_extents(17922 + OTHERS) == 17922


@pytest.mark.parametrize(
    ("gpus", "limit", "size"),
    [
        ([140 * GIB], 20000, 8 * MIB),
        ([80 * GIB] * 2, 20480 + OTHERS, 8 * MIB),
        ([80 * GIB] * 2, 20480 + OTHERS - 1, 16 * MIB),
        ([80 * GIB] * 2, 20000, 16 * MIB),
        ([80 * GIB] * 2, 4096, 64 * MIB),
        ([192 * GIB] * 8, 4096, None),
        ([GIB], 10, None),
    ],
)
def test_fitting_extent_is_the_smallest_of_which_the_limit_allows_a_descriptor_each(gpus, limit, size):
    devices = [(each, capacity.KV_EXTENT) for each in gpus]
    assert capacity.fitting(devices, limit) == size
    if size:
        capacity.check_descriptors("balloond", [(each, size) for each in gpus], limit)


def test_fitting_extent_of_devices_with_extents_of_their_own_is_not_smaller_than_the_smallest():
    assert capacity.fitting([(GIB, 2 * MIB), (GIB, 32 * MIB)], 20000) == 2 * MIB
    assert capacity.fitting([(GIB, 2 * MIB), (GIB, 32 * MIB)], OTHERS + 512) == 4 * MIB


def test_a_process_that_may_open_too_few_descriptors_is_refused_with_both_numbers_and_both_cures():
    devices = [(80 * GIB, 8 * MIB)] * 2
    with pytest.raises(Refused) as refused:
        capacity.check_descriptors("the keeper (process 7)", devices, 20000)
    assert str(refused.value) == (
        f"the keeper (process 7) may open 20000 descriptors, and {20480 + OTHERS} are needed for the extents of its "
        f"devices, which are of {8 * MIB} bytes; raise its limit to that (ulimit -Hn, LimitNOFILE=, --ulimit nofile=), "
        f"or give kv_extent_bytes of balloond, the loader and engines {16 * MIB}"
    )
    with pytest.raises(Refused) as hopeless:
        capacity.check_descriptors("balloond", devices, 300)
    assert "are needed" in str(hopeless.value) and "kv_extent_bytes" not in str(hopeless.value)
