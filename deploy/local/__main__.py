"""Starts the whole system on this machine, says what runs where, and serves until Ctrl-C."""

from __future__ import annotations

import argparse
import asyncio
import errno
import fcntl
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc

from deploy import engine_packages, places
from deploy.hub import names
from deploy.local import bundled, descriptors, kernels, sizing
from deploy.local import models as local_models
from deploy.local.devices import Group, first, gpu_bytes, groups, host_bytes_for_images, host_bytes_free
from deploy.local.hub_models import fetched
from deploy.local.introduction import introduction
from deploy.local.models import check_names, described, named, read_all, write_catalogue
from deploy.local.processes import LocalSystem, StartFailed
from deploy.local.topology import Local
from deploy.local.warming import Warming, WatchedGroup
from deploy.node.description import NodeDescription
from deploy.node.reading import read
from deploy.node.targets import SERVE
from gateway.access import cors
from gateway.ui import access as ui_access
from loader.catalogue import catalogue
from placement.client import PlacementClient
from services.errors import Invalid, PrismError
from services.runtime import tasks
from services.runtime.process_limits import allow_descriptors
from services.runtime.progress import aside
from services.telemetry import log
from services.wording import addresses

_GPU_ENGINES = 16
"""The most engine processes of a GPU, hibernating ones included."""
KERNELS = places.cache() / "kernels"
"""Folder of compiled kernels of engines on GPUs."""


def _shown(path: Path) -> str:
    """A path as lines to copy have it: relative where it lies in the current folder, absolute elsewhere."""
    absolute = path.absolute()
    return str(absolute.relative_to(Path.cwd())) if absolute.is_relative_to(Path.cwd()) else str(absolute)


def say(text: str) -> None:
    with aside():
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


def arguments(given: Sequence[str] | None = None, prog: str = "python -m deploy.local") -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    parser.add_argument(
        "models",
        nargs="*",
        metavar="MODEL",
        help="a Hugging Face folder; ORG/NAME or ORG/NAME@REVISION, which is fetched from the Hugging Face hub; or the "
        "word smollm2, for SmolLM2-135M-Instruct, which is made when it is first asked for. A model is named as its "
        "folder, or ORG/NAME, or as NAME in NAME=MODEL. Without a model three tiny ones are served",
    )
    parser.add_argument(
        "--models", nargs="+", dest="more", default=[], metavar="MODEL", help="models, like the arguments MODEL"
    )
    parser.add_argument("--name", help="name by which clients ask for the model, if there is only one")
    parser.add_argument(
        "--catalogue", type=Path, metavar="FILE", help="a TOML file that lists the models and their targets"
    )
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="prism.toml, a description of all of this (examples/prism.toml); options given here take precedence",
    )
    parser.add_argument(
        "--device",
        metavar="D",
        help='"cpu" (the default), "cuda" for all GPUs, or '
        '"cuda:0,cuda:1+cuda:2": the last two together serve models with devices = 2; "cpu:0" with --device-mib',
    )
    parser.add_argument("--host", help="address that the HTTP API listens on (default 127.0.0.1: this machine alone)")
    parser.add_argument("--port", type=int, help="port that the HTTP API listens on (default 8000)")
    parser.add_argument("--http", metavar="HOST:PORT", help="address and port of the HTTP API in one")
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
        metavar="FOLDER",
        help=f"sockets, logs and configuration files go here (default {places.state()}); logs of the run before stay "
        "as NAME.log.previous",
    )
    parser.add_argument(
        "--device-mib",
        type=sizes,
        metavar="A,B",
        help="memory of the CPU devices (default 27,13, or as much as larger models need); 13+13 are two devices "
        "over which each model is spread",
    )
    parser.add_argument(
        "--idle-s",
        type=float,
        help="a model idle for longer may be evicted when another needs its memory (default 1)",
    )
    parser.add_argument(
        "--traces",
        action="store_true",
        help="send traces to OTEL_EXPORTER_OTLP_ENDPOINT (default http://localhost:4318)",
    )
    parser.add_argument("--log-level", choices=("debug", "info", "warning", "error"), help="least level of log lines")
    options = parser.parse_args(given)
    options.models += options.more
    if "" in options.models:
        parser.error("a model is an empty text: write its folder, or ORG/NAME")
    if options.models and options.catalogue is not None:
        parser.error("a model is named, and --catalogue is given: the catalogue has the models")
    if options.config and options.catalogue is not None:
        parser.error("--config and --catalogue are given: each has the models")
    if options.name is not None:
        if not options.models:
            parser.error("--name is given without a model: write --name NAME MODEL")
        if len(options.models) != 1 or "=" in options.models[0]:
            parser.error("--name is for one model; of several, each is given its own as NAME=MODEL")
        options.models = [f"{options.name}={options.models[0]}"]
    node = read(options.config, SERVE, say) if options.config else NodeDescription()
    if options.http is not None and not _is_address(options.http):
        parser.error(f"argument --http: {options.http!r} is no address to listen on: write HOST:PORT")
    host, port = addresses.host_and_port(options.http or node.http)
    host, port = options.host or host, port if options.port is None else options.port
    options.http = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    if not _is_address(options.http):
        parser.error(f"{options.http!r} is no address to listen on: write --host HOST --port PORT")
    try:
        for model in options.models:
            names.of_argument(model)
        cors.alone(options.cors_origin)
    except (Invalid, ValueError) as error:
        parser.error(f"argument --cors-origin: {error}" if isinstance(error, ValueError) else str(error))
    options.entries = {} if options.models else {entry["name"]: entry for entry in node.entries()}
    options.models = options.models or described(node)
    options.state = options.state or (Path(node.state) if node.state else places.state())
    options.groups = None if options.device or options.device_mib else _sized(node)
    options.device = options.device or node.wanted or (first() if options.config else "cpu")
    common = {"log_level": options.log_level or node.log_level, "traces": options.traces or node.traces}
    keys_file = str(options.keys_file.resolve()) if options.keys_file is not None else node.keys_file
    options.node = node.model_copy(update={**common, "keys_file": keys_file})
    return options


def _sized(node: NodeDescription) -> list[Group] | None:
    """The groups of a description, if they are CPU devices, whose sizes it gives; None: the machine has them."""
    sizes = [{name: settings.get("capacity_bytes") for name, settings in group.items()} for group in node.groups]
    return sizes if node.wanted and all(name.startswith("cpu:") for group in sizes for name in group) else None


def _is_address(text: str) -> bool:
    if "${" in text:
        return False  # the environment's variables are of files
    try:
        addresses.http(text)
    except ValueError:
        return False
    return True


def _free(http: str) -> str | None:
    """The address to listen on, with a port that is free now in place of port 0; None if another process has it. Where
    only the gateway's own attempt can tell, it is the address that was given."""
    host, port = addresses.host_and_port(http)
    try:
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as there:
            return f"{http.rpartition(':')[0]}:{there.getsockname()[1]}"
    except OSError as error:
        return None if error.errno == errno.EADDRINUSE else http


async def main(given: Sequence[str] | None = None, prog: str = "python -m deploy.local") -> int:
    options = arguments(given, prog)
    catalogue_path: Path = options.catalogue or places.TREE / "deploy" / "local" / "catalogue.toml"
    log.configure("local", "warning")
    state = options.state.resolve()
    try:
        addresses.socket_path(str(state / "gpu_scheduler-cpu-0.sock"))
    except ValueError:
        say(f"{state} is too long a path for Unix sockets; name a shorter one with --state")
        return 1
    if not catalogue_path.is_file():
        say(f"no catalogue at {catalogue_path}")
        return 1
    mib = options.device_mib or (sizing.SMALL if options.device == "cpu" else ())
    there = options.groups or groups(options.device, mib)
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
    if (http := _free(options.http)) is None:
        say(f"{options.http} is taken by another process; name another port with --port")
        return 1
    if (missing := engine_packages.missing(options.device)) is not None:
        say(missing)
        return 1
    for old in (state / "logs").glob("*.log"):
        old.replace(old.with_suffix(".log.previous"))
    local = Local(state=state, catalogue=catalogue_path.resolve(), http=http, **_settings(options))
    local = local.with_groups(there)
    local = local.with_(host_capacity_bytes=host_bytes_for_images(on_gpus=local.on_gpus))
    if local.on_gpus:
        local = local.with_(engines=_GPU_ENGINES)
        local, chosen = descriptors.fitted(local, gpu_bytes(local.devices), allow_descriptors())
        if chosen:
            say(chosen)
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    stopping = asyncio.get_running_loop().create_task(stop.wait())
    if options.models:
        check_names(options.models)
        await bundled.make({named(argument)[1] for argument in options.models}, stopping)
        unverified = [name for name, entry in options.entries.items() if entry.get("unverified")]
        models = await fetched(options.models, "cuda" if local.on_gpus else "cpu", stopping, unverified)
        if stop.is_set():
            return 130
        local = local.with_(catalogue=state / "models.toml")
        sizes = local_models.sizes(on_gpus=local.on_gpus)
        faults = write_catalogue(models, local.catalogue, sizes, options.entries)
        for name, fault in faults.items():
            say(f"{name} cannot be served, the others are: {fault}")
    else:
        try:
            catalogue.read(local.catalogue)
        except ValueError as error:
            say(f"no catalogue that can be used: {error}")
            return 1
    if not local.on_gpus and options.device_mib is None and options.groups is None:
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


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    """Fields of a local system, from its description and the command line, which goes before it."""
    node: NodeDescription = options.node
    own = {kind: dict(settings) for kind, settings in node.own(node.keys_file).items()}
    if options.cors_origin:
        own["gateway"]["cors_origins"] = options.cors_origin
    if options.idle_s is not None:
        own["placement"]["idle_s"] = options.idle_s
    if node.grpc:
        own["gateway"]["listen"] = node.grpc
    devices = {name: settings for group in node.groups for name, settings in group.items()}
    return {
        "log_level": node.log_level,
        "traces": node.traces,
        "metrics_port": node.metrics_port or 0,
        "device_settings": devices,
        **own,
    }


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
    script = Path(sys.executable).with_name("prismctl")
    prismctl = _shown(script) if script.exists() else f"{_shown(Path(sys.executable))} -m prismctl"
    prismctl += f" --state {_shown(local.state)}"
    keys = bool(local.gateway.get("keys_file"))
    page = ui_access.by_setting(local.gateway.get("ui"), local.http, keys) is not None
    print(introduction(processes, cluster, routes, problems, local.http, prismctl, keys=keys, page=page), flush=True)


def run(given: Sequence[str] | None = None, prog: str = "python -m deploy.local") -> int:
    """Serves as the command line says, and returns its status."""
    try:
        return asyncio.run(main(given, prog))
    except (PrismError, grpc.aio.AioRpcError) as error:
        say(str(error))
        return 1
    except KeyboardInterrupt:  # before there is anything to end
        say("stopped")
        return 130


if __name__ == "__main__":
    sys.exit(run())
