"""`python -m deploy.local`: starts the whole system, says what runs where, serves until Ctrl-C."""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grpc

from deploy.local import bundled, kernels, sizing
from deploy.local.devices import groups, host_bytes_for_images, host_bytes_free
from deploy.local.introduction import introduction
from deploy.local.models import named, read_all, write_catalogue
from deploy.local.processes import LocalSystem, StartFailed
from deploy.local.topology import GPU_DTYPE_BYTES, Local
from deploy.local.warming import Warming, WatchedGroup
from gateway.access import cors
from loader.catalogue import catalogue
from placement.client import PlacementClient
from services.errors import PrismError
from services.runtime import tasks
from services.telemetry import log
from services.wording import addresses

_GPU_ENGINES = 16
"""The most engine processes of a GPU, hibernating ones included."""
ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / ".cache" / "kernels"
"""Folder of compiled kernels of engines on GPUs."""


def _shown(path: Path) -> str:
    """A path as lines to copy have it: relative where it lies in the current folder, absolute elsewhere."""
    absolute = path.absolute()
    return str(absolute.relative_to(Path.cwd())) if absolute.is_relative_to(Path.cwd()) else str(absolute)


def say(text: str) -> None:
    print(f"prism: {text}", flush=True)


def sizes(text: str) -> list[list[int]]:
    """MiB of devices, by group: "27,13+13" -> [[27], [13, 13]]. Raises ValueError."""
    values = [[int(part) for part in group.split("+")] for group in text.split(",")]
    if min(map(min, values)) < 1:
        raise ValueError(text)
    return values


def _origin(text: str) -> str:
    try:
        return cors.origin(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m deploy.local", description=__doc__)
    parser.add_argument(
        "--device",
        default="cpu",
        metavar="D",
        help='"cpu" (the default), "cuda" for all GPUs, or '
        '"cuda:0,cuda:1+cuda:2": the last two together serve models with devices = 2',
    )
    models = parser.add_mutually_exclusive_group()
    models.add_argument(
        "--catalogue", type=Path, default=Path(__file__).with_name("catalogue.toml"), help="the models, TOML"
    )
    models.add_argument(
        "--models",
        nargs="+",
        metavar="[NAME=]FOLDER",
        help="or their folders; a model is named as its folder. The word smollm2 stands for a folder too: that of "
        "SmolLM2-135M-Instruct, which is made when it is first asked for",
    )
    parser.add_argument("--http", default="127.0.0.1:8000", help="address of the HTTP API (default %(default)s)")
    parser.add_argument(
        "--cors-origin",
        action="append",
        default=[],
        type=_origin,
        metavar="ORIGIN",
        help='pages that may read answers in a browser, as "http://localhost:3000", or "*" for all; may be given again',
    )
    parser.add_argument(
        "--keys-file", type=Path, metavar="FILE", help="API keys (prismctl keys new); default: none are needed"
    )
    parser.add_argument(
        "--state",
        type=Path,
        default=ROOT / ".run",
        help="sockets, logs and configuration files go here; logs of the run before stay as NAME.log.previous",
    )
    parser.add_argument(
        "--device-mib",
        type=sizes,
        metavar="A,B",
        help="memory of the CPU devices (default 27,13, or as much as larger models need; 13+13: two that serve models "
        "together)",
    )
    parser.add_argument(
        "--idle-s",
        type=float,
        default=1.0,
        help="a model idle for longer may be evicted when another needs its memory",
    )
    parser.add_argument(
        "--traces", action="store_true", help="to OTEL_EXPORTER_OTLP_ENDPOINT, http://localhost:4318 if not set"
    )
    parser.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    options = parser.parse_args()
    try:
        cors.alone(options.cors_origin)
    except ValueError as error:
        parser.error(f"argument --cors-origin: {error}")
    return options


async def main() -> int:
    options = arguments()
    log.configure("local", "warning")
    state = options.state.resolve()
    try:
        addresses.socket_path(str(state / "gpu_scheduler-cpu-0.sock"))
    except ValueError:
        say(f"{state} is too long a path for Unix sockets; name a shorter one with --state")
        return 1
    if not options.catalogue.is_file():
        say(f"no catalogue at {options.catalogue}")
        return 1
    there = groups(options.device, options.device_mib or sizing.SMALL)
    try:
        state.mkdir(parents=True, exist_ok=True)
        lock = open(state / "lock", "w")
    except OSError as error:
        say(f"--state {options.state}: {error.strerror}")
        return 1
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        say(f"a system runs in {_shown(state)} already; stop it, or name another folder with --state")
        return 1
    for old in (state / "logs").glob("*.log"):
        old.replace(old.with_suffix(".log.previous"))
    gateway: dict[str, Any] = {"cors_origins": options.cors_origin} if options.cors_origin else {}
    if options.keys_file is not None:
        gateway["keys_file"] = str(options.keys_file.resolve())
    local = Local(
        state=state,
        catalogue=options.catalogue.resolve(),
        http=options.http,
        devices={device: size for group in there for device, size in group.items()},
        groups=tuple(tuple(group) for group in there),
        idle_s=options.idle_s,
        log_level=options.log_level,
        traces=options.traces,
        gateway=gateway,
    )
    local = local.with_(host_capacity_bytes=host_bytes_for_images(on_gpus=local.on_gpus))
    if local.on_gpus:
        local = local.with_(engines=_GPU_ENGINES)
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    stopping = asyncio.get_running_loop().create_task(stop.wait())
    if options.models:
        await bundled.make({named(argument)[1] for argument in options.models}, stopping)
        if stop.is_set():
            return 130
        local = local.with_(catalogue=state / "models.toml")
        faults = write_catalogue(options.models, local.catalogue, GPU_DTYPE_BYTES if local.on_gpus else 4)
        for name, fault in faults.items():
            say(f"{name} cannot be served, the others are: {fault}")
    else:
        try:
            catalogue.read(local.catalogue)
        except ValueError as error:
            say(f"no catalogue that can be used: {error}")
            return 1
    if not local.on_gpus and options.device_mib is None:
        sized = sizing.sized(read_all(local.catalogue), host_bytes_free())
        local = local.with_groups(groups("cpu", sized.mib))
        if sized.needed_mib:
            say(f"{sized}; --device-mib sets another size")
    compiled = kernels.caches(KERNELS, os.environ) if local.on_gpus else {}
    precompiled = kernels.Precompiled(local.catalogue, compiled, state / "logs" / "precompile.log", say)
    system = LocalSystem(local.processes(), state / "logs", say, compiled)
    say(f"starting; logs in {_shown(state / 'logs')}")
    began = time.monotonic()
    starting = asyncio.get_running_loop().create_task(system.start())
    try:
        if local.on_gpus:
            await precompiled.start()  # beside engines that import SGLang
        await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            return 130
        starting.result()
        compiling = tasks.spawn(precompiled.wait(), "wait for kernels")
        problems = await _warm(local, system, stopping)
        await asyncio.wait([compiling, stopping], return_when=asyncio.FIRST_COMPLETED)
        await tasks.cancel(compiling)
        if stopping.done():
            return 130
        await _introduce(local, system, problems, time.monotonic() - began)
        await stopping
        say("stopping, once answers under way have ended or their time is over")
    except StartFailed as error:
        say(str(error))
        return 1
    finally:
        await precompiled.end()
        await system.end()
        say("everything has ended")
    return 0


async def _warm(local: Local, system: LocalSystem, stopping: asyncio.Task[bool]) -> Mapping[str, str]:
    """Waits until each group has an engine whose imports are done, so that the first request does not wait for them;
    not for ever. Returns, by group, why it has no such engine."""
    watched = []
    for group in local.group_names:
        scheduler = local.scheduler(group)
        log_path = Path(_shown(system.running[scheduler].log_path))
        watched.append(WatchedGroup(group, local.unix(scheduler), log_path))
    say(f"engines {'are importing SGLang' if local.engine == 'sglang' else 'start'}")
    warming = Warming(watched, say)
    running = tasks.spawn(warming.run(), "wait for warm engines")
    await asyncio.wait([running, stopping], return_when=asyncio.FIRST_COMPLETED)
    await tasks.cancel(running)
    return warming.problems


async def _introduce(local: Local, system: LocalSystem, problems: Mapping[str, str], seconds: float) -> None:
    placement = PlacementClient(local.unix("placement"))
    try:
        routes = await placement.routes()
        cluster = await placement.cluster()
    finally:
        await placement.close()
    say(f"serving after {seconds:.1f} s\n")
    processes = {name: running.pid for name, running in system.running.items()}
    prismctl = f"{_shown(Path(sys.executable))} -m prismctl --state {_shown(local.state)}"
    print(introduction(processes, cluster, routes, problems, local.http, prismctl), flush=True)


if __name__ == "__main__":
    try:
        sys.exit(asyncio.run(main()))
    except (PrismError, grpc.aio.AioRpcError) as error:
        say(str(error))
        sys.exit(1)
