import pytest

from gpu_scheduler.memory.group_memory import GroupMemory
from gpu_scheduler.policy.memory.holdings import UNBOUNDED, for_admission
from gpu_scheduler.policy.queue.admission import ModelKv
from kv_kinds.layout import of_tokens
from protos import balloond_pb2

LAYOUTS = {"a": of_tokens(10), "b": of_tokens(10)}


def state(free=0):
    state = balloond_pb2.DeviceState(device="d", capacity_bytes=1000, free_bytes=free)
    state.bookings.add(model="a", limit_bytes=900, floor_bytes=300)
    state.bookings.add(model="b", limit_bytes=1000)
    return state


def known(state):
    memory = GroupMemory(["d"])
    memory.update([state])
    return for_admission(memory.devices, LAYOUTS, {"a": 150})


def test_memory_of_a_group_before_balloond_was_heard_limits_no_model():
    memory = for_admission(GroupMemory(["d"]).devices, LAYOUTS, {})
    assert memory.free == {} and memory.models["a"].limit == UNBOUNDED


@pytest.mark.parametrize(
    ("held", "used", "cached", "reserve", "free", "kept"),
    [
        (500, 100, 300, 100, 200, 200),  # 200 are above the floor: everybody's; 200 under it: its own
        (500, 400, 100, 0, 100, 0),
        (300, 100, 200, 0, 0, 200),
        (200, 0, 150, 50, 0, 200),
    ],
)
def test_idle_memory_is_free_for_all_above_the_floor_and_the_models_own_under_it(
    held, used, cached, reserve, free, kept
):
    told = state()
    told.leases.add(model="a", kv_bytes=held, kv_used_bytes=used, kv_cached_bytes=cached, kv_reserve_bytes=reserve)
    memory = known(told)
    assert memory.free == {"d": free}
    assert memory.models["a"] == ModelKv(
        limit=900, held=used + kept, reclaimable=kept, growth=max(0, 150 - used), kv=of_tokens(10), devices=("d",)
    )
    assert memory.models["b"] == ModelKv(limit=1000, held=0, kv=of_tokens(10), devices=("d",))


def test_memory_of_a_model_on_several_devices_is_that_of_the_smallest():
    memory = GroupMemory(["d", "e"])
    one, two = state(free=500), state(free=100)
    two.device = "e"
    two.bookings[0].limit_bytes = 700
    one.leases.add(model="a", kv_bytes=400, kv_used_bytes=100, kv_cached_bytes=300)
    two.leases.add(model="a", kv_bytes=350, kv_used_bytes=120, kv_cached_bytes=230)
    memory.update([one, two, balloond_pb2.DeviceState(device="of another group")])
    known = for_admission(memory.devices, {"a": of_tokens(10)}, {"a": 150})
    assert known.free == {"d": 600, "e": 150}
    assert known.models["a"] == ModelKv(
        limit=700, held=300, reclaimable=180, growth=50, kv=of_tokens(10), devices=("d", "e")
    )
    assert memory.limit_bytes("a") == 1600 and memory.free_bytes == 600
