"""SGLang's own HTTP server, `python -m sglang.launch_server`, with what our engines give SGLang for the same model."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from gpu_scheduler.engines.sglang.base import environment
from gpu_scheduler.engines.sglang.base.options import Options, arguments, kind_of
from protos import common_pb2

SAME = (
    *("device", "dtype", "attention_backend", "page_size", "chunked_prefill_size", "max_running_requests"),
    *("disable_overlap_schedule", "disable_cuda_graph", "cuda_graph_bs_decode", "cuda_graph_backend_prefill"),
    *("cuda_graph_bs_prefill", "disable_prefill_cuda_graph", "schedule_policy", "grammar_backend", "sleep_on_idle"),
    *("random_seed", "mem_fraction_static", "log_level"),
)
"""Of our engines' arguments. The others are how our engine is reached and where its memory comes from."""
_HEALTH_EVERY_S = 0.2


class StartFailed(Exception):
    """A server that ended, or was not up in time; the message has its last lines."""


def flags(named: Mapping[str, Any]) -> list[str]:
    """Arguments as a command line has them; what is False or None is left out."""
    found = []
    for name, value in named.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            found.append(flag)
        elif isinstance(value, (list, tuple)):
            found += [flag, *map(str, value)]
        elif value is not None and value is not False:
            found += [flag, str(value)]
    return found


def server_flags(folder: Path, name: str, device: str, weights_bytes: int, kv_tokens: int) -> list[str]:
    """For a model of that many bytes, served as `name`, with a pool of `kv_tokens`. Its drawing of tokens is SGLang's
    own choice on a GPU, and its layout of KV."""
    model = common_pb2.ModelSpec(name=name, path=str(folder), weights_bytes=weights_bytes, devices=1)
    ours = arguments(model, device, Options.parse({}, device, model), object)
    same = {key: ours[key] for key in SAME if key in ours}
    if kind_of(device) == "cpu":
        same["sampling_backend"] = ours["sampling_backend"]
    else:
        same["base_gpu_id"] = int(device.partition(":")[2] or 0)
    own = {"model_path": folder, "served_model_name": name, "max_total_tokens": kv_tokens, "skip_server_warmup": True}
    return flags({**own, **same})


def server_environment(caches: Mapping[str, str]) -> dict[str, str]:
    """Of SGLang's processes. Without a GPU those need stand-ins for packages that exist for GPUs alone."""
    found = {**os.environ, **caches, "PYTHONUNBUFFERED": "1", "NO_PROXY": "127.0.0.1,localhost"}
    if not environment.has_gpu():
        stand_ins = Path(environment.__file__).parent / "cpu_stubs"
        found["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(stand_ins)]))
        found |= {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    return found


@dataclass
class Server:
    """One that was started; it may not be up yet."""

    base: str
    log: Path
    process: asyncio.subprocess.Process

    async def up(self, timeout_s: float) -> float:
        """Seconds until it is healthy. Raises StartFailed."""
        began = time.monotonic()
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5.0)) as http:
            while time.monotonic() - began < timeout_s:
                if self.process.returncode is not None:
                    raise StartFailed(f"SGLang ended with status {self.process.returncode}:\n{self.last_lines()}")
                with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                    async with http.get(f"{self.base}/health") as answer:
                        if answer.status == 200:
                            return time.monotonic() - began
                await asyncio.sleep(_HEALTH_EVERY_S)
        raise StartFailed(f"SGLang was not healthy after {timeout_s:.0f} s:\n{self.last_lines()}")

    def last_lines(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])


@contextlib.asynccontextmanager
async def server(port: int, said: Sequence[str], caches: Mapping[str, str], log: Path) -> AsyncIterator[Server]:
    """Begun with these flags, and killed with all that it started when the block is left."""
    with open(log, "wb") as to:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "sglang.launch_server", *said, "--host", "127.0.0.1", "--port", str(port)),
            stdin=subprocess.DEVNULL,
            stdout=to,
            stderr=to,
            start_new_session=True,
            preexec_fn=environment.die_with_parent,
            env=server_environment(caches),
        )
    try:
        yield Server(f"http://127.0.0.1:{port}", log, process)
    finally:
        # Its own shutdown takes seconds.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
