from gpu_scheduler.policy.memory.holdings import DeviceMemory, Holding, for_admission
from kv_kinds.layout import of_tokens


def device(name="d", **facts):
    return DeviceMemory(name, 1000, 50, **facts)


def test_idle_memory_is_free_for_all_but_what_a_floor_keeps():
    told = device(holdings=[Holding("a", 500, used=100, idle=400)], floors={"a": 300}, limits={"a": 900})
    memory = for_admission([told], {"a": of_tokens(10), "b": of_tokens(20)}, {"a": 150})
    assert memory.free == {"d": 250}
    a, b = memory.models["a"], memory.models["b"]
    assert (a.limit, a.held, a.reclaimable, a.growth) == (900, 300, 200, 50)
    assert (b.limit, b.held, b.growth, b.kv) == (1000, 0, 0, of_tokens(20))


def test_a_floor_above_all_that_is_held_keeps_all_of_it():
    told = device(holdings=[Holding("a", 200, used=0, idle=200)], floors={"a": 300})
    memory = for_admission([told], {"a": of_tokens(10)}, {})
    assert memory.free == {"d": 50} and memory.models["a"].reclaimable == 200


def test_memory_of_a_model_is_bounded_by_its_device_with_the_least():
    one = device("one", holdings=[Holding("a", 400, used=100, idle=300)], limits={"a": 800})
    two = device("two", holdings=[Holding("a", 300, used=120, idle=180)], limits={"a": 700})
    memory = for_admission([one, two], {"a": of_tokens(10)}, {"a": 150})
    assert memory.free == {"one": 350, "two": 230}
    a = memory.models["a"]
    assert (a.limit, a.held, a.growth, a.devices) == (700, 120, 50, ("one", "two"))
