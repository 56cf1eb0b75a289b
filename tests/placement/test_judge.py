from protos import common_pb2
from tests.placement.fakes import MIB, FakeCluster


def asleep_in_the_way(**measured):
    """The reason for which a sleeping model goes cold, on a group that measured these of it."""
    world = FakeCluster(groups=1)
    world.model("asleep", quota=40 * MIB)
    new = world.model("new", weights=70 * MIB, floor=MIB)
    world.groups[0].put("asleep", common_pb2.HIBERNATING, **measured)
    world.tell()
    (yielding,) = world.judge.activation(new).yields
    assert yielding.target == common_pb2.COLD
    return yielding.reason


def test_what_a_group_measured_is_what_a_start_is_thought_to_take():
    assert asleep_in_the_way(wake_s=0.2, cold_s=12.0).endswith("back in about 12 s")


def test_until_it_was_measured_a_cold_start_is_thought_to_take_half_a_minute():
    assert asleep_in_the_way().endswith("back in about 30 s")
