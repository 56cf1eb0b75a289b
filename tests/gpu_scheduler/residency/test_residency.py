"""Changes of residency with real echo engines that hold no memory (no balloond, no loader)."""

import asyncio
import os
import signal
from functools import partialmethod

import pytest

from gpu_scheduler.config import Arbitration, GpuSchedulerConfig
from gpu_scheduler.engines import processes, shared_board
from gpu_scheduler.engines.engine import CommandFailed, EngineDied, EngineProcess, Spawn
from gpu_scheduler.engines.shared_board import SharedBoard
from gpu_scheduler.engines.warm_pool import WarmPool
from gpu_scheduler.memory.group_memory import GroupMemory
from gpu_scheduler.memory.warm_booking import WarmBooking
from gpu_scheduler.policy.memory.migrated_prefixes import MigratedPrefixes
from gpu_scheduler.queue.dispatcher import Dispatcher
from gpu_scheduler.queue.streams import PulledStream
from gpu_scheduler.residency import preflight
from gpu_scheduler.residency.activator import Activator
from gpu_scheduler.residency.bookings import Bookings
from gpu_scheduler.residency.handover import Handover
from gpu_scheduler.residency.residency import ResidencyController
from gpu_scheduler.residency.weights import Weights
from gpu_scheduler.residents import Residents
from protos import common_pb2, gpu_scheduler_pb2, loader_pb2
from services.errors import Conflict, Invalid, NotFound, Refused, TimedOut, Unavailable, Unmet
from services.runtime import tasks
from testing.patience import PATIENCE_S

SPEC = common_pb2.ModelSpec(name="m", context_tokens=1000, kv_bytes_per_token=1, engine="echo")


DIFFER = CommandFailed("the weights do not verify", model_at_fault=False, weights_differ=True)


class Group:
    """A gpu_scheduler without its server. `of_residency` and `of_weights`: further arguments of its
    ResidencyController and its Weights."""

    def __init__(self, loader=None, of_residency=None, of_weights=None, **options):
        config = GpuSchedulerConfig(
            name="g", listen="unix:/none", group="g", devices=["cpu:0"], balloond="",
            engines={"kind": "echo", "options": options},
        )  # fmt: skip
        self.residents = Residents(lambda resident: self.dispatcher.residency_changed(resident))
        turn = SharedBoard(shared_board.create())
        self.dispatcher = Dispatcher(
            Arbitration(), self.residents, GroupMemory(["cpu:0"]), turn, lambda need: None,
            lambda engine: self.residency.engine_died(engine),
        )  # fmt: skip
        self.pools = {"echo": WarmPool(Spawn("echo"), warm=1, limit=3)}
        images = {"m": ["sum"]} if loader else {}
        self.options = config.engines.options
        bookings = Bookings(config, self.residents, None, WarmBooking(self.pools.values(), None))
        weights = Weights(config, self.residents, loader, images, **of_weights or {})
        activation = Activator(config, self.residents, self.pools, bookings, weights)
        handover = Handover(self.residents, loader, MigratedPrefixes())
        self.timers = []
        """(seconds, what is called then) of models that are in error for a time."""
        self.residency = ResidencyController(
            config, self.residents, self.dispatcher, activation, bookings, weights, handover, self.pools,
            later=self.later, **of_residency or {},
        )  # fmt: skip

    def later(self, seconds, call, *told):
        handle = asyncio.get_running_loop().call_later(1e6, call, *told)
        self.timers.append((seconds, lambda: None if handle.cancelled() else call(*told)))
        return handle

    async def bring(self, target, **keys):
        """What the change goes through; one under way ends first: a model serves a moment before that."""
        resident = self.residents.get("m")
        if resident is not None and resident.change is not None:
            await asyncio.wait([resident.change.task])
        change = self.residency.begin(SPEC, target, "test", **keys)
        return [message.residency async for message in self.residency.follow(change)]

    def submit(self, request_id, new=3):
        stream = PulledStream(1)
        self.dispatcher.submit(
            gpu_scheduler_pb2.Submit(
                request_id=request_id, model="m", token_ids=[1, 2], sampling=common_pb2.Sampling(max_new_tokens=new)
            ),
            stream,
        )
        return stream


async def answer(stream):
    """(tokens, finish, error) of a stream with one request."""
    tokens = []
    async for message in stream.messages():
        for chunk in message.chunks:
            tokens += chunk.token_ids
            if chunk.finish:
                return tokens, chunk.finish, chunk.error


async def first_token(stream):
    """Until the request runs."""
    async for message in stream.messages():
        for chunk in message.chunks:
            if chunk.token_ids:
                return
            assert not chunk.finish, chunk.error


class Loader:
    """Has an image of "m"; copies of it end with what `fails` says. Otherwise they come from `source`, unless the image
    alone is asked for."""

    def __init__(self):
        self.fails = None
        self.source = "image"
        self.gave = []
        self.dropped = []
        self.looks = []
        """For each look at the files: whether it was a thorough one, and whether an engine had refused them."""
        self.found = []
        """What the next looks find: an error, "changed", or nothing."""

    async def look(self, model, *, thorough, refused, timeout_s):
        self.looks.append((thorough, refused))
        found = self.found.pop(0) if self.found else ""
        entry = loader_pb2.Entry(error="" if found == "changed" else found)
        return loader_pb2.LookResponse(entry=entry, changed=found == "changed")

    async def drop_image(self, model):
        self.dropped.append(model)

    async def load_image(self, *_args, image_only, **_keys):
        if self.fails is not None:
            raise self.fails
        self.gave.append("image" if image_only else self.source)
        return loader_pb2.ImageProgress(source=self.gave[-1])


async def open_group(**options):
    group = Group(**options)
    group.task = tasks.spawn(group.dispatcher.run(), "dispatcher")
    return group


async def close_group(group):
    await group.residency.close()
    await group.pools["echo"].close()
    await tasks.cancel(group.task)


@pytest.fixture
async def group():
    group = await open_group()
    yield group
    await close_group(group)


@pytest.fixture
async def slow_group():
    group = await open_group(step_ms="100000")
    yield group
    await close_group(group)


async def test_a_model_comes_up_and_serves(group):
    steps = await group.bring(common_pb2.ACTIVE)
    assert steps[0] == common_pb2.WAKING and steps[-1] == common_pb2.ACTIVE
    assert await answer(group.submit("r")) == ([1, 1, 1], common_pb2.LENGTH, "")


async def test_requests_sent_while_their_model_wakes_are_served(group):
    coming = group.residency.begin(SPEC, common_pb2.ACTIVE, "test")
    stream = group.submit("r")
    assert (await answer(stream))[1] == common_pb2.LENGTH
    assert coming.ended or coming.task is not None


async def test_the_same_change_asked_twice_is_one_change_and_another_one_is_a_conflict(group):
    first = group.residency.begin(SPEC, common_pb2.ACTIVE, "test")
    assert group.residency.begin(SPEC, common_pb2.ACTIVE, "again") is first
    with pytest.raises(Conflict, match="on its way to ACTIVE"):
        group.residency.begin(SPEC, common_pb2.COLD, "test")
    await asyncio.wait([first.task])


async def test_residency_that_is_no_target_is_refused(group):
    with pytest.raises(Unmet, match="WAKING is not a residency to bring a model to"):
        group.residency.begin(SPEC, common_pb2.WAKING, "test")


async def test_a_model_for_another_number_of_devices_is_refused(group):
    spread = common_pb2.ModelSpec(name="wide", devices=2, engine="echo")
    with pytest.raises(Unmet, match="wide is for 2 devices, the group g for models on 1"):
        group.residency.begin(spread, common_pb2.ACTIVE, "test")
    assert group.residents.get("wide") is None


async def test_drained_group_keeps_its_models_up_and_brings_no_other_up(group):
    await group.bring(common_pb2.ACTIVE)
    group.residents.drained = True
    assert (await group.bring(common_pb2.ACTIVE))[-1] == common_pb2.ACTIVE
    engine = group.residents.get("m").engine
    engine.kill()
    await engine.dead.wait()
    assert (await answer(group.submit("r")))[1] == common_pb2.LENGTH
    await group.bring(common_pb2.COLD)
    with pytest.raises(Conflict, match="the group g is drained"):  # placement knows better in a moment
        group.residency.begin(SPEC, common_pb2.ACTIVE, "test")
    group.residents.drained = False
    assert (await group.bring(common_pb2.ACTIVE))[-1] == common_pb2.ACTIVE


async def test_a_model_that_leaves_hands_its_requests_back_and_its_engine_stays_warm(slow_group):
    group = slow_group
    await group.bring(common_pb2.ACTIVE)
    engine = group.residents.get("m").engine
    stream = group.submit("r")
    assert (await anext(aiter(stream.messages()))).chunks[0].token_ids
    await group.bring(common_pb2.COLD)
    assert (await answer(stream))[1:] == (common_pb2.FAILED, "handed back")
    assert group.residents.get("m") is None
    # Another one may be warm as well by now, and be the next to have a model.
    assert engine.alive and any(engine in pool.engines for pool in group.pools.values())
    await group.bring(common_pb2.ACTIVE)
    assert group.residents.get("m").engine.alive


async def test_a_dead_engine_is_replaced_and_the_next_request_served(group):
    await group.bring(common_pb2.ACTIVE)
    first = group.residents.get("m").engine
    first.kill()
    await first.dead.wait()
    assert (await answer(group.submit("r")))[1] == common_pb2.LENGTH
    assert group.residents.get("m").engine is not first


async def test_a_request_that_comes_in_the_moment_of_a_death_waits_for_the_next_engine(slow_group):
    await slow_group.bring(common_pb2.ACTIVE)
    first = slow_group.residents.get("m").engine
    running = slow_group.submit("running")
    await first_token(running)
    first.kill()
    await first.dead.wait()
    # The end of what ran has a plan made, before anything was done for the next engine.
    async with asyncio.timeout(PATIENCE_S):
        assert (await answer(slow_group.submit("r", new=1)))[1] == common_pb2.LENGTH
    assert (await answer(running))[1:] == (common_pb2.FAILED, "its engine died")


class Balloond:
    """Devices that answer, some calls of which can be held. A model of a process that was just killed still has its
    lease: its booking is not dropped before `buried`."""

    names = ("cpu:0",)

    def __init__(self):
        self.booked = []
        self.held = {"release_room": asyncio.Event(), "set_limit": asyncio.Event()}
        self.begun = {name: asyncio.Event() for name in self.held}
        self.buried = asyncio.Event()

    async def _hold(self, name):
        self.begun[name].set()
        await self.held[name].wait()

    async def book(self, model, **_keys):
        self.booked.append(model)

    async def drop(self, model, unless=lambda: False):
        await self.buried.wait()
        if model in self.booked and not unless():
            self.booked.remove(model)

    async def inspect(self):
        return []

    async def make_room(self, *_args, **_keys):
        return 0, "cpu:0"

    async def release_room(self, *_args):
        await self._hold("release_room")

    async def set_limit(self, *_args, **_keys):
        await self._hold("set_limit")


@pytest.mark.parametrize("held", ["release_room", "set_limit"])
async def test_an_engine_that_dies_while_its_activation_ends_is_replaced_too(group, held):
    devices = group.residency._bookings.devices = Balloond()
    devices.buried.set()
    devices.held["set_limit" if held == "release_room" else "release_room"].set()
    group.residents.operator_limits["m"] = 1 << 20
    change = group.residency.begin(SPEC, common_pb2.ACTIVE, "test")
    await devices.begun[held].wait()
    first = group.residents.get("m").engine
    asked = group.submit("r", new=1000)
    first.kill()
    await first.dead.wait()
    if held == "set_limit":
        devices.held[held].set()
    async with asyncio.timeout(PATIENCE_S):  # balloond may be away for long when the room is to be given back
        await asyncio.wait([change.task])
        assert (await answer(asked))[1] in (common_pb2.LENGTH, common_pb2.FAILED)  # it may have been sent to the first
        assert (await answer(group.submit("again")))[1] == common_pb2.LENGTH
    assert group.residents.get("m").engine is not first


async def test_a_model_that_is_asked_for_as_its_sleeping_engine_dies_begins_afresh(group):
    devices = group.residency._bookings.devices = Balloond()
    for held in devices.held.values():
        held.set()
    await group.bring(common_pb2.ACTIVE)
    asleep = group.residents.get("m")
    group.residents.set(asleep, common_pb2.HIBERNATING)
    engine = asleep.engine
    engine.kill()
    async with asyncio.timeout(PATIENCE_S):
        await engine.dead.wait()
        assert asleep.engine is None
        change = group.residency.begin(SPEC, common_pb2.ACTIVE, "test")
        asked = group.submit("r")
        await asyncio.wait([change.task])
        assert (await answer(asked))[1] == common_pb2.LENGTH
    devices.buried.set()
    for _ in range(5):
        await asyncio.sleep(0)
    now = group.residents.get("m")
    assert now is not asleep and now.residency == common_pb2.ACTIVE and "m" in devices.booked


@pytest.fixture
async def group_of_three_deaths():
    """One that gives a model up when three of its engines have died."""
    group = await open_group(of_residency={"most_deaths": 3})
    yield group
    await close_group(group)


async def test_a_model_whose_engines_die_one_after_the_other_is_in_error_for_a_while(group_of_three_deaths):
    group = group_of_three_deaths

    async def die(times):
        """As soon as it is up."""
        for number in range(1, 1 + times):
            await group.bring(common_pb2.ACTIVE)
            resident = group.residents.get("m")
            engine = resident.engine
            engine.kill()
            await engine.dead.wait()
            assert resident.deaths == number
        return resident

    resident = await die(3)
    assert (resident.residency, resident.reason) == (common_pb2.ERROR, "3 engines died in a row")
    assert (await answer(group.submit("r")))[1] == common_pb2.FAILED
    ((rest_s, end_rest),) = group.timers
    assert rest_s == resident.retry_s == 300.0
    end_rest()
    assert group.residents.get("m") is None, "the next request brings it up"
    assert (await die(3)).residency == common_pb2.ERROR
    first_rest = group.residents.get("m").rest
    await group.bring(common_pb2.ACTIVE)  # by somebody who knows better
    assert group.residents.get("m").deaths == 0
    assert (await die(3)).residency == common_pb2.ERROR
    assert first_rest.cancelled(), "the second rest would end with the first"
    await group.bring(common_pb2.ACTIVE)
    resident = await die(2)
    await group.bring(common_pb2.ACTIVE)
    resident.active_at -= 100  # one that served for long was in no row
    engine = resident.engine
    engine.kill()
    await engine.dead.wait()
    assert resident.deaths == 1 and resident.residency != common_pb2.ERROR


async def test_an_engine_that_neither_loads_nor_can_be_killed_is_given_up(group, monkeypatch):
    pool = group.pools["echo"]
    stuck = await pool.take(PATIENCE_S)
    pool.give_back(stuck)
    monkeypatch.setattr(processes, "kill", lambda ranks: None)  # in a driver that does not return
    monkeypatch.setattr(EngineProcess, "give_up", partialmethod(EngineProcess.give_up, grace_s=0.05))
    monkeypatch.setitem(group.residency._config.engines.__dict__, "load_timeout_s", 0.2)
    os.kill(stuck.pid, signal.SIGSTOP)
    try:
        change = group.residency.begin(SPEC, common_pb2.ACTIVE, "test")
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.wait([change.task])
        assert isinstance(change.failure, TimedOut)
        assert group.residents.get("m") is None
    finally:
        os.kill(stuck.pid, signal.SIGKILL)


async def test_a_model_that_may_not_come_back_when_its_engine_has_died_is_in_error(group, monkeypatch):
    await group.bring(common_pb2.ACTIVE)
    engine = group.residents.get("m").engine

    def refuse(*_args, **_keys):
        raise Unmet("no KV for it any more")

    monkeypatch.setattr(group.residency, "begin", refuse)
    engine.kill()
    await engine.dead.wait()
    resident = group.residents.get("m")
    assert (resident.residency, resident.reason) == (common_pb2.ERROR, "no KV for it any more")
    assert (await answer(group.submit("r")))[1] == common_pb2.FAILED


async def test_an_engine_that_dies_while_it_loads_is_replaced_by_another(group):
    change = group.residency.begin(SPEC, common_pb2.ACTIVE, "test")
    while not group.pools["echo"].engines:
        await asyncio.sleep(0)
    group.pools["echo"].engines[0].kill()
    await asyncio.wait([change.task])
    assert group.residents.get("m").residency == common_pb2.ACTIVE


async def test_a_model_at_which_every_engine_dies_as_it_loads_is_in_error_for_a_while(group, monkeypatch):
    dead = []

    async def die(_self, _resident, engine, from_image):
        engine.kill()
        await engine.dead.wait()
        dead.append(engine)
        raise EngineDied(f"engine {engine.pid} died")

    with monkeypatch.context() as patched:
        patched.setattr(Activator, "_load_into", die)
        change = group.residency.begin(SPEC, common_pb2.ACTIVE, "test")
        asked = group.submit("r")
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.wait([change.task])
    resident = group.residents.get("m")
    assert len(dead) == 3 and resident.residency == common_pb2.ERROR and isinstance(change.failure, EngineDied)
    why = f"3 engines ended one after the other as the model came up: engine {dead[-1].pid} died"
    assert resident.reason == why
    assert (await answer(asked))[1] == common_pb2.FAILED
    ((rest_s, end_rest),) = group.timers
    assert 0 < rest_s == resident.retry_s
    end_rest()
    assert group.residents.get("m") is None, "the next request brings it up"
    await group.bring(common_pb2.ACTIVE)


async def test_model_without_an_image_that_should_hibernate_gives_its_engine_back(group):
    await group.bring(common_pb2.ACTIVE)
    await group.bring(common_pb2.HIBERNATING)
    assert group.residents.get("m") is None


async def test_models_that_make_way_are_brought_down_first(group):
    await group.bring(common_pb2.ACTIVE)
    other = common_pb2.ModelSpec(name="n", context_tokens=100, kv_bytes_per_token=1, engine="echo")
    yields = [gpu_scheduler_pb2.Yield(model="m", target=common_pb2.COLD)]
    change = group.residency.begin(other, common_pb2.ACTIVE, "test", yields=yields)
    await asyncio.wait([change.task])
    assert group.residents.get("m") is None
    assert group.residents.get("n").residency == common_pb2.ACTIVE


async def test_models_do_not_make_way_for_an_activation_that_is_refused_all_the_same(group):
    await group.bring(common_pb2.ACTIVE)
    other = common_pb2.ModelSpec(name="n", context_tokens=100, kv_bytes_per_token=1, engine="sglang")
    yields = [gpu_scheduler_pb2.Yield(model="m", target=common_pb2.COLD)]
    change = group.residency.begin(other, common_pb2.ACTIVE, "test", yields=yields)
    with pytest.raises(Unmet, match="no sglang engines"):
        async for _ in group.residency.follow(change):
            pass
    assert group.residents.get("m").residency == common_pb2.ACTIVE
    assert group.residents.get("n") is None


async def test_sleeping_model_for_which_no_room_can_be_made_sleeps_on(sleeping, monkeypatch):
    group, _ = sleeping

    async def refused(*_):
        raise Refused("no room")

    monkeypatch.setattr(preflight, "check", refused)
    yields = [gpu_scheduler_pb2.Yield(model="n", target=common_pb2.COLD)]
    with pytest.raises(Refused, match="no room"):
        await group.bring(common_pb2.ACTIVE, yields=yields)
    assert group.residents.get("m").residency == common_pb2.HIBERNATING
    assert (await group.bring(common_pb2.ACTIVE))[-1] == common_pb2.ACTIVE


async def test_model_whose_engine_measures_more_than_there_is_room_for_is_refused(group, monkeypatch):
    load = Activator._load

    async def larger(self, resident, engine):
        await load(self, resident, engine)
        resident.measured.weights_bytes = 3 << 20

    async def book(self, resident, awake):
        wanted = self.entitlement(resident, awake)
        if wanted.weights_bytes > 2 << 20:
            raise Refused(f"weights {wanted.weights_bytes:,}")

    monkeypatch.setattr(Activator, "_load", larger)
    monkeypatch.setattr(Bookings, "book", book)
    with pytest.raises(Refused, match="weights 3,145,728"):
        await group.bring(common_pb2.ACTIVE)
    assert group.residents.get("m") is None and group.pools["echo"].idle == 1


async def test_model_that_is_awake_already_makes_no_other_make_way(group):
    await group.bring(common_pb2.ACTIVE)
    other = common_pb2.ModelSpec(name="n", context_tokens=100, kv_bytes_per_token=1, engine="echo")
    await asyncio.wait([group.residency.begin(other, common_pb2.ACTIVE, "test").task])
    await group.bring(common_pb2.ACTIVE, yields=[gpu_scheduler_pb2.Yield(model="n", target=common_pb2.COLD)])
    assert group.residents.get("n").residency == common_pb2.ACTIVE


@pytest.mark.parametrize(("balloond", "refused"), [("unix:/balloond", True), ("", False)])
async def test_a_model_without_a_floor_is_refused_where_its_floor_is_all_the_kv_that_it_ever_gets(
    group, balloond, refused
):
    config = group.residency._config
    group.residency._config = config.model_copy(update={"elastic_kv": False, "balloond": balloond})
    if refused:
        with pytest.raises(Unmet, match="m has a floor of 0, and on g the KV of a model is its floor"):
            group.residency.begin(SPEC, common_pb2.ACTIVE, "test")
        assert group.residents.get("m") is None
        group.residents.operator_limits["m"] = 1 << 20
    change = group.residency.begin(SPEC, common_pb2.ACTIVE, "test")
    await asyncio.wait([change.task])
    assert group.residents.get("m").residency == common_pb2.ACTIVE


@pytest.mark.parametrize(
    ("drain_ms", "step_ms", "finish"), [(60_000, "20", common_pb2.LENGTH), (0, "100000", common_pb2.FAILED)]
)
async def test_model_that_makes_way_finishes_running_requests_within_its_drain_time(drain_ms, step_ms, finish):
    group = await open_group(step_ms=step_ms)
    try:
        await group.bring(common_pb2.ACTIVE)
        assert group.residents.get("m").active_s > 0.0
        stream = group.submit("r", new=50)
        await first_token(stream)
        other = common_pb2.ModelSpec(name="n", context_tokens=100, kv_bytes_per_token=1, engine="echo")
        yields = [gpu_scheduler_pb2.Yield(model="m", target=common_pb2.COLD, drain_ms=drain_ms)]
        change = group.residency.begin(other, common_pb2.ACTIVE, "test", yields=yields)
        assert (await answer(stream))[1] == finish
        await asyncio.wait([change.task])
        assert group.residents.get("n").residency == common_pb2.ACTIVE
    finally:
        await close_group(group)


async def test_model_that_makes_way_gives_its_successor_the_kv_and_says_where_its_requests_go_on():
    group = await open_group(step_ms="100000")
    given = []

    async def give(resident, engine, successor):
        given.append((resident.spec.name, successor))
        return ["r"]

    group.residency._handover.give = give
    told, go_on_at = [], group.dispatcher.go_on_at
    group.dispatcher.go_on_at = lambda ids, address: (told.append((list(ids), address)), go_on_at(ids, address))
    try:
        await group.bring(common_pb2.ACTIVE)
        stream = group.submit("r", new=50)
        await first_token(stream)
        other = common_pb2.ModelSpec(name="n", context_tokens=100, kv_bytes_per_token=1, engine="echo")
        yields = [gpu_scheduler_pb2.Yield(model="m", target=common_pb2.COLD, successor="unix:/other")]
        change = group.residency.begin(other, common_pb2.ACTIVE, "test", yields=yields)
        assert (await answer(stream))[1] == common_pb2.FAILED
        await asyncio.wait([change.task])
        assert (given, told) == ([("m", "unix:/other")], [(["r"], "unix:/other")])
        assert group.residents.get("n").residency == common_pb2.ACTIVE
    finally:
        await close_group(group)


async def test_cold_start_time_is_not_taken_for_a_wake_up_time(group):
    await group.bring(common_pb2.ACTIVE)
    resident = group.residents.get("m")
    assert resident.cold_s > 0 and resident.wake_s == 0


async def test_activation_time_is_that_of_the_last_wake_up_or_cold_start(sleeping):
    group, _ = sleeping
    resident = group.residents.get("m")
    assert resident.came_s == resident.cold_s
    await group.bring(common_pb2.ACTIVE)
    assert resident.came_s == resident.wake_s != resident.cold_s


@pytest.fixture
async def sleeping():
    """(group, loader) with a model that sleeps."""
    loader = Loader()
    group = await open_group(loader=loader)
    await group.bring(common_pb2.ACTIVE)
    await group.bring(common_pb2.HIBERNATING)
    assert group.residents.get("m").residency == common_pb2.HIBERNATING
    yield group, loader
    await close_group(group)


async def test_sleeping_model_whose_weights_cannot_be_copied_is_not_taken_for_asleep(sleeping):
    """Its memory is mapped, and it would refuse to wake ever after."""
    group, loader = sleeping
    loader.fails = Unavailable("the loader is away")
    with pytest.raises(Unavailable):
        await group.bring(common_pb2.ACTIVE)
    assert group.residents.get("m") is None
    loader.fails = None
    assert (await group.bring(common_pb2.ACTIVE))[-1] == common_pb2.ACTIVE
    assert group.residents.get("m").engine.alive


async def test_sleeping_model_without_its_image_or_a_way_to_load_it_is_not_taken_for_asleep(sleeping):
    group, loader = sleeping
    loader.fails = NotFound("no image")
    group.options["step_ms"] = "none"
    with pytest.raises(CommandFailed, match="none"):
        await group.bring(common_pb2.ACTIVE)
    assert group.residents.get("m") is None


@pytest.fixture
def refusals(monkeypatch):
    """How many times engines will say that weights do not verify."""
    left = []
    verify = EngineProcess.verify

    def refuse(engine, command):
        if left:
            command.fail(left.pop())
        else:
            verify(engine, command)

    monkeypatch.setattr(EngineProcess, "verify", refuse)
    return left


@pytest.fixture
def faults(monkeypatch):
    """What the next loads fail with."""
    left = []
    command = EngineProcess.command

    def fail(engine, message, *told):
        made = command(engine, message, *told)
        if left and message.WhichOneof("message") == "load":
            made.fail(left.pop(0))
        return made

    monkeypatch.setattr(EngineProcess, "command", fail)
    return left


PASSES = CommandFailed("a.safetensors: Input/output error", model_at_fault=False, may_pass=True)
BROKEN = CommandFailed("the checkpoint does not set 1 of its parameters", model_at_fault=True)


async def errors(group):
    """Brings the model up; how that ended, and for how long it is in error."""
    residencies = await group.bring(common_pb2.ACTIVE)
    resident = group.residents.get("m")
    assert resident.residency == residencies[-1]
    return resident.reason, resident.retry_s


async def test_a_model_in_error_that_is_brought_down_is_told_as_gone_not_as_in_error(group, faults):
    faults[:] = [BROKEN]
    await asyncio.wait([group.residency.begin(SPEC, common_pb2.ACTIVE, "a request").task])
    assert group.residents.get("m").residency == common_pb2.ERROR
    change = group.residency.begin(SPEC, common_pb2.ON_DISK, "an operator asked for it")
    *_, last = [message async for message in group.residency.follow(change)]
    assert (last.residency, last.reason) == (common_pb2.COLD, "") and group.residents.get("m") is None


async def test_a_fault_that_may_pass_is_an_error_for_ever_longer_and_a_request_tries_again(group, faults):
    for pause_s in (1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0):
        faults.append(PASSES)
        assert await errors(group) == (str(PASSES), pause_s)
        assert (await answer(group.submit("r")))[1] == common_pb2.FAILED
        seconds, end_pause = group.timers[-1]
        assert seconds == pause_s
        end_pause()
        assert group.residents.get("m") is None
    assert (await group.bring(common_pb2.ACTIVE))[-1] == common_pb2.ACTIVE
    await group.bring(common_pb2.COLD)
    faults.append(PASSES)
    assert await errors(group) == (str(PASSES), 1.0), "it has been up since"


async def test_activation_in_the_pause_of_an_error_need_not_wait_and_an_old_pause_ends_no_other(group, faults):
    faults += [PASSES, BROKEN]
    await errors(group)
    assert await errors(group) == (str(BROKEN), 0.0)
    for _, end_pause in group.timers:
        end_pause()
    assert group.residents.get("m").residency == common_pb2.ERROR, "that one does not pass"
    assert (await group.bring(common_pb2.ACTIVE))[-1] == common_pb2.ACTIVE


@pytest.mark.parametrize("fault", [PASSES, BROKEN])
async def test_files_that_are_read_afresh_end_an_error(group, faults, fault):
    group.residents.readings = {"m": 5, "n": 1}
    faults.append(fault)
    await errors(group)
    for readings in ({"m": 5, "n": 2}, {"n": 2}):
        group.residents.readings = readings
        group.residency.files_read()
        assert group.residents.get("m").residency == common_pb2.ERROR, "they were not"
    group.residents.readings = {"m": 6}
    group.residency.files_read()
    assert group.residents.get("m") is None
    faults.append(PASSES)
    assert (await errors(group))[1] == 1.0, "it begins anew"


@pytest.fixture
async def watched(monkeypatch):
    """(group, loader) without an image."""
    loader = Loader()
    group = await open_group(loader=loader)
    group.residency._weights._images.clear()
    monkeypatch.setattr(group.residency._bookings, "devices", None)
    yield group, loader
    await close_group(group)


async def test_missing_files_are_found_before_an_engine_gets_them_and_no_model_makes_way(watched):
    group, loader = watched
    other = common_pb2.ModelSpec(name="n", context_tokens=100, kv_bytes_per_token=1, engine="echo")
    await asyncio.wait([group.residency.begin(other, common_pb2.ACTIVE, "test").task])
    loader.looks.clear()
    loader.found.append("its folder does not exist")
    yields = [gpu_scheduler_pb2.Yield(model="n", target=common_pb2.COLD)]
    with pytest.raises(Unmet, match="^its folder does not exist$"):
        await group.bring(common_pb2.ACTIVE, yields=yields)
    assert group.residents.get("n").residency == common_pb2.ACTIVE and group.residents.get("m") is None
    assert loader.looks == [(False, False)], "the loader has it in its catalogue, and looks again by itself"
    assert (await group.bring(common_pb2.ACTIVE))[-1] == common_pb2.ACTIVE


@pytest.mark.parametrize("fault", [PASSES, BROKEN])
async def test_fault_that_the_loader_finds_in_the_files_counts_before_the_engines_error(watched, faults, fault):
    group, loader = watched
    loader.found += ["", "model.safetensors is truncated"]
    faults.append(fault)
    with pytest.raises(Unmet, match="^model.safetensors is truncated$"):
        await group.bring(common_pb2.ACTIVE)
    assert loader.looks == [(False, False), (True, fault is BROKEN)] and group.residents.get("m") is None


async def test_files_that_changed_while_they_were_read_are_an_error_that_is_tried_again(watched, faults):
    group, loader = watched
    loader.found += ["", "changed"]
    faults.append(BROKEN)
    assert await errors(group) == ("its files have changed while they were read", 1.0)


async def test_a_loader_that_is_away_keeps_no_model_from_coming_up(watched):
    group, loader = watched

    async def away(*_told, **_keys):
        raise Unavailable("the loader is away")

    loader.look = away
    assert (await group.bring(common_pb2.ACTIVE))[-1] == common_pb2.ACTIVE


async def test_waking_model_needs_no_files(sleeping):
    group, loader = sleeping
    loader.looks.clear()
    assert (await group.bring(common_pb2.ACTIVE))[-1] == common_pb2.ACTIVE and not loader.looks


async def test_hibernation_that_is_not_possible_states_its_reason(watched):
    group, loader = watched
    await group.bring(common_pb2.ACTIVE)
    resident = group.residents.get("m")
    resident.no_image = "an image of m takes 7 bytes"
    change = group.residency.begin(SPEC, common_pb2.HIBERNATING, "test")
    last = [message async for message in group.residency.follow(change)][-1]
    assert last.reason == "an image of m takes 7 bytes" and group.residents.get("m") is None
    group.residency._weights._loader = None
    await group.bring(common_pb2.ACTIVE)
    change = group.residency.begin(SPEC, common_pb2.HIBERNATING, "test")
    last = [message async for message in group.residency.follow(change)][-1]
    assert last.reason == "this group has no loader, which would make it"


@pytest.fixture
async def beside():
    """(group, loader) where a device has the weights, and the death of an engine is waited for as long as it takes."""
    loader = Loader()
    loader.source = "cpu:1"
    group = await open_group(loader=loader, of_weights={"death_heard_s": PATIENCE_S})
    yield group, loader
    await close_group(group)


async def test_source_of_the_weights_of_an_active_model_is_reported(beside):
    group, _ = beside
    await group.bring(common_pb2.ACTIVE)
    assert group.residents.get("m").weights_from == ["cpu:1"]


async def test_weights_of_a_device_that_do_not_verify_are_asked_for_again_from_the_image(beside, refusals):
    group, loader = beside
    refusals.append(DIFFER)
    assert (await group.bring(common_pb2.ACTIVE))[-1] == common_pb2.ACTIVE
    assert loader.gave == ["cpu:1", "image"] and group.residents.get("m").weights_from == ["image"]
    # And once it is up, the next time is like any other.
    await group.bring(common_pb2.COLD)
    await group.bring(common_pb2.ACTIVE)
    assert loader.gave == ["cpu:1", "image", "cpu:1"]


async def test_weights_of_the_image_that_do_not_verify_either_are_dropped_and_the_checkpoint_is_read(beside, refusals):
    group, loader = beside
    refusals += [DIFFER, DIFFER]
    assert (await group.bring(common_pb2.ACTIVE))[-1] == common_pb2.ACTIVE
    assert loader.gave == ["cpu:1", "image"] and loader.dropped == ["m"]
    assert group.residents.get("m").weights_from == ["checkpoint"]


async def test_weights_of_a_device_are_copied_again_after_a_failure_that_is_not_theirs(beside, refusals):
    group, loader = beside
    refusals.append(CommandFailed("no memory", model_at_fault=False))
    with pytest.raises(CommandFailed, match="no memory"):
        await group.bring(common_pb2.ACTIVE)
    assert loader.gave == ["cpu:1"]
    await group.bring(common_pb2.ACTIVE)
    assert loader.gave == ["cpu:1", "cpu:1"]


async def test_image_is_not_dropped_after_a_failure_that_is_not_its_own(beside, refusals):
    group, loader = beside
    refusals += [CommandFailed("no memory", model_at_fault=False), DIFFER]
    with pytest.raises(CommandFailed, match="no memory"):
        await group.bring(common_pb2.ACTIVE)
    assert loader.gave == ["cpu:1", "image"] and not loader.dropped and group.residents.get("m") is None


@pytest.mark.parametrize("from_sleep", [False, True])
async def test_an_engine_that_dies_while_its_weights_arrive_is_replaced_and_the_image_kept(beside, from_sleep):
    """The loader hears of the end of its lease before the engine's parent does."""
    group, loader = beside
    if from_sleep:
        await group.bring(common_pb2.ACTIVE)
        await group.bring(common_pb2.HIBERNATING)
    dead = []

    async def load_image(*arguments, **keys):
        if not dead:
            dead.append(group.residents.get("m").engine)
            dead[0].kill()
            raise NotFound("no lease")
        return await Loader.load_image(loader, *arguments, **keys)

    loader.load_image = load_image
    assert (await group.bring(common_pb2.ACTIVE))[-1] == common_pb2.ACTIVE
    resident = group.residents.get("m")
    assert resident.engine is not dead[0] and resident.weights_from == ["cpu:1"]


@pytest.mark.parametrize(
    "sizes",
    [
        {"kv_bytes_per_token": 1 << 62},
        {"context_tokens": 1 << 40, "kv_bytes_per_token": 1 << 20},
        {"weights_bytes": -1},
        {"context_tokens": -1, "kv_bytes_per_token": 1},
        {"kv_bytes_per_token": -1},
        {"kv_kinds": [common_pb2.KvKind(name="state", bytes_per_state=1 << 40, states=1 << 10)]},
        {"kv_kinds": [common_pb2.KvKind(name="attention", bytes_per_token=-1)]},
    ],
)
async def test_a_model_of_no_possible_size_is_refused_and_no_engine_is_asked(sizes):
    group = Group()
    spec = common_pb2.ModelSpec(name="m", path=SPEC.path, **{"context_tokens": 64, **sizes})
    with pytest.raises(Invalid):
        group.residency.begin(spec, common_pb2.ACTIVE, "test")
    assert group.residents.get("m") is None


async def test_engine_is_outdated_by_a_change_of_its_nodes_catalogue_and_not_by_another_nodes(group):
    def says(context_tokens, kv_dtype=""):
        group.residents.listed["m"] = common_pb2.ModelSpec(name="m", context_tokens=context_tokens, kv_dtype=kv_dtype)

    says(900)
    await group.bring(common_pb2.ACTIVE)
    resident = group.residents.get("m")
    assert resident.spec.context_tokens == 1000 and not group.residents.is_outdated(resident)
    says(1000)  # the loader told placement first
    assert not group.residents.is_outdated(resident)
    says(1000, "fp8")
    assert group.residents.is_outdated(resident)
    says(800)
    assert group.residents.is_outdated(resident)
    # The model that comes up after a death is as placement told it before.
    resident.engine.kill()
    await resident.engine.dead.wait()
    await resident.change.task
    assert resident.engine is not None and group.residents.is_outdated(resident)
    await group.bring(common_pb2.COLD)
    change = group.residency.begin(SPEC, common_pb2.ACTIVE, "test")
    says(700)  # it is on its way already
    await change.task
    assert group.residents.is_outdated(group.residents.get("m"))


@pytest.mark.parametrize("target", [common_pb2.COLD, common_pb2.HIBERNATING])
async def test_a_model_whose_engine_dies_while_it_leaves_has_left(slow_group, target):
    group = slow_group
    await group.bring(common_pb2.ACTIVE)
    engine = group.residents.get("m").engine
    running = group.submit("r", new=100_000)
    await first_token(running)
    change = group.residency.begin(SPEC, target, "test", drain_ms=600_000)
    while group.residents.get("m").residency != common_pb2.DRAINING:
        await change.progress.changed(change.progress.revision)
    engine.kill()
    assert (await answer(running))[1:] == (common_pb2.FAILED, "its engine died")
    await change.task
    assert group.residents.get("m") is None
    assert (change.failure is None) == (target == common_pb2.COLD)
    assert (await group.bring(common_pb2.ACTIVE))[-1] == common_pb2.ACTIVE
