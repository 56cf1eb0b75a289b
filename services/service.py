"""One process: build what it is made of, be ready, drain, stop.

`run(config, build)` is the whole of a `__main__`. `build(service)` is the wiring list: it constructs the parts, adds
servicers, spawns tasks and calls `service.ready()`. Clocks, identifiers and backends are constructed there and nowhere
below.

A service manager that started the process gets reports: when it is ready, that its loop turns, and when it stops
(`services/runtime/notify.py`).

At SIGHUP the followed files (`services/runtime/watched_files.py`) are looked at at once; a service that reads more at
SIGHUP says so itself.

SIGTERM and SIGINT stop the process: health turns NOT_SERVING, the drains run (at most `drain_s` seconds), then the
stops, last added first. A spawned task that fails ends the process with status 1: a supervisor starts it afresh, which
is safer than half a service.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import uvloop

from services.errors import PrismError
from services.rpc import rpc
from services.rpc.tls import Identity
from services.runtime import config as config_module
from services.runtime import notify, process_limits, tasks
from services.runtime.config import Config, ServerTls
from services.runtime.watched_files import Followed, follow
from services.telemetry import log, metrics

_log = log.get(__name__)
C = TypeVar("C", bound=Config)
F = TypeVar("F")


class Service:
    """The process as `build` gets it: its server, its files, its tasks, and what to do when it stops."""

    def __init__(self, config: Config) -> None:
        """Raises Invalid if certificates cannot be used."""
        self.config = config
        self._followed: list[Followed[Any]] = []
        self._hangup = asyncio.Event()
        self._manager = notify.Manager()
        self._drains: list[Callable[[], Awaitable[None]]] = []
        self._stops: list[Callable[[], Awaitable[None]]] = []
        self._tasks: list[asyncio.Task[Any]] = []
        self._stopping = asyncio.Event()
        self._failure: BaseException | None = None
        of_node = self._identity(config.tls)
        rpc.identify(of_node)
        self.identity = of_node if config.serving_tls is config.tls else self._identity(config.serving_tls)
        """Certificate that clients of `listen` see; None: connections are in the clear."""
        self.server = rpc.Server(config.listen, self.identity, int(config.socket_mode, 8))

    def _identity(self, files: ServerTls | None) -> Identity | None:
        if files is None:
            return None
        identity = Identity(files)
        self.follow(identity.followed)
        return identity

    def add(self, adder: Callable[[Any, Any], None], servicer: Any, name: str) -> None:
        """Adds a gRPC servicer; only before `ready`."""
        self.server.add(adder, servicer, name)

    def spawn(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Starts a task that belongs to the process: its failure stops the process."""
        task = tasks.spawn(work, name, self.fail)
        self._tasks.append(task)
        return task

    def follow(self, files: Followed[F]) -> Followed[F]:
        """Keeps the files' value fresh from `ready` on: once a second, and at SIGHUP. Returns `files`."""
        self._followed.append(files)
        return files

    def on_drain(self, drain: Callable[[], Awaitable[None]]) -> None:
        """Adds a drain, which finishes what is under way; it is cancelled after `drain_s` seconds."""
        self._drains.append(drain)

    def on_stop(self, stop: Callable[[], Awaitable[None]]) -> None:
        """Adds a stop, which ends something that was started; the last one added runs first."""
        self._stops.append(stop)

    async def ready(self) -> None:
        """Starts the gRPC server and turns healthy."""
        if self._followed:
            self.spawn(follow(self._followed, self._hangup), "follow files")
        await self.server.start()
        await self.server.set_serving(True)
        _log.info("ready", listen=self.config.listen)
        self._manager.ready(f"serving on {self.config.listen}")

    def stop(self) -> None:
        self._stopping.set()

    @property
    def failed(self) -> bool:
        return self._failure is not None

    def fail(self, failure: BaseException) -> None:
        """Stops the process with status 1."""
        self._failure = failure
        self._stopping.set()

    async def _run(self, build: Callable[[Any], Awaitable[None]]) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        loop.add_signal_handler(signal.SIGHUP, self._hangup.set)
        # Runs until the process exits, so that a drain whose loop stands still is noticed as well.
        tasks.spawn(self._manager.beat(), "watchdog")
        try:
            if self.config.metrics:
                metrics.serve(self.config.metrics)
            await build(self)
            await self._stopping.wait()
        except PrismError as error:
            # The process could not start: its port is in use, or it runs already. One line, no trace.
            print(f"{self.config.name}: {error}", file=sys.stderr, flush=True)
            self._failure = error
        _log.info("stopping")
        self._manager.stopping()
        await self._end()
        if self._failure is not None:
            self._manager.failed(str(self._failure))
        return 1 if self.failed else 0

    async def _end(self) -> None:
        await self.server.set_serving(False)
        try:
            async with asyncio.timeout(self.config.drain_s):
                await asyncio.gather(*(drain() for drain in self._drains))
        except TimeoutError:
            _log.warning("drain took too long", drain_s=self.config.drain_s)
        for stop in reversed(self._stops):
            try:
                async with asyncio.timeout(self.config.drain_s):
                    await stop()
            except TimeoutError:
                _log.warning("a part did not stop in time", part=repr(stop))
        await tasks.cancel(*self._tasks)
        await self.server.stop(0.2)


def run(config: C, build: Callable[[Any], Awaitable[None]]) -> None:
    """Runs a process to its end; never returns."""
    process_limits.few_arenas()
    log.configure(config.name, config.log_level, config.log_format)

    async def main() -> int:
        try:
            service = Service(config)
        except PrismError as error:
            print(f"{config.name}: {error}", file=sys.stderr, flush=True)
            return 1
        return await service._run(build)

    runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    status = runner.run(main())
    # Everything that had to end has ended. Closing the loop would wait for worker threads, and one that is stuck in I/O
    # must not keep a stopped process alive.
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def read_arguments(kind: type[C], description: str) -> C:
    """The configuration by the command line that every service has: `--config FILE`."""
    return config_module.load(kind, config_path(description))


def config_path(description: str) -> str:
    """FILE of the command line `--config FILE`, for a service that reads the file again while it runs."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--config", required=True, metavar="FILE", help="TOML; an unknown key refuses to start")
    return str(parser.parse_args().config)
