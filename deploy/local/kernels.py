"""Kernels of engines on GPUs: where compiled ones are kept, and compiling those that take longest before a request
needs them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from deploy.local.processes import die_with_parent
from services.runtime.progress import Far, ProgressMeter

CACHES = {
    "TRITON_CACHE_DIR": "triton",
    "SGLANG_JIT_CACHE_DIR": "sglang_jit",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "SGLANG_CACHE_DIR": "sglang",
    "SGLANG_DG_CACHE_DIR": "deep_gemm",
    "CUDA_CACHE_PATH": "cuda",
}
"""Variable that a compiler or library goes by -> name of its folder in the launcher's folder of kernels."""
EVERY_S = 10.0
"""Seconds between two lines about what is being compiled."""
_DRAWN_S = 0.5
"""Seconds between two drawings on a terminal."""
LONGEST_S = 300.0
"""The most seconds that a start waits for compiling, which goes on afterwards."""
MODULE = "gpu_scheduler.engines.sglang.precompile"


def caches(folder: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Variables for the processes of a system, so that what they compile is kept in `folder`, which is made; those that
    the user has set stay as they are. Returns none if the folder cannot be written: then each library has its own
    place."""
    wanted = {name: folder / its for name, its in CACHES.items() if not environment.get(name)}
    try:
        for path in wanted.values():
            path.mkdir(parents=True, exist_ok=True)
    except OSError:
        return {}
    return {name: str(path) for name, path in wanted.items()}


class Precompiled:
    """The process that compiles for the models of a catalogue, beside a system that starts."""

    def __init__(
        self,
        catalogue: Path,
        environment: Mapping[str, str],
        log: Path,
        say: Callable[[str], None],
        command: Sequence[str] = (sys.executable, "-m", MODULE),
    ) -> None:
        """`environment`: variables that it gets beside the launcher's own. `log`: file for the output of SGLang and
        compilers while it runs."""
        self._command = (*command, str(catalogue))
        self._environment = environment
        self._log = log
        self._say = say
        self._began = 0.0
        self._of = self._compiled = 0
        self._failed: dict[str, str] = {}
        self._child: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        self._began = time.monotonic()
        with open(self._log, "ab") as log:
            self._child = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # with its compilers, which end with it
                preexec_fn=die_with_parent,
                env={**os.environ, **self._environment},
            )
        self._reading = asyncio.get_running_loop().create_task(self._read(), name="what is compiled")

    async def wait(self, longest_s: float = LONGEST_S, every_s: float = EVERY_S) -> None:
        """Waits until compiling has ended, or `longest_s` seconds, and shows how far it is: on a terminal
        all the time, elsewhere every `every_s` seconds.
        Returns at once if it was not started."""
        if self._child is None:
            return
        until = time.monotonic() + longest_s
        with ProgressMeter("prism", self._say) as meter:
            while not self._reading.done():
                left_s = until - time.monotonic()
                if left_s <= 0:
                    self._say(f"{self}; it goes on, and requests wait for what they need of it")
                    return
                await asyncio.wait([self._reading], timeout=min(_DRAWN_S if meter.draws else every_s, left_s))
                if self._of and not self._reading.done():
                    if meter.draws:
                        meter.show(Far("compiling kernels, once", self._compiled, self._of, "kernels"))
                    else:
                        self._say(str(self))
        if self._compiled:
            self._say(f"{self._compiled} of {self._of} kernels compiled ({time.monotonic() - self._began:.0f} s)")
        for kernel, why in self._failed.items():
            self._say(f"{kernel} not compiled beforehand, an engine will try: {why}")

    def __str__(self) -> str:
        seconds = time.monotonic() - self._began
        return f"compiling kernels, once for this machine: {self._compiled} of {self._of} so far, {seconds:.0f} s"

    async def end(self) -> None:
        """Ends the process at once, with its compilers."""
        if self._child is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        await self._child.wait()
        await self._reading

    async def _read(self) -> None:
        assert self._child is not None and self._child.stdout is not None
        async for line in self._child.stdout:
            try:
                self._heard(json.loads(line))
            except ValueError:
                continue  # output of a library
        await self._child.wait()

    def _heard(self, told: Any) -> None:
        if not isinstance(told, dict):
            return
        self._of = told.get("of", self._of)
        if "error" in told:
            self._failed[told.get("kernel", "kernels")] = told["error"]
        elif "kernel" in told:
            self._compiled += 1
