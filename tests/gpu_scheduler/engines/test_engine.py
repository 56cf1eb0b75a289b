import asyncio
import os
import signal
import socket
import sys

import pytest

from gpu_scheduler.engines import processes
from gpu_scheduler.engines.engine import CommandFailed, EngineDied, EngineProcess, Spawn
from gpu_scheduler.engines.kinds import KINDS
from protos import common_pb2, engine_pb2
from services.ipc.framing import FramedChannel
from testing.patience import PATIENCE_S

SPEC = common_pb2.ModelSpec(name="m", context_tokens=100, kv_bytes_per_token=1, engine="echo")


class Ear:
    """Hears an engine."""

    def __init__(self):
        self.chunks, self.died, self.stats = [], asyncio.Event(), []
        self.began, self.finished = asyncio.Event(), asyncio.Event()

    def on_tokens(self, engine, chunks):
        self.chunks += chunks
        if any(chunk.token_ids for chunk in chunks):
            self.began.set()
        if any(chunk.finish for chunk in chunks):
            self.finished.set()

    def on_prefilled(self, engine, prompts): ...

    def on_parked(self, engine, request_id): ...

    def on_retracted(self, engine, request_id, reason): ...

    def on_stats(self, engine, stats):
        self.stats.append(stats)

    def on_death(self, engine):
        self.died.set()


@pytest.fixture
async def engine():
    engine = await EngineProcess.start(Spawn("echo"), 1, None)
    engine.listener = Ear()
    hello = await engine.hello(PATIENCE_S)
    assert (hello.pid, hello.engine) == (engine.pid, "echo")
    yield engine
    await engine.stop()


def load(**options):
    return engine_pb2.ToEngine(load=engine_pb2.Load(model=SPEC, device="cpu:0", options=options))


def generate(tokens, new, request_id="r"):
    return engine_pb2.Generate(
        request_id=request_id, token_ids=tokens, sampling=common_pb2.Sampling(max_new_tokens=new)
    )


async def test_loaded_engine_streams_tokens_and_the_reason_of_their_end(engine):
    await engine.command(load()).done()
    engine.generate(generate([5, 6, 7], 4))
    await engine.listener.finished.wait()
    tokens = [token for chunk in engine.listener.chunks for token in chunk.token_ids]
    assert tokens == [5, 5, 5, 5]
    assert engine.listener.chunks[-1].finish == common_pb2.LENGTH
    assert engine.listener.chunks[0].prompt_tokens == 3


async def test_a_full_context_ends_a_request(engine):
    await engine.command(load()).done()
    engine.generate(generate(list(range(90)), 1000))
    await engine.listener.finished.wait()
    assert sum(len(chunk.token_ids) for chunk in engine.listener.chunks) == 10


async def test_an_aborted_request_ends_at_once(engine):
    await engine.command(load(step_ms="100000")).done()
    engine.generate(generate([1], 50))
    engine.abort("r")
    await engine.listener.finished.wait()
    assert engine.listener.chunks[-1].finish == common_pb2.ABORTED


async def test_a_command_that_cannot_be_done_fails_with_its_reason(engine):
    await engine.command(load()).done()
    with pytest.raises(CommandFailed, match="holds a model already"):
        await engine.command(load()).done()


async def test_hibernation_is_refused_while_requests_run_and_drain_hands_them_back(engine):
    await engine.command(load(step_ms="100000")).done()
    engine.generate(generate([1], 50))
    hibernate = engine_pb2.ToEngine(hibernate=engine_pb2.Hibernate())
    with pytest.raises(CommandFailed, match="drain first"):
        await engine.command(hibernate).done()
    await engine.command(engine_pb2.ToEngine(drain=engine_pb2.Drain(finish_ms=0))).done()
    assert engine.listener.chunks[-1].finish == common_pb2.FAILED
    assert engine.listener.chunks[-1].error == "handed back"
    await engine.command(engine_pb2.ToEngine(hibernate=engine_pb2.Hibernate())).done()


async def test_drain_lets_running_requests_finish_and_hands_waiting_ones_back_at_once():
    engine = await EngineProcess.start(Spawn("echo"), 1, None)
    try:
        engine.listener = Ear()
        await engine.command(load(step_ms="1")).done()
        engine.generate(generate([1], 50))
        await engine.listener.began.wait()
        os.kill(engine.pid, signal.SIGSTOP)  # so it reads both before it can start the request
        engine.generate(generate([1], 50, "waits"))
        draining = engine.command(engine_pb2.ToEngine(drain=engine_pb2.Drain(finish_ms=1_000_000)))
        os.kill(engine.pid, signal.SIGCONT)
        await draining.done()
        ends = {chunk.request_id: chunk for chunk in engine.listener.chunks if chunk.finish}
        assert ends["r"].finish == common_pb2.LENGTH
        assert (ends["waits"].finish, ends["waits"].error) == (common_pb2.FAILED, "handed back")
    finally:
        await engine.stop()


async def test_engine_process_takes_model_after_model(engine):
    for _ in range(3):
        await engine.command(load()).done()
        await engine.command(engine_pb2.ToEngine(unload=engine_pb2.Unload())).done()


async def test_death_of_an_engine_is_reported_and_fails_its_commands(engine):
    await engine.command(load(step_ms="100000")).done()
    engine.generate(generate([1], 50))
    await engine.listener.began.wait()
    draining = engine.command(engine_pb2.ToEngine(drain=engine_pb2.Drain(finish_ms=1_000_000)))
    engine.kill()
    await engine.listener.died.wait()
    with pytest.raises(EngineDied):
        await draining.done()
    with pytest.raises(EngineDied):
        await engine.command(load()).done()


async def test_an_engine_ends_when_its_gpu_scheduler_is_gone():
    ours, theirs = socket.socketpair()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", KINDS["echo"].module, "--channel-fd", str(theirs.fileno()), pass_fds=[theirs.fileno()]
    )
    theirs.close()
    channel = await FramedChannel(engine_pb2.FromEngine).open(ours)
    assert (await channel.recv()).hello.pid == process.pid
    channel.close()
    assert await process.wait() == 0


async def test_an_engine_that_not_even_a_kill_ends_counts_as_dead(engine, monkeypatch):
    await engine.command(load(step_ms="100000")).done()
    engine.generate(generate([1], 50))
    await engine.listener.began.wait()  # a request that still waited would be handed back, and the drain be done
    command = engine.command(engine_pb2.ToEngine(drain=engine_pb2.Drain(finish_ms=100000)))
    monkeypatch.setattr(processes, "kill", lambda ranks: None)
    await engine.give_up(grace_s=0.0)
    assert not engine.alive and engine.listener.died.is_set()
    with pytest.raises(EngineDied):
        await command.done()
    monkeypatch.undo()


async def test_engine_that_is_pinged_answers(engine):
    heard = engine.heard
    assert heard == 1
    engine.ping()
    await engine.command(load()).done()
    assert engine.heard > heard + 2  # the answer, and what a load says
