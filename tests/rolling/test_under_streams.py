"""While streams run each process is stopped and started again: clients behind a balancer see none of it but a pause
(the figures are `python -m benchmarks.rolling`). And models are added, changed and removed."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable
from typing import Any

import pytest
import pytest_asyncio
import tomli_w

from protos import common_pb2
from services.rpc import rpc
from services.runtime import tasks
from testing.chaos import faults
from testing.chaos.load import Load, prompt, steady
from testing.chaos.world import SPARE, Chaos, chaos, watched
from testing.patience import PATIENCE_S
from testing.systems.local import FOLDER, MODELS, catalogue

pytestmark = pytest.mark.asyncio(loop_scope="module")
STREAMS = 18
"""One for each gateway, model and half of a stream's ends."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running():
    async with chaos(STREAMS, step_ms=30, patient=True) as it:
        it.load.balanced = True
        await it.prepare()
        yield it


@pytest.mark.parametrize("process", ["gateway", "gpu_scheduler", "balloond"])
async def test_a_process_that_is_restarted_loses_no_stream(running, process):
    async with watched(running) as books, steady(running.load) as load:
        taken, moved = running.taken_up_again(), await moves(running)
        replaced = await faults.restarted(process)(running)
        await running.full_service(time.monotonic(), replaced)
    assert (load.failures, load.wrong, load.ended >= STREAMS) == ([], [], True)
    assert books.looks and not books.unequal
    if process == "gpu_scheduler":
        # Its models went to the other group while it waited; it does not wait for a placement that is busy.
        log = (running.local.state / "logs" / f"{next(iter(replaced))}.log").read_text()
        assert any(
            f'"{line}"' in log for line in ("left", "drain took too long", "running requests are not moved away")
        )
    elif await moves(running) == moved:  # placement may find just then that a model belongs elsewhere
        assert running.taken_up_again() == taken


async def moves(it: Chaos) -> int:
    """That placement has ordered."""
    return sum(decision.action == "migrate" for decision in await it.placement.explain())


def list_models(it: Chaos, spare: dict[str, Any] | None) -> None:
    """In the catalogue file, which is read again; None: without the spare one."""
    listed = {name: {} for name in MODELS} | (
        {} if spare is None else {SPARE: {"path": str(FOLDER / MODELS[1])} | spare}
    )
    catalogue(it.local.state, "echo", listed)
    os.kill(it.system.running["loader"].pid, signal.SIGHUP)


async def card(it: Chaos, model: str) -> dict[str, Any] | None:
    """What a gateway says of it; None: there is no such model."""
    status, answer = await it.get(f"/v1/models/{model}")
    return dict(answer) if status == 200 else None


async def engine_of(it: Chaos, model: str) -> int | None:
    """None: it is on no group, or went from one to the other while they were asked."""
    try:
        return (await it.measured(model)).engine_pid
    except AssertionError:
        return None


async def streaming(it: Chaos, model: str) -> asyncio.Task[tuple[str, dict[str, Any], str]]:
    """A stream of some seconds that has begun."""
    started = asyncio.Event()
    task = tasks.spawn(it.stream(model, prompt(0), 60, started), f"stream of {model}")
    await started.wait()
    return task


async def test_models_are_added_changed_and_removed_while_others_stream(running):
    async with steady(running.load) as load:
        # Another target is for the next request: the engine stays.
        text = (await running.stream(SPARE, prompt(0), 60))[0]
        engine = await engine_of(running, SPARE)
        assert engine is not None
        list_models(running, {"ttft_ms": 5000})

        async def has_target() -> bool:
            routes = (await running.placement.routes()).routes
            return any(route.model.name == SPARE and route.model.default_slo.ttft_ms == 5000 for route in routes)

        await running.until(has_target, "the target is not told")
        assert await engine_of(running, SPARE) == engine

        # Another context is another engine, once what runs has ended.
        before = await streaming(running, SPARE)
        list_models(running, {"context_tokens": 256})

        async def is_short() -> bool:
            told = await card(running, SPARE)
            return told is not None and told["max_model_len"] == 256

        await running.until(is_short, "the context is not told")
        after = await streaming(running, SPARE)
        assert [(await each)[0] for each in (before, after)] == [text, text]

        async def is_another() -> bool:
            # Where there was no other place for it, it comes up when it is asked for.
            assert (await running.stream(SPARE, prompt(0), 60))[0] == text
            return await engine_of(running, SPARE) not in (None, engine)

        await running.until(is_another, "it has the engine that it had")

        # What is listed no more is gone at once for who asks, and for what runs when that has ended.
        last = await streaming(running, SPARE)
        list_models(running, None)

        async def is_gone() -> bool:
            return await card(running, SPARE) is None

        await running.until(is_gone, "it is listed")
        assert (await last)[0] == text

        async def has_left() -> bool:
            return await running.resident(SPARE) is None

        await running.until(has_left, "it does not leave")

        # The same by calls.
        added = common_pb2.ModelListing(name="added", path=str(FOLDER / MODELS[0]), engine="echo")
        await running.placement.add_model(added)
        await running.until(lambda: card(running, "added"), "it is not listed")
        last = await streaming(running, "added")
        await running.placement.remove_model("added", force=True)
        await running.until(lambda: _no(card(running, "added")), "it is listed")
        assert (await last)[1]["completion_tokens"] == 60
    assert (load.failures, load.wrong, load.ended >= STREAMS) == ([], [], True)


async def _no(asked: Awaitable[Any]) -> bool:
    return not await asked


class OnASocket:
    """A gateway that serves a listening socket of somebody else's."""

    def __init__(self, it: Chaos, name: str, socket: int) -> None:
        self.address = it.local.unix(name)
        self._log = it.local.state / "logs" / f"{name}.log"
        self._socket = socket
        self._config = it.local.state / f"{name}.toml"
        keys = {"name": name, "listen": self.address, "http": "127.0.0.1:1", "placement": it.local.unix("placement")}
        self._config.write_text(tomli_w.dumps(keys))

    async def start(self) -> None:
        handed_over = f'exec 3<&{self._socket}; LISTEN_PID=$$ LISTEN_FDS=1 exec "$0" -m gateway --config "$1"'
        command = ("bash", "-c", handed_over, sys.executable, str(self._config))
        with open(self._log, "ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *command, pass_fds=[self._socket], stdout=log, stderr=log
            )
        while not await rpc.healthy(self.address, PATIENCE_S):
            assert self._process.returncode is None, self._log.read_text()

    async def stop(self) -> None:
        """Returns when it has ended, of itself."""
        self._process.terminate()
        assert await self._process.wait() == 0


async def test_gateways_on_one_socket_restarted_in_turn_refuse_no_connection(running):
    async with contextlib.AsyncExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=100))
        gateways = [OnASocket(running, name, listener.fileno()) for name in ("shared-1", "shared-2")]
        for gateway in gateways:
            await gateway.start()
            stack.push_async_callback(gateway.stop)
        base = f"http://127.0.0.1:{listener.getsockname()[1]}"
        shared = Load(running.http, [base], list(MODELS), 6)
        await shared.learn()
        async with steady(shared) as load:
            for gateway in gateways:
                await gateway.stop()
                await gateway.start()
        assert (load.failures, load.wrong, load.refused, load.ended >= 6) == ([], [], 0, True)
