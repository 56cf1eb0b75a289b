"""Kernels that an engine compiles while its model comes up, from what it says to what placement tells gateways. Real
echo engines, in whose name it is said."""

from __future__ import annotations

import asyncio
import math

import pytest

from gateway.routing import routes as gateway_routes
from gpu_scheduler.config import GpuSchedulerConfig
from gpu_scheduler.engines import engine as engine_module
from gpu_scheduler.engines.engine import EngineProcess
from gpu_scheduler.memory.group_memory import GroupMemory
from gpu_scheduler.report.report import GroupReport
from gpu_scheduler.report.report_rate import facts
from gpu_scheduler.residency import watchdog
from gpu_scheduler.telemetry import counters
from placement.cluster.routes import route
from protos import common_pb2, engine_pb2, loader_pb2
from services.runtime import tasks
from tests.gpu_scheduler.residency.test_residency import SPEC, close_group, open_group
from tests.placement.fakes import FakeCluster

BEGINS = engine_pb2.Compiling(kernel="activation", compiler="nvcc")
DONE = engine_pb2.Compiling(kernel="activation", compiler="nvcc", done=True, seconds=7.5)
AFTERWARDS = engine_pb2.Compiling(kernel="alloc_extend_kernel", compiler="triton", done=True, seconds=0.5)


@pytest.fixture
async def group():
    """One that has a warm engine."""
    group = await open_group()
    (pool,) = group.pools.values()
    async with pool.changed:
        pool.fill()
        await pool.changed.wait_for(lambda: pool.idle)
    yield group
    await close_group(group)


def says(engine, *told):
    for each in told:
        engine._take(engine_pb2.FromEngine(compiling=each))


@pytest.fixture
def at_load(monkeypatch):
    """Called with an engine as it is given a Load, by what a test puts in."""
    calls = []
    command = EngineProcess.command

    def with_calls(self, message, on_progress=None):
        if message.WhichOneof("message") == "load":
            for call in calls:
                call(self)
        return command(self, message, on_progress)

    monkeypatch.setattr(EngineProcess, "command", with_calls)
    return calls


def report(group):
    config = GpuSchedulerConfig(name="g", listen="unix:/none", group="g", devices=["cpu:0"], balloond="")
    return GroupReport(config, group.residents, group.dispatcher, GroupMemory(["cpu:0"]), group.pools).build()


def place_of(state):
    """As gateways have it."""
    world = FakeCluster(groups=1)
    world.groups[0].state.residents.extend(state.residents)
    world.tell()
    told = route(world.cluster, loader_pb2.Entry(model=SPEC), lambda entry: "", None)
    return gateway_routes.decode(told).places[0]


async def test_model_whose_kernels_are_compiled_is_reported_as_compiling_until_it_is_up(group, at_load):
    seen = []

    def compiles(engine):
        for told in (BEGINS, DONE, AFTERWARDS):
            before = report(group)
            says(engine, told)
            state = report(group)
            resident = state.residents[0]
            seen.append((resident.kernels_compiled, place_of(before).compiling, place_of(state).compiling))
            done, unit = resident.kernels_compiled, "kernels"
            assert resident.progress == common_pb2.Progress(step="compiling kernels", done=done, unit=unit)
            assert resident.waking_s > 0
            if not before.residents[0].compiling:
                assert facts(before) != facts(state), "placement is told at once"

    at_load.append(compiles)
    counts = {each: counters.COMPILED.labels(each)._value.get() for each in counters.COMPILERS}
    change = group.residency.begin(SPEC, common_pb2.ACTIVE, "test")
    told = [message.progress async for message in group.residency.follow(change)]
    assert seen == [(0, False, True), (1, True, True), (2, True, True)]
    # Of what is told together the last is heard.
    assert ("compiling kernels", 2, 0, "kernels") in [(p.step, p.done, p.total, p.unit) for p in told]
    resident = report(group).residents[0]
    assert (resident.compiling, resident.kernels_compiled) == (False, 2)
    assert (resident.HasField("progress"), resident.waking_s) == (False, 0.0)
    assert set(resident.step_s) == {"taking an engine", "reading the checkpoint", "compiling kernels"}
    assert counters.COMPILED.labels("nvcc")._value.get() == counts["nvcc"] + 1
    assert counters.COMPILED.labels("triton")._value.get() == counts["triton"] + 1


async def test_model_that_waits_for_its_groups_first_engine_counts_as_compiling(at_load):
    group = await open_group()
    try:
        waiting = []
        at_load.append(lambda engine: waiting.append(place_of(report(group)).compiling))
        for compiling in (True, False):
            change = group.residency.begin(SPEC, common_pb2.ACTIVE, "test")
            await asyncio.wait([change.task])
            assert waiting.pop() is compiling
            assert not report(group).residents[0].compiling
            await asyncio.wait([group.residency.begin(SPEC, common_pb2.ON_DISK, "test").task])
    finally:
        await close_group(group)


async def test_steps_are_in_order_and_a_step_that_was_interrupted_counts_as_one(group, at_load, monkeypatch):
    now = 1000.0
    monkeypatch.setattr("gpu_scheduler.residency.activator.time.monotonic", lambda: now)

    def compiles(engine):
        nonlocal now
        for told in (BEGINS, DONE, AFTERWARDS):
            now += 2.0
            says(engine, told)

    at_load.append(compiles)
    await group.bring(common_pb2.ACTIVE)
    resident = group.residents.get("m")
    names, times = [name for name, _ in resident.steps], [began for _, began in resident.steps]
    assert names[-6:] == [
        *("reading the checkpoint", "compiling kernels", "reading the checkpoint"),
        *("compiling kernels", "reading the checkpoint", ""),
    ]
    assert times == sorted(times)
    seconds = resident.step_seconds()
    assert (seconds["compiling kernels"], seconds["reading the checkpoint"]) == (2.5, 3.5)


async def test_kernels_compiled_while_a_model_serves_are_counted_and_change_no_activation_step(group):
    await group.bring(common_pb2.ACTIVE)
    resident = group.residents.get("m")
    before, steps = counters.COMPILING_S.labels("triton")._value.get(), list(resident.steps)
    says(resident.engine, AFTERWARDS)
    assert counters.COMPILING_S.labels("triton")._value.get() == before + 0.5
    assert not resident.compiling and resident.steps == steps


async def test_failed_start_is_not_reported_as_compiling_any_more(group, at_load):
    def dies(engine):
        says(engine, BEGINS)
        engine.kill()

    at_load.append(dies)
    change = group.residency.begin(SPEC, common_pb2.ACTIVE, "test")
    resident = group.residents.get("m")
    with pytest.raises(engine_module.EngineDied):
        [message async for message in group.residency.follow(change)]
    assert not resident.compiling


async def test_an_engine_that_compiles_between_two_steps_does_not_stand_still(group, monkeypatch):
    await group.bring(common_pb2.ACTIVE)
    engine = group.residents.get("m").engine
    looks = []

    class Looks:
        def __init__(self, timeout_s):
            pass

        def look(self, now, *, works, **_):
            looks.append(works)
            return watchdog.HangVerdict.NOTHING

    monkeypatch.setattr(group.dispatcher, "work_of", lambda engine: (1, 0.0))

    async def looked(compiles_s=300.0):
        looks.clear()
        work = watchdog.watch_engines(group.residents, group.dispatcher, 1.0, compiles_s, look_s=0.001, detector=Looks)
        watching = tasks.spawn(work, "watch")
        while not looks:
            await asyncio.sleep(0)
        await tasks.cancel(watching)
        return looks[-1]

    assert await looked()
    says(engine, BEGINS)
    assert engine.compiling_s > 0 and not await looked()
    assert engine.since_compiling_s() == 0, "a load may take longer for it"
    assert engine.since_compiling_s(longest_s=0.0) == math.inf, "not for ever either"
    assert await looked(compiles_s=0.0), "not for ever"
    says(engine, DONE)
    assert engine.compiling_s == 0
