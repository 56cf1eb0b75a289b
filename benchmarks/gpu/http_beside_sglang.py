"""Prism over HTTP beside SGLang's own server, both asked by `sglang.bench_serving`, on one GPU.

    python -m benchmarks.gpu.http_beside_sglang --out DIR --commit HASH [--models 8b 135m] [--loads 16,32,x400]

For each model both servers are started with the same checkpoint, and with the same CUDA graphs, attention, page, chunk
and batch (`stock_server`); SGLang has a pool of --kv-tokens, Prism a GPU's part with room for as many. A model is a
shape, whose weights are drawn, or NAME=FOLDER (a real SmolLM2: 135m=FOLDER).

Both are up all the time and are asked in turns, window by window: A B, B A, A B, ... So a pair of windows is half a
minute apart, on the same clocks and at the same temperature, and what a start costs (20 to 70 s) is paid once; with
blocks of starts and stops a sitting has time for two pairs. The one whose turn it is not does nothing: its scheduler
sleeps until it is asked (`sleep_on_idle`, which our engines have too), and it has nothing on the GPU but memory.
What that takes from the other is memory alone: --kv-tokens are more than the largest batch needs.

A load is a rate in requests per second (Poisson), or xN, N requests at once. `+second`: another model (--second) is
awake in Prism and is not asked; these loads come last, and SGLang, which has no other model, is what they are compared
with. The prompts are bench_serving's "random-ids", as text, and answers are cut at their length. Both sides of a pair
get the same prompts at the same times; pairs differ, so that what one finds in its prefix cache the other finds too.

Ratios are Prism's over SGLang's, pair by pair, with a 95 % confidence interval of their mean. The file is written after
every round. A window has a limit; a side that cannot be started, or fails two windows in a row, is left out, and the
other is measured alone.

    --check      says within seconds whether all that is needed is there, and starts no server
    --rehearse   all of it on the CPU, small, with example models
    --fresh      first windows after a start that compiled every kernel: no warm-up, and beside the windows what runs
                 (`cpu_watch`), which compilers, and how many files the caches of kernels have
    --caches DIR kernels compiled by each side are kept in, and taken from, DIR/prism and DIR/sglang
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from pathlib import Path
from typing import Any

import aiohttp

import services.ipc.forking  # noqa: F401  (before grpc: servers are started)
from benchmarks.gpu import bench_serving, compared, cpu_watch, http_needed, pairs, report, shapes, stack, stock_server
from benchmarks.gpu.bench_serving import Load, load
from benchmarks.gpu.residency import told
from benchmarks.host_pulse import HostPulse
from gpu_scheduler.engines.sglang.base.options import kind_of
from loader.checkpoints import checkpoint
from protos import common_pb2
from services.runtime import process_limits
from services.telemetry import log
from testing.ports import free_port
from testing.systems.local import FOLDER, World, world

GIB, MIB = 1 << 30, 1 << 20
PRISM, SGLANG = "prism", "sglang"
MEASURES = {
    "mean TTFT, ms": "mean_ttft_ms",
    "p99 TTFT, ms": "p99_ttft_ms",
    "mean TPOT, ms": "mean_tpot_ms",
    "p99 TPOT, ms": "p99_tpot_ms",
    "tokens/s": "output_throughput",
}
"""What a table shows -> what bench_serving calls it."""
CACHES = {
    "TRITON_CACHE_DIR": "triton",
    "SGLANG_JIT_CACHE_DIR": "sglang_jit",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "SGLANG_CACHE_DIR": "sglang",
    "SGLANG_DG_CACHE_DIR": "deep_gemm",
    "CUDA_CACHE_PATH": "cuda",
}
"""Where compiled kernels lie: variable -> folder of a side's."""
_QUOTA_BYTES = 2 * GIB
"""Of an engine on a GPU; they measured 1.3 to 1.6 GiB."""
_BESIDE_BYTES = GIB
"""Of a device beside weights, KV and quota: CUDA graphs, what is rounded, spares."""
_SECOND_KV_BYTES = 2 * GIB
_UP_S = 420.0
"""For a server to come up where all kernels have to be compiled: 112 s on one H100."""
_WRITTEN_S = 300.0
_PAIR_BESIDE_S = 8.0
"""What a pair takes beside its windows' requests: drawing prompts, the last answers."""
_DEFAULTS: dict[str, Any] = {
    "models": ["8b", "135m"],
    "second": "1b",
    "loads": "16,32,x400,16+second",
    "warm_up": "x256,32",
    "rounds": 6,
    "window_s": 10.0,
    "input": 256,
    "output": 128,
    "kv_tokens": 114_688,
    "device": "cuda:0",
}
_REHEARSED: dict[str, Any] = {
    "models": [f"llama-debian={FOLDER / 'llama-debian'}"],
    "second": f"qwen3-perl={FOLDER / 'qwen3-perl'}",
    "loads": "4,x6,4+second",
    "warm_up": "x6",
    "rounds": 2,
    "window_s": 1.5,
    "input": 32,
    "output": 8,
    "kv_tokens": 8192,
    "device": "cpu:0",
}


def order(sides: Sequence[str], number: int) -> list[str]:
    """Whose windows come first and last in a round: A B, then B A, and so on, so that a drift cancels out."""
    return list(sides) if number % 2 == 0 else list(reversed(sides))


def seed(base: int, load_number: int, number: int) -> int:
    """Of the prompts and the times of a pair, another one for each load and round."""
    return (base * 1000 + load_number) * 1000 + number


def summary(windows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row for each load and measure. Only pairs count of which both windows came to something; where one side has
    none at all, its means are None, as are ratios."""
    rows = []
    of: dict[str, list[Mapping[str, Any]]] = {}
    for window in windows:
        if "error" not in window and not window["warm_up"]:
            of.setdefault(window["load"], []).append(window)
    for name, some in of.items():
        by_side = {side: {w["round"]: w for w in some if w["side"] == side} for side in (PRISM, SGLANG)}
        both = sorted(by_side[PRISM].keys() & by_side[SGLANG].keys())
        for measure, key in MEASURES.items():
            each = pairs.ratios(*([by_side[side][number][key] for number in both] for side in (PRISM, SGLANG)))
            ratio = pairs.interval(each)
            counted = {side: [of_side[n][key] for n in both or of_side] for side, of_side in by_side.items()}
            means = {side: sum(values) / len(values) if values else None for side, values in counted.items()}
            rows.append(
                {
                    "load": name,
                    "measure": measure,
                    **means,
                    "ratio": ratio.mean if each else None,
                    "half": ratio.half if isfinite(ratio.half) and each else None,
                    "ratios": each,
                    "failed": sum(window["failed"] for window in some),
                }
            )
    return rows


def show(name: str, rows: Iterable[Mapping[str, Any]]) -> None:
    def number(value: float | None, digits: int) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    cells = [
        (
            *(row["load"], row["measure"], *(number(row[side], 2) for side in (PRISM, SGLANG))),
            f"{number(row['ratio'], 3)} ± {number(row['half'], 3)}",
            *(len(row["ratios"]), row["failed"]),
        )
        for row in rows
    ]
    report.table(f"{name}, over HTTP", ("load", "measure", "Prism", "SGLang", "ratio, 95 %", "pairs", "failed"), cells)


def cache_folders(caches: Path | None, side: str) -> dict[str, Path]:
    """Variable -> folder of a side; none where every side's lie where they always do."""
    return {} if caches is None else {variable: caches / side / name for variable, name in CACHES.items()}


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


# --- one model


@dataclass(frozen=True)
class Model:
    """One that is served."""

    name: str
    folder: Path
    shape: str = ""
    """That its checkpoint is written in, where it is not there yet; empty: the folder is somebody's."""


@dataclass
class Side:
    """One that is asked."""

    name: str
    base: str
    failures: int = 0
    """Windows in a row that came to nothing."""


class Part:
    """One model, served by both."""

    def __init__(self, given: argparse.Namespace, model: Model, second: Model | None) -> None:
        self._given = given
        self._name, self._folder = model.name, model.folder
        self._second = second
        self._on_cpu = kind_of(given.device) == "cpu"
        self._loads = [load(each, given.window_s) for each in given.loads.split(",")]
        self._sides: dict[str, Side] = {}
        self._failed: dict[str, str] = {}
        self._roots: dict[str, list[int]] = {}
        self._windows: list[dict[str, Any]] = []
        self._about: dict[str, Any] = {}
        self._missing: list[str] = []
        self._at: World | None = None
        self._out: Path = given.out
        self._work = given.out / f"{self._result_name}.work"

    @property
    def _result_name(self) -> str:
        return f"http_beside_sglang_{self._name}" + ("_fresh" if self._given.fresh else "")

    async def run(self) -> list[str]:
        """What was not done, in words."""
        self._work.mkdir(parents=True, exist_ok=True)
        pulse = HostPulse()
        watch = cpu_watch.Watch(self._roots)
        try:
            async with contextlib.AsyncExitStack() as things:
                self._watch = watch
                if self._given.fresh:
                    await things.enter_async_context(watch)
                self._client = await things.enter_async_context(
                    bench_serving.client(self._folder, self._work / "client.log")
                )
                self._roots["client"] = [self._client.process.pid]
                await self._start(things)
                await self._client.told(_UP_S)
                await things.enter_async_context(pulse)
                await self._measure()
        finally:
            self._about["host"] = pulse.found
            if self._given.fresh:
                self._about |= {"watched": watch.rows, "compilers": watch.compilers}
            self._write()
        return [*self._missing, *(f"{self._name}, {side}: {why}" for side, why in self._failed.items())]

    async def _start(self, things: contextlib.AsyncExitStack) -> None:
        """Both at once. Raises RuntimeError where neither is up."""
        given = self._given
        dtype_bytes = 4 if self._on_cpu else 2
        headers = checkpoint.read(self._folder, dtype_bytes)
        said = stock_server.server_flags(self._folder, self._name, given.device, headers.weights_bytes, given.kv_tokens)
        self._about |= {
            "model": self._name,
            "weights_bytes": headers.weights_bytes,
            "kv_bytes_per_token": headers.kv_bytes_per_token,
            "sglang_flags": [Path(each).name if each.startswith("/") else each for each in said],
        }
        await asyncio.gather(self._start_prism(things, headers), self._start_sglang(things, said))
        if not self._sides:
            raise RuntimeError(f"neither server was started: {self._failed}")

    async def _start_prism(self, things: contextlib.AsyncExitStack, headers: checkpoint.Checkpoint) -> None:
        began = time.monotonic()
        try:
            self._at = await things.enter_async_context(self._prism(headers))
            self._roots[PRISM] = [running.pid for running in self._at.system.running.values()]
            async with asyncio.timeout(_UP_S):
                await stack.first_answer(self._at, self._name)
        except Exception as error:  # of whatever process: SGLang is measured all the same
            traceback.print_exc()
            self._failed[PRISM] = f"was not started: {error!r}"
            return
        self._came_up(PRISM, self._at.base, began)

    async def _start_sglang(self, things: contextlib.AsyncExitStack, said: Sequence[str]) -> None:
        began = time.monotonic()
        caches = {variable: str(path) for variable, path in cache_folders(self._given.caches, SGLANG).items()}
        started = stock_server.server(free_port(), said, caches, self._work / "sglang.log")
        stock = await things.enter_async_context(started)
        self._roots[SGLANG] = [stock.process.pid]
        try:
            await stock.up(_UP_S)
        except stock_server.StartFailed as error:
            print(error, flush=True)
            self._failed[SGLANG] = "was not started"
            return
        self._came_up(SGLANG, stock.base, began)

    def _came_up(self, name: str, base: str, began: float) -> None:
        self._sides[name] = Side(name, base)
        self._about[f"{name}_up_s"] = round(time.monotonic() - began, 1)
        say(f"{name} is up after {self._about[f'{name}_up_s']} s")

    @contextlib.asynccontextmanager
    async def _prism(self, headers: checkpoint.Checkpoint) -> AsyncIterator[World]:
        given = self._given
        listed: dict[str, dict[str, Any]] = {self._name: {"path": str(self._folder)}}
        if self._second is not None:
            listed[self._second.name] = {"path": str(self._second.folder)}
        capacity = 64 * MIB
        if not self._on_cpu:
            for entry in listed.values():
                entry["quota_bytes"] = _QUOTA_BYTES
            capacity = headers.weights_bytes + given.kv_tokens * headers.kv_bytes_per_token
            if self._second is not None:
                capacity += checkpoint.read(self._second.folder, 2).weights_bytes + _SECOND_KV_BYTES
            capacity += len(listed) * (_QUOTA_BYTES + _BESIDE_BYTES)
        self._about["prism_capacity_bytes"] = capacity
        ours = {variable: str(path) for variable, path in cache_folders(given.caches, PRISM).items()}
        with _environment(ours):  # which all processes of the system get
            async with world(
                "sglang",
                listed,
                devices={given.device: capacity},
                host_capacity_bytes=256 * MIB if self._on_cpu else 40 * GIB,
                engine_log_level="info" if given.fresh else "error",
                # Nobody falls asleep while the other side is asked.
                idle_s=3600.0,
                placement={"kv_idle_s": 3600.0},
                gateway={"park_time_out_s": _UP_S},
            ) as at:
                try:
                    yield at
                finally:
                    stack.keep_logs(at, self._out / f"{self._result_name}.logs.txz")
                    if given.fresh:
                        self._about["told"] = told(at.local.state / "logs", ("kernel compiled", "model active"))

    async def _measure(self) -> None:
        await self._look()
        if not self._given.fresh:
            for number, name in enumerate(self._given.warm_up.split(",")):
                for side in list(self._sides.values()):
                    await self._window(side, load(name, self._given.window_s / 2), 900 + number, 0, warm_up=True)
            await self._image()
        for second in (False, True):
            loads = [(number, each) for number, each in enumerate(self._loads) if each.second == second]
            if not loads or (second and not await self._wake_second()):
                continue
            for number in range(self._given.rounds):
                for load_number, each in loads:
                    await self._pair(load_number, each, number)
                self._write()
        if rows := summary(self._windows):
            show(self._name, rows)

    async def _look(self) -> None:
        """What there is as measuring begins: whether both say the same, and the memory of each."""
        said = {name: await self._answer(side) for name, side in self._sides.items()}
        self._about["answers"] = said
        self._about["gpu_memory_used_mib"] = report.smi("memory.used")
        if PRISM in self._sides and self._at is not None:
            resident = await self._at.measured(self._name)
            self._about["prism_kv_limit_bytes"] = resident.kv_limit_bytes
        self._about["arguments"] = {
            key: [str(each) for each in value] if isinstance(value, list) else str(value)
            for key, value in vars(self._given).items()
            if key not in ("out", "folders", "caches", "models", "second", "began", "end")
        }

    async def _answer(self, side: Side) -> str:
        """A greedy one, or what went wrong."""
        body = {"model": self._name, "prompt": list(range(300, 332)), "max_tokens": 16, "temperature": 0}
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60.0)) as http,
                http.post(f"{side.base}/v1/completions", json=body | {"ignore_eos": True}) as answer,
            ):
                return str((await answer.json())["choices"][0]["text"])
        except (aiohttp.ClientError, TimeoutError, KeyError, ValueError) as error:
            return repr(error)

    async def _image(self) -> None:
        """Until Prism has copied the weights to host memory, which it does once, beside what runs."""
        if PRISM not in self._sides or self._at is None:
            return
        try:
            await stack.imaged(self._at, self._name, 120.0)
        except TimeoutError:
            say("Prism has no image of the model's weights yet; measuring all the same")

    async def _wake_second(self) -> bool:
        """Whether it is awake."""
        if self._second is None or self._at is None or PRISM not in self._sides:
            return False
        name = self._second.name
        try:
            async with asyncio.timeout(_UP_S):
                await stack.first_answer(self._at, name)
                await self._at.wait_residency(name, common_pb2.ACTIVE)
            await stack.imaged(self._at, name, 60.0)
        except Exception as error:
            traceback.print_exc()
            self._missing.append(f"{self._name}: {name} did not wake: {error!r}")
            return False
        say(f"{name} is awake in Prism")
        return True

    async def _pair(self, load_number: int, each: Load, number: int) -> None:
        if not self._sides:
            return
        if time.monotonic() + 2 * each.asking_s + _PAIR_BESIDE_S > self._given.end:
            self._missing.append(f"{self._name}, {each.name}, round {number}: no time left")
            return
        drawn = seed(self._given.seed, load_number, number)
        for name in order(sorted(self._sides), number):
            if name in self._sides:
                await self._window(self._sides[name], each, drawn, number)

    async def _window(self, side: Side, each: Load, drawn: int, number: int, *, warm_up: bool = False) -> None:
        """Its row, whatever came of it."""
        row: dict[str, Any] = {"side": side.name, "load": each.name, "round": number, "seed": drawn}
        row |= {"warm_up": warm_up, "at_s": round(time.time(), 2)}  # since the epoch, as logs have it
        to, log_of = self._work / "window.jsonl", self._work / f"{side.name}-bench.log"
        to.unlink(missing_ok=True)
        lengths = (self._given.input, self._given.output)
        said = bench_serving.arguments(side.base, self._name, self._folder, each, lengths, drawn, to)
        before, began = cpu_watch.snapshot(threads=True), time.monotonic()
        try:
            done = await self._client.ask(said, log_of, each.asking_s + (300.0 if self._on_cpu else 60.0))
            seconds = time.monotonic() - began
            row["seconds"] = round(seconds, 2)
            row["cpu"] = cpu_watch.busy(before, cpu_watch.snapshot(threads=True), seconds, self._roots)
            if done["status"]:
                raise RuntimeError(f"bench_serving ended with status {done['status']}: {_last_line(log_of)}")
            row |= bench_serving.result(to.read_text())
            # Near one the client, which is a single thread, is what bounds the figures of both sides.
            row["client_cores"] = round(done["cpu_s"] / row["duration"], 3)
            if not row["completed"]:
                raise RuntimeError(f"no request was answered: {row['errors']}")
            shown = " ".join(f"{measure} {row[key]:.2f};" for measure, key in MEASURES.items())
            say(f"{self._name}, {each.name}, {number}, {side.name}: {shown} {row['failed']} failed; {seconds:.1f} s")
            side.failures = 0
        except (RuntimeError, FileNotFoundError, ValueError, KeyError) as error:
            row["error"] = str(error) or repr(error)
            say(f"{self._name}, {each.name}, {number}, {side.name} came to nothing: {row['error']}")
            side.failures += 1
            if side.failures > 1:
                self._failed[side.name] = f"failed two windows in a row: {row['error']}"
                del self._sides[side.name]
        row["clocks"] = report.smi("clocks.sm,temperature.gpu,power.draw")
        row["cache_files"] = cpu_watch.files(cache_folders(self._given.caches, side.name))
        if each.second and self._at is not None and self._second is not None:
            resident = await self._at.told_of(self._second.name)
            row["second"] = "away" if resident is None else common_pb2.Residency.Name(resident.residency)
        self._windows.append(row)

    def _write(self) -> None:
        body = {
            **self._about,
            "loads": [{**vars(each), "rate": each.rate if isfinite(each.rate) else None} for each in self._loads],
            "failed": self._failed,
            "missing": self._missing,
            "summary": summary(self._windows),
            "windows": self._windows,
        }
        compared.write(self._out, self._result_name, self._given.commit, body)


def _last_line(path: Path) -> str:
    lines = path.read_text(errors="replace").split("\n") if path.exists() else []
    return next((line for line in reversed(lines) if line.strip()), "")


@contextlib.contextmanager
def _environment(more: Mapping[str, str]) -> Iterator[None]:
    """These variables for the processes that are started in the block."""
    before = {name: os.environ.get(name) for name in more}
    os.environ.update(more)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


# --- the command line


def named(text: str, folders: Path) -> Model:
    """NAME=FOLDER, or a shape. Raises ValueError."""
    name, equals, folder = text.partition("=")
    if equals:
        return Model(name, Path(folder).resolve())
    if name not in shapes.NAMES:
        raise ValueError(f"{text} is neither NAME=FOLDER nor one of {', '.join(shapes.NAMES)}")
    return Model(name, folders.resolve() / name, name)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "benchmarks.gpu.http_beside_sglang", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="folder of results and logs")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--models", nargs="+", metavar="SHAPE|NAME=FOLDER")
    parser.add_argument("--second", metavar="SHAPE|NAME=FOLDER", help="the model that is awake beside")
    parser.add_argument("--loads", help="rates, xN for N at once, each with +second or not")
    parser.add_argument("--warm-up", help="the same, once before anything counts")
    parser.add_argument("--rounds", type=int, help="pairs of windows of each load")
    parser.add_argument("--window-s", type=float, help="for which a rate is kept up")
    parser.add_argument("--input", type=int, help="tokens of a prompt")
    parser.add_argument("--output", type=int, help="tokens of an answer")
    parser.add_argument("--kv-tokens", type=int, help="of SGLang's pool, and as much room for Prism's")
    parser.add_argument("--device")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folders", type=Path, help="where checkpoints of shapes are, and stay")
    parser.add_argument("--caches", type=Path, help="folder of compiled kernels, one below it for each side")
    parser.add_argument("--limit-s", type=float, default=inf, help="begin no pair that would not be done by then")
    for name in ("fresh", "check", "rehearse"):
        parser.add_argument(f"--{name}", action="store_true")
    given = parser.parse_args(arguments)
    if given.out is None and not given.check:
        parser.error("--out is needed")
    for name, value in (_REHEARSED if given.rehearse else _DEFAULTS).items():
        if getattr(given, name) is None:
            setattr(given, name, value)
    try:
        loads = [load(each, given.window_s) for each in given.loads.split(",")]
        for each in given.warm_up.split(","):
            load(each, given.window_s)
        for each in (*given.models, given.second):
            named(each, Path())
    except ValueError as error:
        parser.error(str(error))
    if not any(each.second for each in loads):
        given.second = None
    if given.fresh and given.caches is not None and any(given.caches.glob("*/*/*")):
        parser.error(f"--fresh: {given.caches} has kernels in it")
    return given


def write_checkpoint(model: Model, device: str) -> None:
    """In a process of its own, which leaves nothing on the device; nothing where it is there already."""
    if not model.shape or model.folder.exists():
        return
    began = time.monotonic()
    half = model.folder.with_name(model.name + ".half")
    shutil.rmtree(half, ignore_errors=True)
    code = "import sys; from benchmarks.gpu import shapes; from pathlib import Path; "
    code += "shapes.write_checkpoint(Path(sys.argv[1]), sys.argv[2], sys.argv[3], 4 << 30)"
    command = [sys.executable, "-c", code, str(half), model.shape, kind_of(device)]
    subprocess.run(command, check=True, timeout=_WRITTEN_S)
    half.rename(model.folder)
    say(f"{model.name} written in {time.monotonic() - began:.1f} s")


async def run(given: argparse.Namespace, models: Sequence[Model], second: Model | None) -> list[str]:
    """What was not done, in words."""
    missing = []
    for model in models:
        try:
            for each in filter(None, (model, second)):
                write_checkpoint(each, given.device)
            missing += await Part(given, model, second).run()
        except Exception as error:  # of one model: the next is measured all the same
            traceback.print_exc()
            missing.append(f"{model.name}: {error!r}")
    return missing


def main(arguments: Sequence[str] | None = None) -> int:
    given = parse(arguments)
    given.began = time.monotonic()
    given.end = given.began + given.limit_s
    log.configure("http_beside_sglang", "warning")
    process_limits.allow_descriptors()
    with tempfile.TemporaryDirectory() as folder:
        if given.fresh and given.caches is None:
            given.caches = Path(folder) / "caches"
        models = [named(each, given.folders or Path(folder)) for each in given.models]
        second = named(given.second, given.folders or Path(folder)) if given.second else None
        checks = http_needed.machine(given.device, [each.folder for each in (*models, second) if each is not None])
        if given.check:
            checks += asyncio.run(http_needed.imports(given.device, given.kv_tokens))
        well = http_needed.show(checks)
        if given.check or not well:
            return 0 if well else 1
        missing = asyncio.run(run(given, models, second))
    for line in missing:
        print(line)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
