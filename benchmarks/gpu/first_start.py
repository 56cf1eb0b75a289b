"""The first minutes of `make serve` on a machine that has compiled nothing, and a request as soon as somebody answers;
then the same again, with what the first start has compiled.

    python -m benchmarks.gpu.first_start --out DIR --commit HASH [--model 8b] [--folders DIR]

`python -m deploy.local` is started as a person starts it, but for caches of kernels, which are folders of this run's,
empty at first. The request is sent as soon as /health answers, long before the system introduces itself, and again
where it is refused. In DIR/first_start.json, for each of the two starts: seconds from the start of the process until
/health, the introduction and the first answer; every answer's status; what was printed and when; what the group said of
the model and when, with the step that it was at, and the CUDA graphs of which it told; kernels that engines compiled,
and how long that took; the steps of the activation. The file is written after each start; the logs lie beside it.

    --check      says within seconds whether all that is needed is there, and starts nothing
    --rehearse   all of it on the CPU, where nothing is compiled, with an example model
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp

import services.ipc.forking  # noqa: F401  (before grpc: a system is started)
from benchmarks.gpu import compared, http_needed
from benchmarks.gpu.http_beside_sglang import Model, named, say, write_checkpoint
from benchmarks.gpu.residency import told
from deploy.local.kernels import CACHES
from gpu_scheduler.client import GpuSchedulerClient
from protos import common_pb2
from services.runtime import process_limits, tasks
from services.telemetry import log
from testing.ports import free_port
from testing.systems.local import FOLDER

_STOP_S = 20.0
_RETRY_S = 1.0
_TOLD = ("kernel compiled", "model active", "residency not reached")
INTRODUCED = "Ctrl-C ends everything"
"""In the last line of what a system says when it introduces itself."""


class Start:
    """One start of a system, until its first answer and its introduction."""

    def __init__(self, model: Model, device: str, caches: Path, state: Path) -> None:
        self._model = model
        self._device = device
        self._caches = caches
        self._state = state
        self._began = time.monotonic()
        self._http = f"127.0.0.1:{free_port()}"
        self._introduced = asyncio.Event()
        self.found: dict[str, Any] = {"printed": [], "answers": [], "model": []}

    def _at(self) -> float:
        return round(time.monotonic() - self._began, 2)

    async def run(self, limit_s: float) -> None:
        """Into `found`, as it is heard, with an "error" where it did not come to its end."""
        environment = {**os.environ, **{name: str(self._caches / its) for name, its in CACHES.items()}}
        environment["PYTHONUNBUFFERED"] = "1"
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "deploy.local", "--device", self._device, "--state", str(self._state)),
            *("--http", self._http, "--models", f"{self._model.name}={self._model.folder}"),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            env=environment,
        )
        reading = tasks.spawn(self._read(process), "what is printed")
        watching = tasks.spawn(self._watch(), "what the group says")
        ended = tasks.spawn(process.wait(), "the system")
        work = tasks.spawn(self._ask(), "the first answer")
        try:
            await asyncio.wait([work, ended], timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                self.found["error"] = f"the system ended with status {process.returncode}"
            elif not work.done():
                self.found["error"] = f"no answer and introduction within {limit_s:.0f} s"
            elif work.exception() is not None:
                self.found["error"] = repr(work.exception())
        finally:
            await tasks.cancel(work, watching)
            if not ended.done():
                process.send_signal(signal.SIGINT)
                await asyncio.wait([ended], timeout=_STOP_S)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await ended
            await tasks.cancel(reading)
            self._heard()

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            text = line.decode(errors="replace").rstrip()
            if text.startswith("prism:"):
                self.found["printed"].append({"at_s": self._at(), "line": text})
                say(text)
            if INTRODUCED in text:
                self.found["introduced_s"] = self._at()
                self._introduced.set()

    async def _ask(self) -> None:
        """A completion, again where it is refused, until there is one and the system has introduced itself."""
        body = {"model": self._model.name, "prompt": "a b c", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        async with aiohttp.ClientSession(f"http://{self._http}", timeout=aiohttp.ClientTimeout(None)) as http:
            while True:
                with contextlib.suppress(aiohttp.ClientError):
                    async with http.get("/health") as answer:
                        if answer.status == 200:
                            break
                await asyncio.sleep(0.1)
            self.found["health_s"] = self._at()
            while True:
                asked_s = self._at()
                async with http.post("/v1/completions", json=body) as answer:
                    text = await answer.text()
                    row: dict[str, Any] = {"asked_s": asked_s, "at_s": self._at(), "status": answer.status}
                    row["retry_after"] = answer.headers.get("retry-after")
                self.found["answers"].append(row if answer.status == 200 else {**row, "body": text[:500]})
                say(f"answer {answer.status} after {row['at_s']} s")
                if answer.status == 200:
                    self.found["answer_s"] = row["at_s"]
                    break
                await asyncio.sleep(_RETRY_S)
        await self._introduced.wait()

    async def _watch(self) -> None:
        """What is new of the model."""
        client = GpuSchedulerClient(f"unix:{self._state / 'gpu_scheduler'}-{self._group.replace(':', '-')}.sock")
        before: dict[str, Any] = {}
        try:
            async for state in client.watch():
                for each in state.residents if state is not None else ():
                    row = {
                        "residency": common_pb2.Residency.Name(each.residency).lower(),
                        "compiling": each.compiling,
                        "kernels_compiled": each.kernels_compiled,
                        "step": each.progress.step,
                    }
                    if each.progress.unit == "graphs":
                        self.found["graphs_told"] = each.progress.done
                    if row != before:
                        self.found["model"].append({"at_s": self._at(), **row})
                        before = row
        finally:
            await client.close()

    @property
    def _group(self) -> str:
        return "cpu:0" if self._device == "cpu" else self._device

    def _heard(self) -> None:
        events = told(self._state / "logs", _TOLD)
        compiled = [each for each in events if each["event"] == "kernel compiled"]
        self.found["kernels"] = [{key: each.get(key) for key in ("kernel", "ms", "timestamp")} for each in compiled]
        self.found["kernels_compiled"] = len(compiled)
        self.found["compile_s"] = round(sum(each["ms"] for each in compiled) / 1e3, 2)
        self.found["activations"] = [each for each in events if each["event"] != "kernel compiled"]


def keep_logs(state: Path, folder: Path) -> None:
    if (state / "logs").is_dir():
        shutil.copytree(state / "logs", folder, dirs_exist_ok=True)


async def run(given: argparse.Namespace, model: Model, work: Path) -> list[str]:
    """What was not so as it should be, in words."""
    faults: list[str] = []
    found: dict[str, Any] = {}
    end = time.monotonic() + given.limit_s
    for name in ("first", "second"):
        left_s = end - time.monotonic() - _STOP_S / 2
        if left_s < 20:
            faults.append(f"{name} start: no time left")
            break
        state = Path(tempfile.mkdtemp(prefix="fs-", dir="/dev/shm"))
        start = Start(model, given.device, work / "caches", state)
        found[name] = start.found
        say(f"the {name} start")
        try:
            await start.run(left_s)
        finally:
            keep_logs(state, given.out / f"{name}_logs")
            shutil.rmtree(state, ignore_errors=True)
            compared.write(given.out, "first_start", given.commit, {"model": model.name, "starts": found})
        if "error" in start.found:
            faults.append(f"{name} start: {start.found['error']}")
        refused = [each for each in start.found["answers"] if each["status"] != 200]
        faults += [f"{name} start: an answer was {each['status']} after {each['at_s']} s" for each in refused]
        figures = ("health_s", "introduced_s", "answer_s", "kernels_compiled", "compile_s", "graphs_told")
        say(f"{name}: " + ", ".join(f"{figure} {start.found.get(figure)}" for figure in figures))
    if "second" in found and (again := found["second"]["kernels_compiled"]):
        faults.append(f"the second start compiled {again} kernels")
    return faults


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "benchmarks.gpu.first_start", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="folder of results and logs")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--model", metavar="SHAPE|NAME=FOLDER", help="8b if nothing is said")
    parser.add_argument("--folders", type=Path, help="where checkpoints of shapes are, and stay")
    parser.add_argument("--device", help="cuda:0 if nothing is said")
    parser.add_argument("--limit-s", type=float, default=150.0, help="for both starts, without writing a checkpoint")
    for name in ("check", "rehearse"):
        parser.add_argument(f"--{name}", action="store_true")
    given = parser.parse_args(arguments)
    if given.out is None and not given.check:
        parser.error("--out is needed")
    given.model = given.model or (f"llama-debian={FOLDER / 'llama-debian'}" if given.rehearse else "8b")
    given.device = given.device or ("cpu" if given.rehearse else "cuda:0")
    try:
        named(given.model, Path())
    except ValueError as error:
        parser.error(str(error))
    return given


def main(arguments: Sequence[str] | None = None) -> int:
    given = parse(arguments)
    log.configure("first_start", "error")
    process_limits.allow_descriptors()
    with tempfile.TemporaryDirectory() as folder:
        model = named(given.model, given.folders or Path(folder))
        checks = http_needed.machine(given.device, [model.folder])
        checks += asyncio.run(http_needed.ours())
        well = http_needed.show(checks)
        if given.check or not well:
            return 0 if well else 1
        write_checkpoint(model, given.device)
        faults = asyncio.run(run(given, model, Path(folder)))
    for line in faults:
        print(line)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
