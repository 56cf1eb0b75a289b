"""What an engine's process takes of the device before it has a model: NVML's figure for this process after each step.

python -m benchmarks.gpu.private_memory [--steps torch,sgl_kernel,scheduler,plugin]
"""

from __future__ import annotations

import argparse
import importlib
import os
import time

STEPS = "torch,cublas,sgl_kernel,flash_attn,scheduler,registry,plugin"


def used() -> int:
    import pynvml

    pynvml.nvmlInit()
    # NVML counts all GPUs of a host.
    index = int(os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0] or 0)
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    running = {p.pid: p.usedGpuMemory for p in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}
    return int(running.get(os.getpid(), 0) or 0)


def step(name: str) -> None:
    if name == "torch":
        import torch

        torch.zeros(1, device="cuda")
    elif name == "cublas":
        import torch

        a = torch.zeros(256, 256, device="cuda", dtype=torch.bfloat16)
        (a @ a).sum().item()
    elif name == "flash_attn":
        importlib.import_module("sgl_kernel.flash_attn")
    elif name == "scheduler":
        importlib.import_module("sglang.srt.managers.scheduler")
    elif name == "registry":
        importlib.import_module("sglang.srt.models.registry")
    elif name == "plugin":
        from gpu_scheduler.engines.sglang import plugin

        plugin.load()
    else:
        importlib.import_module(name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", default=STEPS)
    given = parser.parse_args()
    from gpu_scheduler.engines.sglang.base import environment

    environment.prepare()
    before = 0
    for name in given.steps.split(","):
        began = time.monotonic()
        step(name)
        now = used()
        print(
            f"{name:<12} {time.monotonic() - began:6.1f} s  {now / 2**20:8.0f} MiB  (+{(now - before) / 2**20:.0f})",
            flush=True,
        )
        before = now


if __name__ == "__main__":
    main()
