"""What is booked for a model in which state; devices that only write it down."""

import asyncio
from types import SimpleNamespace

import pytest

from gpu_scheduler.config import GpuSchedulerConfig
from gpu_scheduler.residency.activation import Activator
from gpu_scheduler.residents import Resident, Residents
from protos import common_pb2, engine_pb2
from services.errors import Refused, TimedOut, Unmet

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
def activation(devices):
    config = GpuSchedulerConfig(
        name="g",
        listen="unix:/none",
        group="g",
        devices=["cuda:0"],
        balloond="",
        engines={"weights_extent_bytes": 64 * MIB},
    )
    return Activator(config, Residents(lambda resident: None), {}, devices, None, {})


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


async def test_until_it_is_measured_the_default_is_booked(activation, devices):
    await activation.entitle(resident(), awake=True)
    assert devices.booked == [(3000, 128, 8)]


async def test_what_an_engine_measured_replaces_the_default_and_graphs_are_booked_with_the_weights(activation, devices):
    await activation.entitle(measured(resident()), awake=True)
    assert devices.booked == [(2100, 448, 8)]


async def test_what_the_catalogue_says_stays_booked(activation, devices):
    stated = measured(resident())
    stated.spec.quota_is_default = False
    await activation.entitle(stated, awake=True)
    assert devices.booked == [(3000, 448, 8)]


async def test_a_fresh_engine_may_take_the_default_again_while_it_builds_the_model_with_its_graphs(activation, devices):
    again = measured(resident())
    again.engine = engine(alive=False)
    await activation.entitle(again, awake=True)
    assert devices.booked == [(2680, 448, 8)]


@pytest.mark.parametrize(
    ("is_default", "quota_mib", "booked"),
    [(False, 3000, (3000, 448, 8)), (True, 2100, (2680, 448, 8)), (True, 2900, (2900, 448, 8))],
)
async def test_what_other_groups_measured_is_booked_before_the_model_is_built(
    activation, devices, is_default, quota_mib, booked
):
    new = resident()
    new.spec.quota_is_default = is_default
    new.elsewhere.graph_bytes, new.elsewhere.quota_bytes = 320 * MIB, quota_mib * MIB
    await activation.entitle(new, awake=True)
    assert devices.booked == [booked]


async def test_what_is_measured_here_counts_instead_of_what_was_elsewhere(activation, devices):
    known = resident()
    known.elsewhere.graph_bytes, known.elsewhere.quota_bytes = 500 * MIB, 2900 * MIB
    await activation.entitle(measured(known), awake=True)
    assert devices.booked == [(2100, 448, 8)]


async def test_where_the_last_engine_needed_more_than_the_default_a_fresh_one_is_booked_with_that(activation, devices):
    again = measured(resident())
    again.measured.quota_bytes = 3500 * MIB
    again.engine = engine(alive=False)
    await activation.entitle(again, awake=True)
    assert devices.booked == [(3500, 448, 8)]


async def test_a_sleeping_engine_is_booked_with_what_it_keeps_once_that_is_known(activation, devices):
    asleep = measured(resident())
    await activation.entitle(asleep, awake=False)
    asleep.engine.kept_bytes, asleep.engine.told_kept = 600 * MIB, asyncio.Event()
    asleep.engine.told_kept.set()
    activation.book_kept(asleep, asleep.engine)
    await asleep.asking
    assert devices.booked == [(2100, 0, 0), (616, 0, 0)]
    asleep.engine_gone()
    assert asleep.kept_bytes == 0


class Loader:
    """Has room for the first rank's part of an image."""

    def __init__(self):
        self.parts = set()

    async def save_image(self, model, generation, lease_id, manifest, checksum, rank, on_progress):
        if rank:
            raise Refused("host memory is short")
        self.parts.add(rank)

    async def drop_image(self, model):
        self.parts.clear()


def on_two(devices, loader, images):
    config = GpuSchedulerConfig(name="g", listen="unix:/none", group="g", devices=["cpu:0", "cpu:1"], balloond="")
    return Activator(config, Residents(lambda resident: None), {}, devices, loader, images)


async def test_an_image_that_is_not_made_whole_is_not_kept(devices):
    loader, it = Loader(), resident(devices=2)
    mapped = [engine_pb2.WeightsMapped(rank=rank) for rank in range(2)]
    await on_two(devices, loader, {})._save_image(it, engine(), mapped)
    assert not loader.parts and not it.image_checksums
    assert it.no_image == "host memory is short"


class ShortLoader(Loader):
    """Fails with what the test says, as long as there is something."""

    def __init__(self, *fails):
        super().__init__()
        self.fails = list(fails)
        self.asked = 0

    async def save_image(self, *told, rank, **keys):
        self.asked += 1
        if self.fails:
            raise self.fails.pop(0)
        self.parts.add(rank)


class Sleeps:
    """Pauses that are over when the test says so."""

    def __init__(self):
        self.told = asyncio.Queue()
        self.over = asyncio.Event()

    async def __call__(self, seconds):
        self.told.put_nowait(seconds)
        await self.over.wait()
        self.over.clear()


async def saving(devices, loader):
    """(activation, resident, its engine's pauses), when the first attempt has been made."""
    sleeps, it = Sleeps(), resident()
    config = GpuSchedulerConfig(name="g", listen="unix:/none", group="g", devices=["cpu:0"], balloond="")
    activation = Activator(config, Residents(lambda resident: None), {}, devices, loader, {}, sleep=sleeps)
    it.engine, it.residency = engine(), common_pb2.ACTIVE
    activation._begin_saving(it, it.engine, [engine_pb2.WeightsMapped(checksum="sum")])
    await it.saving
    return activation, it, sleeps


async def test_an_image_for_which_there_was_no_room_is_made_when_there_is(devices):
    short = [Refused("host memory is short"), Refused("host memory is short")]
    activation, it, sleeps = await saving(devices, ShortLoader(*short))
    assert activation.why_no_image(it) == "host memory is short" and await sleeps.told.get() == 30.0
    sleeps.over.set()
    assert await sleeps.told.get() == 60.0
    it.change = object()  # it moves, say
    sleeps.over.set()
    assert await sleeps.told.get() == 120.0
    it.change = None
    sleeps.over.set()
    while not it.image_checksums:
        await asyncio.sleep(0)
    assert activation.has_image(it) and activation.why_no_image(it) == "" and it.no_image == ""


async def test_an_image_is_not_made_later_of_what_is_not_there_any_more_or_is_of_other_files(devices):
    loader = ShortLoader(Refused("host memory is short"))
    _, it, sleeps = await saving(devices, loader)
    await sleeps.told.get()
    it.engine = engine()
    sleeps.over.set()
    for _ in range(5):
        await asyncio.sleep(0)
    assert loader.asked == 1 and sleeps.told.empty()

    loader = ShortLoader(Unmet("m is of generation 2 by now"))
    activation, it, sleeps = await saving(devices, loader)
    for _ in range(5):
        await asyncio.sleep(0)
    assert loader.asked == 1 and sleeps.told.empty()
    assert activation.why_no_image(it) == "m is of generation 2 by now"
    it.engine_gone()
    assert it.no_image == ""


async def test_an_image_for_another_number_of_devices_is_none(devices):
    assert not on_two(devices, Loader(), {"m": ["whole"]}).has_image(resident(devices=2))
    assert on_two(devices, Loader(), {"m": ["front", "back"]}).has_image(resident(devices=2))


@pytest.mark.parametrize(
    ("elastic_kv", "operator_mib", "limits"),
    [(True, None, []), (False, None, [8]), (True, 20, [20]), (False, 20, [20])],
)
async def test_a_fixed_limit_is_the_floor_unless_an_operator_set_one(devices, elastic_kv, operator_mib, limits):
    config = GpuSchedulerConfig(
        name="g", listen="unix:/none", group="g", devices=["cpu:0"], balloond="", elastic_kv=elastic_kv
    )
    residents = Residents(lambda resident: None)
    if operator_mib is not None:
        residents.operator_limits["m"] = operator_mib * MIB
    await Activator(config, residents, {}, devices, None, {})._apply_limit(resident())
    assert devices.limits == limits


async def test_what_balloond_did_not_take_is_booked_later_unless_a_change_books_anew(activation, devices):
    asleep = measured(activation._residents.enter(resident().spec))
    asleep.residency = common_pb2.HIBERNATING
    devices.stands_still = True
    await activation.rebook(asleep, awake=False)
    devices.stands_still = False
    asleep.change = object()
    activation.catch_up()
    await asyncio.sleep(0)
    assert devices.booked == []
    asleep.change = None
    activation.catch_up()
    while not devices.booked:
        await asyncio.sleep(0)
    activation.catch_up()
    await asyncio.sleep(0)
    assert [(weights, floor) for _, weights, floor in devices.booked] == [(0, 0)]


def test_a_model_in_error_has_nothing_booked_that_counts(activation):
    broken = activation._residents.enter(resident().spec)
    broken.residency = common_pb2.ERROR
    assert not activation.books("m")
    broken.change = object()
    assert activation.books("m"), "it is on its way up"
    broken.change, broken.engine = None, engine()
    assert activation.books("m")
