"""Engines that stand still, with real echo engines that hold no memory."""

import asyncio
import contextlib
import os
import signal
from functools import partial

import pytest

from gpu_scheduler.engines.engine import EngineProcess
from gpu_scheduler.policy.hang_detector import HangDetector
from gpu_scheduler.residency import watchdog
from gpu_scheduler.telemetry import counters
from protos import common_pb2, engine_pb2, gpu_scheduler_pb2
from services.runtime import tasks
from testing.patience import PATIENCE_S
from tests.gpu_scheduler.residency.test_residency import SPEC, answer, close_group, first_token, open_group


@pytest.fixture
async def group():
    group = await open_group(step_ms="100000")
    yield group
    await close_group(group)


@contextlib.asynccontextmanager
async def watched(group, stall_s=0.1, detector=HangDetector):
    """Meanwhile an engine may be silent for so long. Begun when it stands still: none is killed for being slow to begin
    with."""
    work = watchdog.watch_engines(group.residents, group.dispatcher, stall_s, look_s=0.02, detector=detector)
    watching = tasks.spawn(work, "watch engines")
    try:
        yield
    finally:
        await tasks.cancel(watching)


async def test_an_engine_that_stands_still_is_killed_and_replaced(group):
    await group.bring(common_pb2.ACTIVE)
    engine = group.residents.get("m").engine
    running = group.submit("r")
    await first_token(running)
    os.kill(engine.pid, signal.SIGSTOP)
    async with asyncio.timeout(PATIENCE_S):
        async with watched(group):
            assert (await answer(running))[1:] == (common_pb2.FAILED, "its engine died")
        assert await answer(group.submit("next", new=1)) == ([1], common_pb2.LENGTH, "")
    assert group.residents.get("m").engine is not engine
    assert counters.STALLED.labels("m")._value.get() >= 1


async def test_engine_that_stands_still_while_its_model_leaves_is_killed_too(group):
    await group.bring(common_pb2.ACTIVE)
    engine = group.residents.get("m").engine
    running = group.submit("r")
    await first_token(running)
    os.kill(engine.pid, signal.SIGSTOP)
    change = group.residency.begin(SPEC, common_pb2.COLD, "test", drain_ms=600_000)
    async with asyncio.timeout(PATIENCE_S), watched(group):
        assert (await answer(running))[1:] == (common_pb2.FAILED, "its engine died")
        await change.task
    assert group.residents.get("m") is None and not engine.alive


@pytest.mark.parametrize(
    "command",
    [
        engine_pb2.ToEngine(import_kv=engine_pb2.ImportKv()),
        engine_pb2.ToEngine(export_kv=engine_pb2.ExportKv(live=True)),
    ],
    ids=["takes", "gives"],
)
async def test_engine_that_stands_still_while_it_takes_or_gives_kv_is_killed_too(group, command):
    await group.bring(common_pb2.ACTIVE)
    engine = group.residents.get("m").engine
    running = group.submit("r")
    await first_token(running)
    os.kill(engine.pid, signal.SIGSTOP)
    engine.command(command)
    async with asyncio.timeout(PATIENCE_S), watched(group):
        assert (await answer(running))[1:] == (common_pb2.FAILED, "its engine died")


async def test_idle_engine_that_stands_still_when_it_is_to_make_way_does_not_hold_up_another(group):
    await group.bring(common_pb2.ACTIVE)
    os.kill(group.residents.get("m").engine.pid, signal.SIGSTOP)
    other = common_pb2.ModelSpec(name="other", context_tokens=1000, kv_bytes_per_token=1, engine="echo")
    yields = [gpu_scheduler_pb2.Yield(model="m", target=common_pb2.HIBERNATING)]
    async with asyncio.timeout(PATIENCE_S), watched(group):
        await group.residency.begin(other, common_pb2.ACTIVE, "test", yields=yields).task
    assert group.residents.get("other").residency == common_pb2.ACTIVE


async def test_an_engine_in_a_long_step_answers_and_stays(group, monkeypatch):
    asked = asyncio.Semaphore(0)
    ping = EngineProcess.ping

    def counted(engine):
        ping(engine)
        asked.release()

    monkeypatch.setattr(EngineProcess, "ping", counted)
    await group.bring(common_pb2.ACTIVE)
    engine = group.residents.get("m").engine
    await first_token(group.submit("r"))
    async with asyncio.timeout(PATIENCE_S), watched(group, 60.0, partial(HangDetector, ask_after=0.001)):
        for _ in range(10):
            await asked.acquire()
    assert engine.alive and group.residents.get("m").engine is engine


async def test_an_engine_that_stands_still_without_work_is_left_alone(group, monkeypatch):
    looked = asyncio.Semaphore(0)
    work_of = group.dispatcher.work_of

    def counted(engine):
        looked.release()
        return work_of(engine)

    monkeypatch.setattr(group.dispatcher, "work_of", counted)
    await group.bring(common_pb2.ACTIVE)
    engine = group.residents.get("m").engine
    os.kill(engine.pid, signal.SIGSTOP)
    try:
        async with asyncio.timeout(PATIENCE_S), watched(group):
            for _ in range(30):
                await looked.acquire()
        assert engine.alive
    finally:
        os.kill(engine.pid, signal.SIGCONT)
