"""What `http_beside_sglang` needs of a machine, and whether it is there: known before a GPU's time is spent on it."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu import report, shapes, stock_server

GIB, MIB = 1 << 30, 1 << 20
_DISK_BYTES, _GPU_BYTES = 24 * GIB, 74 * GIB
"""Of the checkpoints that are written, and of two servers of an 8B model."""
_IMPORTS_S = 120.0


@dataclass(frozen=True)
class Check:
    """Something that is needed, and whether it is there."""

    what: str
    ok: bool
    found: str


_PRISM_IMPORTS = """
import balloond.keeper.keeper, deploy.local.kernels, gateway.app
import gpu_scheduler.server, loader.server, placement.server
import uvicorn
from importlib.metadata import entry_points
assert any(each.name == "prism" for each in entry_points(group="sglang.srt.plugins")), "the plugin is not installed"
"""
_ENGINE_IMPORTS = """
from gpu_scheduler.engines.sglang.base import environment
environment.prepare()
import importlib, logging
logging.disable(logging.ERROR)
failed = []
def imported(name):
    try:
        return importlib.import_module(name)
    except BaseException as error:
        failed.append(f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:120]}")
if environment.has_gpu():
    # Kernels of attention and of mixtures, and what compiles others: SGLang imports some when a model needs them.
    for name in ("sgl_kernel.flash_attn", "triton_kernels.matmul", "flashinfer", "tvm_ffi", "cuda.bindings.runtime"):
        imported(name)
plugin = imported("gpu_scheduler.engines.sglang.plugin")
plugin.load()
from gpu_scheduler.engines.sglang.base import kernels
if environment.has_gpu():
    kernels.take_all_numbers()
    kernels.Compilations(lambda told: None).watch()
imported("gpu_scheduler.engines.sglang.engine")
# SGLang leaves out models whose modules cannot be imported, and only logs why.
from sglang.srt.models.registry import ModelRegistry
from loader.checkpoints.architectures.classes import CLASSES
import sglang
if absent := sorted(set(CLASSES) - set(ModelRegistry.models)):
    failed.append("SGLang has no " + ", ".join(absent))
if failed:
    raise SystemExit("; ".join(failed))
print("SGLang", sglang.__version__, "with our plugin and", len(CLASSES), "classes of models")
"""
_SGLANG_IMPORTS = """
import argparse, sys, torch
import sglang, sglang.srt.entrypoints.http_server, sglang.srt.managers.scheduler
import sglang.srt.managers.detokenizer_manager
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
parser.parse_args(sys.argv[1:])
gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
print("SGLang", sglang.__version__, "on torch", torch.__version__, "with", gpu)
"""


def machine(device: str, models: Sequence[Path]) -> list[Check]:
    """What is free where these folders of `models` are or will be written, and on a GPU which compiler there is."""
    disk = shutil.disk_usage(_existing(models[0])).free if models else 0
    needed = 0 if device.startswith("cpu") or all(map(Path.exists, models)) else _DISK_BYTES
    checks = [Check("disk", disk >= needed, _gib(disk))]
    # Host memory is not checked: on some machines it grows as it is used.
    if device.startswith("cuda"):
        free = int(report.smi("memory.free") or 0) * MIB
        nvcc = shutil.which("nvcc")
        checks += [
            Check("GPU memory", free >= _GPU_BYTES, _gib(free)),
            Check("nvcc", nvcc is not None, nvcc or "not on the PATH"),
        ]
    return checks


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.1f} GiB free"


def _existing(path: Path) -> Path:
    """The path, or what there is of the folders that it will be in."""
    return next(each for each in (path, *path.parents) if each.exists())


async def prism() -> Check:
    """Whether all processes of a system find their modules, in a process of its own."""
    return await _imported("Prism's modules", [sys.executable, "-W", "ignore", "-c", _PRISM_IMPORTS], dict(os.environ))


async def engine() -> Check:
    """Whether an engine finds all modules and kernels that its models may need, in a process of its own."""
    return await _imported(
        "an engine's modules", [sys.executable, "-W", "ignore", "-c", _ENGINE_IMPORTS], dict(os.environ)
    )


async def ours() -> list[Check]:
    """The faults that all our processes find, asked for at the same time."""
    return list(await asyncio.gather(prism(), engine()))


async def imports(device: str, kv_tokens: int) -> list[Check]:
    """Whether all processes find their modules and SGLang knows its flags, each in a process of its own, at once."""
    python = [sys.executable, "-W", "ignore"]
    said = stock_server.server_flags(Path("folder"), "model", device, 0, kv_tokens)
    with tempfile.TemporaryDirectory() as name:
        folder = shapes.write(Path(name), "tiny")
        shapes.write_tokenizer(folder)
        return list(
            await asyncio.gather(
                prism(),
                _imported(
                    "SGLang's server and flags",
                    [*python, "-c", _SGLANG_IMPORTS, *said],
                    stock_server.server_environment({}),
                ),
                _imported(
                    "bench_serving",
                    [*python, "-m", "benchmarks.gpu.bench_client", str(folder)],
                    stock_server.server_environment({}),
                ),
            )
        )


async def _imported(what: str, command: Sequence[str], environment: Mapping[str, str]) -> Check:
    began = time.monotonic()
    process = await asyncio.create_subprocess_exec(
        *command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=dict(environment)
    )
    try:
        async with asyncio.timeout(_IMPORTS_S):
            printed, errors = await process.communicate()
    except TimeoutError:
        process.kill()
        return Check(what, False, f"not imported after {_IMPORTS_S:.0f} s")
    text = (printed if process.returncode == 0 else errors).decode(errors="replace").strip()
    last = text.splitlines()[-1] if text else ""
    return Check(what, process.returncode == 0, f"{last[:400]} ({time.monotonic() - began:.1f} s)")


def show(checks: Sequence[Check]) -> bool:
    """As a table; whether all are well."""
    report.table("needed", ("what", "", "found"), [(c.what, "ok" if c.ok else "MISSING", c.found) for c in checks])
    return all(check.ok for check in checks)
