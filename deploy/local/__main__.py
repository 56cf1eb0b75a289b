"""`python -m deploy.local`: starts the whole system, says what runs where, serves until Ctrl-C."""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import grpc

from deploy.local.devices import groups, host_bytes_for_images
from deploy.local.models import write_catalogue
from deploy.local.processes import StartFailed, System
from deploy.local.topology import GPU_DTYPE_BYTES, Local
from gateway import cors
from gpu_scheduler.client import GpuSchedulerClient
from placement.client import PlacementClient
from protos import common_pb2
from services import addresses, log
from services.errors import PrismError

_WARM_S = 120.0
_GPU_ENGINES = 16
"""Most engine processes of a GPU, hibernating ones included."""
ROOT = Path(__file__).resolve().parents[2]


def say(text: str) -> None:
    print(f"prism: {text}", flush=True)


def sizes(text: str) -> list[list[int]]:
    """ "27,13+13" -> [[27], [13, 13]]: groups of devices."""
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
        "--models", nargs="+", metavar="[NAME=]FOLDER", help="or their folders; a model is named as its folder"
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
        "--state",
        type=Path,
        default=ROOT / ".run",
        help="sockets, logs and configuration files go here; logs of the run before stay as NAME.log.previous",
    )
    parser.add_argument(
        "--device-mib",
        type=sizes,
        default=sizes("27,13"),
        metavar="A,B",
        help="memory of the CPU devices (default 27,13; 13+13: two that serve models together)",
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
    there = groups(options.device, options.device_mib)
    try:
        state.mkdir(parents=True, exist_ok=True)
        lock = open(state / "lock", "w")
    except OSError as error:
        say(f"--state {options.state}: {error.strerror}")
        return 1
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        say(f"a system runs in {os.path.relpath(state)} already; stop it, or name another folder with --state")
        return 1
    for old in (state / "logs").glob("*.log"):
        old.replace(old.with_suffix(".log.previous"))
    local = Local(
        state=state,
        catalogue=options.catalogue.resolve(),
        http=options.http,
        devices={device: size for group in there for device, size in group.items()},
        groups=tuple(tuple(group) for group in there),
        idle_s=options.idle_s,
        log_level=options.log_level,
        traces=options.traces,
        gateway={"cors_origins": options.cors_origin} if options.cors_origin else {},
    )
    if local.on_gpus:
        local = local.with_(engines=_GPU_ENGINES, host_capacity_bytes=host_bytes_for_images())
    if options.models:
        local = local.with_(catalogue=state / "models.toml")
        write_catalogue(options.models, local.catalogue, GPU_DTYPE_BYTES if local.on_gpus else 4)
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    system = System(local.processes(), state / "logs", say)
    say(f"starting; logs in {os.path.relpath(state / 'logs')}")
    began = time.monotonic()
    starting = asyncio.get_running_loop().create_task(system.start())
    stopping = asyncio.get_running_loop().create_task(stop.wait())
    await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
    try:
        if not starting.done():
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            return 130
        starting.result()
        await _warm(local, stopping)
        if stopping.done():
            return 130
        await _introduce(local, system, time.monotonic() - began)
        await stopping
        say("stopping, once answers under way have ended or their time is over")
    except StartFailed as error:
        say(str(error))
        return 1
    finally:
        await system.end()
        say("everything has ended")
    return 0


async def _warm(local: Local, stopping: asyncio.Task[bool]) -> None:
    """Waits until each group has an engine whose imports are done, so that the first request does not; not for ever."""

    async def one(group: str) -> None:
        client = GpuSchedulerClient(local.unix(local.scheduler(group)))
        try:
            async for state in client.watch():
                if state is not None and state.warm_engines:
                    say(f"{group} has a warm engine")
                    return
        finally:
            await client.close()

    say("engines are importing SGLang")
    warming: asyncio.Future[list[None]] = asyncio.gather(*(one(group) for group in local.group_names))
    either: list[asyncio.Future[Any]] = [warming, stopping]
    await asyncio.wait(either, timeout=_WARM_S, return_when=asyncio.FIRST_COMPLETED)
    if not warming.done():
        warming.cancel()
        await asyncio.gather(warming, return_exceptions=True)


def _size(nbytes: int) -> str:
    return f"{nbytes / (1 << 30):.1f} GiB" if nbytes >= 1 << 30 else f"{nbytes / (1 << 20):.1f} MiB"


async def _introduce(local: Local, system: System, seconds: float) -> None:
    placement = PlacementClient(local.unix("placement"))
    try:
        routes = await placement.routes()
        cluster = await placement.cluster()
    finally:
        await placement.close()
    say(f"serving after {seconds:.1f} s\n")
    print("  process                  pid")
    for name, running in system.running.items():
        print(f"  {name:<22} {running.pid:>6}")
    print("\n  devices                 memory")
    for group in cluster.groups:
        print(f"  {group.group:<22} {_size(group.capacity_bytes):>9}")
    print("\n  model                      weights   state")
    for route in routes.routes:
        state = common_pb2.Residency.Name(route.residency).lower().replace("_", " ")
        print(f"  {route.model.name:<24} {_size(route.model.weights_bytes):>9}   {state} {route.error}")
    names = [route.model.name for route in routes.routes if not route.error] or ["MODEL"]
    address = f"http://{local.http}"
    print(
        f"""
Try, in another shell:

  curl -s {address}/v1/chat/completions -H 'content-type: application/json' \\
    -d '{{"model": "{names[0]}", "temperature": 0, "messages": [{{"role": "user", "content": "What is Debian?"}}]}}'

  curl -sN {address}/v1/chat/completions -H 'content-type: application/json' \\
    -d '{{"model": "{names[len(names) // 2]}", "temperature": 0, "stream": true,
         "messages": [{{"role": "user", "content": "What is a list?"}}]}}'

  {os.path.relpath(sys.executable)} -m prismctl --state {os.path.relpath(local.state)} status

A model is loaded at its first request; when memory is short, an idle one leaves. Ctrl-C ends everything.""",
        flush=True,
    )


if __name__ == "__main__":
    try:
        sys.exit(asyncio.run(main()))
    except (PrismError, grpc.aio.AioRpcError) as error:
        say(str(error))
        sys.exit(1)
