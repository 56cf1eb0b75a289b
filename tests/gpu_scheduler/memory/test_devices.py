"""balloond's answers for several devices, put together."""

from types import SimpleNamespace

from gpu_scheduler.memory.devices import Devices
from protos import balloond_pb2
from services.errors import Unmet


class Balloond:
    """Answers of each device."""

    def __init__(self, limits=None, short=None, booked=()):
        self.limits = limits
        self.short = short
        self.rooms = []
        self.booked = set(booked)
        self.unburied = 0
        """How often a booking cannot be dropped yet."""

    def states(self):
        return [
            balloond_pb2.DeviceState(
                device=name, bookings=[balloond_pb2.Booking(model=m) for device, m in self.booked if device == name]
            )
            for name in ("a", "b")
        ]

    async def drop_booking(self, device, model):
        if self.unburied:
            self.unburied -= 1
            raise Unmet(f"{model} has lease 1")
        self.booked.remove((device, model))

    async def set_limit(self, device, model, nbytes):
        return self.limits[device]

    async def make_room(self, device, model, *, bytes, **how):
        self.rooms.append((device, bytes))
        return SimpleNamespace(short_bytes=self.short[device] if bytes else 0)


def on_two(balloond):
    return Devices(["a", "b"], balloond, until_buried_s=(0.0, 0.0, 0.0))


async def test_a_limit_is_applied_once_every_device_has_applied_it_and_bytes_are_of_all():
    applied = balloond_pb2.SetLimitResponse(state=balloond_pb2.APPLIED, revision=3, held_bytes=10)
    deferred = balloond_pb2.SetLimitResponse(state=balloond_pb2.DEFERRED, revision=4, held_bytes=15, overage_bytes=5)
    answer = await on_two(Balloond(limits={"a": applied, "b": deferred})).set_limit("m", 10)
    assert (answer.state, answer.revision) == (balloond_pb2.DEFERRED, 4)
    assert (answer.held_bytes, answer.overage_bytes) == (25, 5)


async def test_room_missing_on_one_device_is_given_up_on_the_others():
    room = {"bytes": 8, "may_retract": True, "hold_ms": 1, "timeout_s": 1}
    balloond = Balloond(short={"a": 0, "b": 3})
    assert await on_two(balloond).make_room("m", **room) == (3, "b")
    assert balloond.rooms == [("a", 8), ("b", 8), ("a", 0), ("b", 0)]
    balloond = Balloond(short={"a": 0, "b": 0})
    assert (await on_two(balloond).make_room("m", **room))[0] == 0
    assert balloond.rooms == [("a", 8), ("b", 8)]


async def test_bookings_of_models_that_are_not_here_are_dropped_and_no_others():
    ours = {("a", "ours"), ("b", "ours")}
    balloond = Balloond(booked={("a", "m"), ("b", "m"), *ours})
    balloond.unburied = 2
    await on_two(balloond).drop_left_over(balloond.states(), lambda model: model == "ours")
    assert balloond.booked == ours


async def test_a_model_that_comes_up_while_its_old_lease_still_lives_keeps_its_booking():
    balloond = Balloond(booked={("a", "m")})
    balloond.unburied = 2
    await on_two(balloond).drop_left_over(balloond.states(), lambda model: balloond.unburied < 2)
    assert balloond.booked == {("a", "m")}
