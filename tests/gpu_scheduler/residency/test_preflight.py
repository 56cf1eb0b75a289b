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
from gpu_scheduler.residency import preflight
from gpu_scheduler.residency.activation import Activator
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


def activation(devices, images=("idle",), limit=3):
    config = GpuSchedulerConfig(name="g", listen="unix:/none", group="g", devices=["cpu:0"], balloond="")
    pools = {"sglang": WarmPool(Spawn("sglang"), warm=0, limit=limit)}
    return Activator(config, Residents(lambda _: None), pools, devices, None, {name: ["sum"] for name in images})


def model(name, weights=40, engine=True, quota=2, floor=8, **facts):
    spec = common_pb2.ModelSpec(
        name=name, weights_bytes=weights * MIB, floor_bytes=floor * MIB, quota_bytes=quota * MIB
    )
    made = Resident(spec, common_pb2.ACTIVE, **facts)
    made.engine = SimpleNamespace(alive=True, index=1) if engine else None
    return made


def leaving(*residents, target=HIBERNATING):
    return {each.spec.name: (each, target) for each in residents}


async def test_room_that_those_who_make_way_give_up_counts_less_what_their_engines_keep():
    devices = Devices(idle=(2, 40, 8), busy=(2, 40, 6))
    it = activation(devices)
    await preflight.check(it, model("new", 40, engine=False), leaving(model("idle")))  # 50 of 100 - 48 - 2
    with pytest.raises(Refused, match=r"new needs 53477376 bytes of cpu:0; when 1 of 1 .* others keep 52428800"):
        await preflight.check(it, model("new", 41, engine=False), leaving(model("idle")))
    await preflight.check(it, model("new", 42, engine=False), leaving(model("idle"), target=COLD))


async def test_who_has_no_image_keeps_nothing_because_it_goes_cold():
    devices = Devices(idle=(2, 40, 8), busy=(2, 40, 6))
    await preflight.check(activation(devices, images=()), model("new", 42, engine=False), leaving(model("idle")))


async def test_who_is_on_its_way_elsewhere_does_not_make_way():
    devices = Devices(idle=(2, 40, 8))
    change = ResidencyChange(common_pb2.ACTIVE, 0.0, None)
    with pytest.raises(Refused, match="when 0 of 1 have made way"):
        await preflight.check(
            activation(devices), model("new", engine=False, weights=50), leaving(model("idle", change=change))
        )


async def test_without_balloond_nobody_makes_way():
    devices = Devices(idle=(2, 40, 8))
    devices.away = True
    with pytest.raises(Unavailable):
        await preflight.check(activation(devices), model("new", engine=False), leaving(model("idle")))


async def test_where_all_engines_are_taken_one_has_to_be_given_back():
    it = activation(Devices(), limit=0)
    with pytest.raises(Refused, match="all 0 engines of this group are taken"):
        await preflight.check(it, model("new", engine=False), leaving(model("idle")))
    await preflight.check(it, model("new", engine=False), leaving(model("idle"), target=COLD))
    await preflight.check(it, model("asleep"), leaving(model("idle")))  # it has its own


async def test_an_engine_that_the_group_has_none_of_is_told_before_anybody_makes_way():
    new = model("new", engine=False)
    new.spec.engine = "echo"
    with pytest.raises(Unmet, match="no echo engines"):
        await preflight.check(activation(Devices()), new, leaving(model("idle")))


SIZES = st.tuples(st.integers(0, 6), st.integers(1, 50), st.integers(0, 20))


@given(SIZES, st.lists(st.tuples(SIZES, st.sampled_from([None, COLD, HIBERNATING]), st.booleans()), max_size=4))
def test_it_says_what_balloond_s_ledger_will_say(wanted, drawn):
    booked = {f"m{i}": sizes for i, (sizes, _, _) in enumerate(drawn)}
    assume(sum(map(sum, booked.values())) <= 100)
    it = activation(Devices(**booked), images=[f"m{i}" for i, (_, _, image) in enumerate(drawn) if image])
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
        elif yielding[name][1] == HIBERNATING and it.has_image(yielding[name][0]):
            ledger.book(name, Booking(it.quota(yielding[name][0], awake=False)))
    try:
        ledger.book("new", Booking(it.quota(new, awake=True), it.own_room(new), wanted[2] * MIB))
        fits = True
    except Refused:
        fits = False
    try:
        asyncio.run(preflight.check(it, new, yielding))
        assert fits
    except Refused:
        assert not fits
