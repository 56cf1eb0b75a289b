"""The processes of a request's path on one machine, with as little around them as can be: a gateway, a group, and
placement's routes from the benchmark itself."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from protos import common_pb2, gpu_scheduler_pb2, gpu_scheduler_pb2_grpc, placement_pb2, placement_pb2_grpc
from services.rpc import rpc

ROOT = Path(__file__).resolve().parents[1]
MODEL = "bench/echo"
STEP_MS = 50
_START_S = 60.0


def write_model(folder: Path) -> common_pb2.ModelSpec:
    """A folder with a byte-level tokenizer, and what the catalogue would say of it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([(ROOT / "LICENSE").read_text(), Path(__file__).read_text()], trainer)
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return common_pb2.ModelSpec(
        name=MODEL,
        path=str(folder),
        architecture="EchoForCausalLM",
        context_tokens=8192,
        weights_bytes=1 << 20,
        kv_bytes_per_token=64,
        floor_bytes=1 << 20,
        vocab_size=tokenizer.get_vocab_size(),
        generation=1,
        engine="echo",
        devices=1,
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class _Placement(placement_pb2_grpc.PlacementServicer):
    """One route, for ever."""

    def __init__(self, routes: placement_pb2.Routes) -> None:
        self._routes = routes

    async def WatchRoutes(self, request: Any, context: Any) -> Any:
        yield self._routes
        await asyncio.Event().wait()


class World:
    """`async with World(...)`: everything is up and the model active."""

    def __init__(self, folder: Path, group: str, traces: bool = False) -> None:
        """`traces`: of each request, to a process that reads them and throws them away."""
        self._traces = traces
        self.folder = folder
        self.spec = write_model(folder / "model")
        self.port = free_port()
        self._kind = group
        self._group = f"unix:{folder}/group.sock"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._environment: dict[str, str] = {}

    async def __aenter__(self) -> World:
        try:
            await self._bring_up()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def _bring_up(self) -> None:
        place = placement_pb2.Place(group="bench", address=self._group, residency=common_pb2.ACTIVE)
        route = placement_pb2.Route(model=self.spec, residency=common_pb2.ACTIVE, places=[place])
        self._placement = rpc.Server(f"unix:{self.folder}/placement.sock")
        self._placement.add(
            placement_pb2_grpc.add_PlacementServicer_to_server,
            _Placement(placement_pb2.Routes(revision=1, routes=[route])),
            "prism.placement.v1.Placement",
        )
        await self._placement.start()
        if self._traces:
            port = free_port()
            self._environment["OTEL_EXPORTER_OTLP_ENDPOINT"] = f"http://127.0.0.1:{port}"
            self._start("collector", "benchmarks/trace_sink.py", str(port))
        if self._kind == "stand-in":
            self._start("group", "benchmarks/group_stand_in.py", self._group)
        else:
            settings = 'group = "bench"\ndevices = ["cpu:0"]\nballoond = ""\n'
            settings += f'[engines]\nkind = "echo"\n[engines.options]\nstep_ms = "{STEP_MS}"\n'
            self._start_service("group", "gpu_scheduler", self._group, settings)
        gateway = f'http = "127.0.0.1:{self.port}"\nplacement = "unix:{self.folder}/placement.sock"\n'
        self._start_service("gateway", "gateway", f"unix:{self.folder}/gateway.sock", gateway)
        for name in ("group", "gateway"):
            address = self._group if name == "group" else f"unix:{self.folder}/gateway.sock"
            if not await rpc.healthy(address, _START_S):
                raise RuntimeError(f"{name} did not start: {self.log(name)}")
        if self._kind != "stand-in":
            await self._activate()

    async def _activate(self) -> None:
        async with rpc.channel(self._group) as channel:
            request = gpu_scheduler_pb2.SetResidencyRequest(
                model=self.spec, target=common_pb2.ACTIVE, reason="benchmark"
            )
            progress = [step async for step in gpu_scheduler_pb2_grpc.GpuSchedulerStub(channel).SetResidency(request)]
            if not progress or progress[-1].residency != common_pb2.ACTIVE:
                raise RuntimeError(f"the model did not come up: {progress[-1:]} {self.log('group')}")

    def _start_service(self, name: str, module: str, listen: str, settings: str) -> None:
        config = self.folder / f"{name}.toml"
        common = f'name = "{name}"\nlisten = "{listen}"\nlog_level = "warning"\ntraces = {str(self._traces).lower()}\n'
        config.write_text(common + settings)
        self._start(name, "-m", module, "--config", str(config))

    def _start(self, name: str, *command: str) -> None:
        with open(self.folder / f"{name}.log", "wb") as log:
            self._processes[name] = subprocess.Popen(
                [sys.executable, *command],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **self._environment},
                stdout=log,
                stderr=log,
            )

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()[-2000:]

    def pid(self, name: str) -> int:
        return self._processes[name].pid

    def cpu_s(self) -> dict[str, float]:
        """Processor time used so far, by process, children included."""
        used = {name: _cpu_s(process.pid) for name, process in self._processes.items()}
        used["engine"] = sum(map(_cpu_s, _children(self.pid("group"))))
        return used

    async def __aexit__(self, *_: object) -> None:
        for process in reversed(self._processes.values()):
            process.send_signal(signal.SIGTERM)
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(process.wait, 15)
            process.kill()
        await self._placement.stop(0)


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
