"""A cluster divided once and for good."""

from placement.policy.assignment.partition import partition
from placement.policy.kvpr import Device, Group, Model

TWO = [Group("A", (Device("a0", 100),)), Group("B", (Device("b0", 100),))]


def test_partition_divides_memory_left_after_weights_and_quotas_by_demand():
    parts = partition(TWO[:1], [Model("hot", 30.0, 20, quota=5), Model("calm", 10.0, 30, quota=5)])
    assert {name: part.kv_bytes for name, part in parts.items()} == {"hot": 30, "calm": 10}
    assert {part.place.group for part in parts.values()} == {"A"}


def test_partition_gives_every_model_its_floor_at_the_cost_of_the_others():
    models = [Model("hot", 30.0, 10), Model("warm", 10.0, 10), Model("calm", 1.0, 20, floor=12)]
    parts = partition(TWO[:1], models)
    assert {name: part.kv_bytes for name, part in parts.items()} == {"hot": 36, "warm": 12, "calm": 12}


def test_partition_spreads_models_of_high_demand_over_devices():
    models = [Model("one", 10.0, 10), Model("two", 10.0, 10), Model("three", 1.0, 10), Model("four", 1.0, 10)]
    parts = partition(TWO, models)
    assert parts["one"].place != parts["two"].place and parts["three"].place != parts["four"].place


def test_partition_leaves_out_a_model_without_room():
    assert set(partition(TWO[:1], [Model("large", 10.0, 90), Model("late", 1.0, 80)])) == {"large"}


def test_partition_of_a_tensor_parallel_model_is_bounded_by_its_smallest_device():
    group = Group("T", (Device("t0", 100), Device("t1", 80)))
    assert partition([group], [Model("wide", 10.0, 40, floor=10, parts=2)])["wide"].kv_bytes == 60
