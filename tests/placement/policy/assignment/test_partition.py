"""A cluster divided once and for good."""

from placement.policy.assignment.partition import partition
from placement.policy.kvpr import Device, Group, Model

TWO = [Group("A", (Device("a0", 100),)), Group("B", (Device("b0", 100),))]


def test_memory_left_after_weights_and_quotas_is_divided_by_demand():
    parts = partition(TWO[:1], [Model("hot", 30.0, 20, quota=5), Model("calm", 10.0, 30, quota=5)])
    assert {name: part.kv_bytes for name, part in parts.items()} == {"hot": 30, "calm": 10}
    assert {part.place.group for part in parts.values()} == {"A"}


def test_nobody_gets_less_than_a_floor_and_the_others_bear_it():
    models = [Model("hot", 30.0, 10), Model("warm", 10.0, 10), Model("calm", 1.0, 20, floor=12)]
    parts = partition(TWO[:1], models)
    assert {name: part.kv_bytes for name, part in parts.items()} == {"hot": 36, "warm": 12, "calm": 12}


def test_demand_decides_who_shares_a_device():
    models = [Model("one", 10.0, 10), Model("two", 10.0, 10), Model("three", 1.0, 10), Model("four", 1.0, 10)]
    parts = partition(TWO, models)
    assert parts["one"].place != parts["two"].place and parts["three"].place != parts["four"].place


def test_a_model_without_room_has_no_part():
    assert set(partition(TWO[:1], [Model("large", 10.0, 90), Model("late", 1.0, 80)])) == {"large"}


def test_what_all_devices_of_a_tensor_parallel_model_have_counts():
    group = Group("T", (Device("t0", 100), Device("t1", 80)))
    assert partition([group], [Model("wide", 10.0, 40, floor=10, parts=2)])["wide"].kv_bytes == 60
