"""What is booked for a model when, and what follows from that; devices that only write it down."""

import asyncio
from types import SimpleNamespace

import pytest

from gpu_scheduler.config import GpuSchedulerConfig
from gpu_scheduler.memory.warm_booking import WarmBooking
from gpu_scheduler.residency.bookings import Bookings
from gpu_scheduler.residents import Resident, Residents
from protos import common_pb2, engine_pb2
from services.errors import TimedOut

MIB = 1 << 20


class Devices:
    def __init__(self):
        self.booked = []
        self.stands_still = False
        self.limits = []

    async def set_limit(self, model, nbytes):
        self.limits.append(nbytes // MIB)

    async def book(self, model, *, quota_bytes, weights_bytes, floor_bytes):
        if self.stands_still:
            raise TimedOut("no answer")
        self.booked.append((quota_bytes // MIB, weights_bytes // MIB, floor_bytes // MIB))


@pytest.fixture
def devices():
    return Devices()


@pytest.fixture
def residents():
    return Residents(lambda resident: None)


@pytest.fixture
def bookings(devices, residents):
    return made(devices, residents, devices=["cuda:0"], engines={"weights_extent_bytes": 64 * MIB})


def made(on, residents, **config):
    config = GpuSchedulerConfig(name="g", listen="unix:/none", group="g", balloond="", **config)
    return Bookings(config, residents, on, WarmBooking([], None))


def resident(**more):
    spec = common_pb2.ModelSpec(
        name="m", weights_bytes=100 * MIB, floor_bytes=8 * MIB, quota_bytes=3000 * MIB, quota_is_default=True, **more
    )
    return Resident(spec, common_pb2.COLD)


def engine(alive=True):
    return SimpleNamespace(alive=alive)


def measured(it):
    it.measured = engine_pb2.Measured(weights_bytes=100 * MIB, graph_bytes=320 * MIB, quota_bytes=2100 * MIB)
    it.engine = engine()
    return it


async def test_booking_of_a_new_model_is_a_share_of_its_known_sizes_on_each_device(bookings, devices):
    new = resident(devices=2)
    new.elsewhere.graph_bytes, new.elsewhere.quota_bytes = 320 * MIB, 2900 * MIB
    await bookings.book(new, awake=True)
    assert devices.booked == [(1450, 64 + 160, 4)]


async def test_booking_of_a_measured_model_is_all_that_was_measured_on_each_device(bookings, devices):
    await bookings.book(measured(resident(devices=2)), awake=True)
    assert devices.booked == [(2100, 448, 4)]


async def test_booking_of_a_model_whose_engine_died_is_that_of_a_fresh_engine(bookings, devices):
    again = measured(resident())
    again.engine = engine(alive=False)
    await bookings.book(again, awake=True)
    assert devices.booked == [(2680, 448, 8)]


async def test_a_sleeping_engine_is_booked_with_what_it_keeps_once_that_is_known(bookings, devices):
    asleep = measured(resident())
    await bookings.book(asleep, awake=False)
    asleep.engine.kept_bytes, asleep.engine.told_kept = 600 * MIB, asyncio.Event()
    asleep.engine.told_kept.set()
    bookings.book_kept(asleep, asleep.engine)
    await asleep.asking
    assert devices.booked == [(2100, 0, 0), (616, 0, 0)]
    asleep.engine_gone()
    assert asleep.kept_bytes == 0


@pytest.mark.parametrize(
    ("elastic_kv", "operator_mib", "limits"),
    [(True, None, []), (False, None, [8]), (True, 20, [20]), (False, 20, [20])],
)
async def test_a_fixed_limit_is_the_floor_unless_an_operator_set_one(
    devices, residents, elastic_kv, operator_mib, limits
):
    if operator_mib is not None:
        residents.operator_limits["m"] = operator_mib * MIB
    await made(devices, residents, devices=["cpu:0"], elastic_kv=elastic_kv).set_limit(resident())
    assert devices.limits == limits


async def test_booking_that_balloond_did_not_take_is_made_later_unless_a_change_books_anew(
    bookings, residents, devices
):
    asleep = measured(residents.enter(resident().spec))
    asleep.residency = common_pb2.HIBERNATING
    devices.stands_still = True
    await bookings.rebook(asleep, awake=False)
    devices.stands_still = False
    asleep.change = object()
    bookings.catch_up()
    await asyncio.sleep(0)
    assert devices.booked == []
    asleep.change = None
    bookings.catch_up()
    while not devices.booked:
        await asyncio.sleep(0)
    bookings.catch_up()
    await asyncio.sleep(0)
    assert [(weights, floor) for _, weights, floor in devices.booked] == [(0, 0)]


def test_a_model_in_error_has_nothing_booked_that_counts(bookings, residents):
    broken = residents.enter(resident().spec)
    broken.residency = common_pb2.ERROR
    assert not bookings.books("m")
    broken.change = object()
    assert bookings.books("m"), "it is on its way up"
    broken.change, broken.engine = None, engine()
    assert bookings.books("m")
