"""What is known of an activation before anybody makes way for it."""

import asyncio
from types import SimpleNamespace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from balloond.policy.ledger import Booking, Ledger
from gpu_scheduler.config import GpuSchedulerConfig
from gpu_scheduler.engines.engine import Spawn
from gpu_scheduler.engines.warm_pool import WarmPool
from gpu_scheduler.memory.warm_booking import WarmBooking
from gpu_scheduler.residency import preflight
from gpu_scheduler.residency.activator import Activator
from gpu_scheduler.residency.bookings import Bookings
from gpu_scheduler.residency.weights import Weights
from gpu_scheduler.residents import ResidencyChange, Resident, Residents
from protos import balloond_pb2, common_pb2
from services.errors import Refused, Unavailable, Unmet

MIB = 1 << 20
COLD, HIBERNATING = common_pb2.COLD, common_pb2.HIBERNATING


class Devices:
    """One of 100 MiB on which these (quota, weights, floor) are booked, in MiB."""

    def __init__(self, **booked):
        self.booked = booked
        self.away = False

    async def inspect(self):
        if self.away:
            raise Unavailable("balloond is away")
        state = balloond_pb2.DeviceState(device="cpu:0", capacity_bytes=100 * MIB)
        for model, (quota, weights, floor) in self.booked.items():
            state.bookings.add(
                model=model, quota_bytes=quota * MIB, weights_bytes=weights * MIB, floor_bytes=floor * MIB
            )
        return [state]


class Group:
    """A group whose loader has these images."""

    def __init__(self, devices, images=("idle",), limit=3):
        config = GpuSchedulerConfig(name="g", listen="unix:/none", group="g", devices=["cpu:0"], balloond="")
        residents = Residents(lambda _: None)
        pools = {"sglang": WarmPool(Spawn("sglang"), warm=0, limit=limit)}
        self.bookings = Bookings(config, residents, devices, WarmBooking(pools.values(), None))
        self.weights = Weights(config, residents, None, {name: ["sum"] for name in images})
        self.activator = Activator(config, residents, pools, self.bookings, self.weights)

    async def check(self, resident, leaving):
        await preflight.check(resident, leaving, self.bookings, self.weights, self.activator.pool)


def model(name, weights=40, engine=True, quota=2, floor=8, **facts):
    spec = common_pb2.ModelSpec(
        name=name, weights_bytes=weights * MIB, floor_bytes=floor * MIB, quota_bytes=quota * MIB
    )
    made = Resident(spec, common_pb2.ACTIVE, **facts)
    made.engine = SimpleNamespace(alive=True, index=1) if engine else None
    return made


def leaving(*residents, target=HIBERNATING):
    return {each.spec.name: (each, target) for each in residents}


async def test_room_of_models_that_make_way_counts_less_what_their_engines_keep():
    devices = Devices(idle=(2, 40, 8), busy=(2, 40, 6))
    it = Group(devices)
    await it.check(model("new", 40, engine=False), leaving(model("idle")))  # 50 of 100 - 48 - 2
    with pytest.raises(Refused, match=r"new needs 53,477,376 bytes of cpu:0; when 1 of 1 .* others keep 52,428,800"):
        await it.check(model("new", 41, engine=False), leaving(model("idle")))
    await it.check(model("new", 42, engine=False), leaving(model("idle"), target=COLD))


async def test_model_that_makes_way_without_an_image_keeps_nothing_because_it_goes_cold():
    devices = Devices(idle=(2, 40, 8), busy=(2, 40, 6))
    await Group(devices, images=()).check(model("new", 42, engine=False), leaving(model("idle")))


async def test_model_with_a_change_under_way_does_not_make_way():
    devices = Devices(idle=(2, 40, 8))
    change = ResidencyChange(common_pb2.ACTIVE, 0.0, None)
    with pytest.raises(Refused, match="when 0 of 1 have made way"):
        await Group(devices).check(model("new", engine=False, weights=50), leaving(model("idle", change=change)))


async def test_activation_without_balloond_is_unavailable_and_no_model_makes_way():
    devices = Devices(idle=(2, 40, 8))
    devices.away = True
    with pytest.raises(Unavailable):
        await Group(devices).check(model("new", engine=False), leaving(model("idle")))


async def test_activation_where_all_engines_are_taken_needs_one_to_be_given_back():
    it = Group(Devices(), limit=0)
    with pytest.raises(Refused, match="all 0 engines of this group are taken"):
        await it.check(model("new", engine=False), leaving(model("idle")))
    await it.check(model("new", engine=False), leaving(model("idle"), target=COLD))
    await it.check(model("asleep"), leaving(model("idle")))  # it has its own


async def test_activation_on_engines_that_the_group_has_none_of_fails_before_any_model_makes_way():
    new = model("new", engine=False)
    new.spec.engine = "echo"
    with pytest.raises(Unmet, match="no echo engines"):
        await Group(Devices()).check(new, leaving(model("idle")))


SIZES = st.tuples(st.integers(0, 6), st.integers(1, 50), st.integers(0, 20))


@given(SIZES, st.lists(st.tuples(SIZES, st.sampled_from([None, COLD, HIBERNATING]), st.booleans()), max_size=4))
def test_preflight_agrees_with_the_ledger_of_balloond(wanted, drawn):
    booked = {f"m{i}": sizes for i, (sizes, _, _) in enumerate(drawn)}
    assume(sum(map(sum, booked.values())) <= 100)
    it = Group(Devices(**booked), images=[f"m{i}" for i, (_, _, image) in enumerate(drawn) if image])
    yielding = {
        f"m{i}": (model(f"m{i}", sizes[1], quota=sizes[0]), target)
        for i, (sizes, target, _) in enumerate(drawn)
        if target is not None
    }
    new = model("new", wanted[1], engine=False, quota=wanted[0], floor=wanted[2])
    ledger = Ledger(100 * MIB, MIB)
    for name, (quota, weights, floor) in booked.items():
        if name not in yielding:
            ledger.book(name, Booking(quota * MIB, weights * MIB, floor * MIB))
        elif yielding[name][1] == HIBERNATING and it.weights.has_image(yielding[name][0]):
            ledger.book(name, Booking(it.bookings.entitlement(yielding[name][0], awake=False).quota_bytes))
    try:
        needs = it.bookings.entitlement(new, awake=True)
        ledger.book("new", Booking(needs.quota_bytes, needs.weights_bytes, wanted[2] * MIB))
        fits = True
    except Refused:
        fits = False
    try:
        asyncio.run(it.check(new, yielding))
        assert fits
    except Refused:
        assert not fits
