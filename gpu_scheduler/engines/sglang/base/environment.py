"""The environment and paths that must be set before SGLang and torch are imported. This file imports neither."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import warnings
from pathlib import Path

from balloond.driver import torch_settings

ENGINE_VARIABLE = "PRISM_ENGINE"
"""Set in engine processes only: anywhere else the plugin, which SGLang finds in every process, does nothing."""

_STAND_INS = Path(__file__).parent / "cpu_stubs"
_PR_SET_PDEATHSIG = 1
_ALWAYS = {
    ENGINE_VARIABLE: "1",
    "TQDM_DISABLE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # Log-probabilities are the model's, not those after temperature.
    "SGLANG_RETURN_ORIGINAL_LOGPROB": "1",
    # A context of exactly the model's length would cut the last tokens of a request that fills it
    # (`CONTEXT_SLACK_TOKENS` in `options`).
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
    # How many future tokens of a request count when it is admitted. SGLang's 4096 would map memory that most requests
    # never use; a request that needs more gets it step by step, and retraction covers the rest.
    "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "128",
    # All ranks are on one host, so process groups need not listen on any other interface.
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
}
_WITH_GPU = {
    # Large free blocks are not split for small allocations that stay: they could never be returned to the device. Torch
    # makes blocks of whole 2 MiB, and does not hand a block of 64 to an allocation of less than 64: one of 63, as for
    # the probabilities of 128 requests, would get a new block every time. So allocations of 63 are rounded up to 64
    # first.
    "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64,roundup_power2_divisions:[16:0,32:16,64:0,>:0]",
}
_WITHOUT_GPU = {
    "SGLANG_USE_CPU_ENGINE": "1",
    # torch's inductor would be imported through decorators and needs a compiler.
    "TORCHDYNAMO_DISABLE": "1",
    # Two OpenMP threads beside other engines on the same cores are up to a hundred times slower than one.
    "OMP_NUM_THREADS": "1",
    # Convolutions of linear attention compute in the dtype of the model, which is float32 there.
    "SGLANG_MAMBA_CONV_DTYPE": "float32",
}


def has_gpu() -> bool:
    """Whether this machine has an NVIDIA driver."""
    return os.path.exists("/dev/nvidiactl")


def prepare(ranks: int = 1, rendezvous_fd: int | None = None) -> None:
    """Sets the environment of this process, one of `ranks` of its engine. Without a GPU it also puts the stand-ins
    (`cpu_stubs`) on the import path behind any real package. `rendezvous_fd` is shared memory that all ranks inherit,
    where process groups find each other; a single rank may leave it out.

    Raises SystemExit with one line where torch is configured to manage device memory in a way that conflicts with ours,
    and RuntimeError if torch was imported already.
    """
    if "torch" in sys.modules:
        raise RuntimeError("torch was imported before the engine's environment was prepared")
    if why := torch_settings.conflict(os.environ):
        raise SystemExit(why)
    os.environ.update(_ALWAYS)
    # SGLang's warnings at import concern GPUs and models that are not used here.
    warnings.filterwarnings("ignore", module=r"sglang\.")
    for name, value in (_WITH_GPU if has_gpu() else _WITHOUT_GPU).items():
        os.environ.setdefault(name, value)
    # Inherited memory takes the place of a port, which would be open to other processes and could be taken by one of
    # them.
    if rendezvous_fd is None:
        assert ranks == 1, "several ranks meet in what they inherit"
        rendezvous_fd = os.memfd_create("prism-rank")  # open for the life of this process
    os.environ["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] = f"file:///proc/self/fd/{rendezvous_fd}"
    if ranks > 1:
        _prepare_ranks(ranks)
    if not has_gpu():
        sys.path.append(str(_STAND_INS))


def prepare_tool() -> None:
    """Sets the environment of a process that imports parts of SGLang, and runs no model. It sees no GPU, and gets the
    stand-ins instead of any real package: kernels need a driver to be imported."""
    warnings.filterwarnings("ignore", module=r"sglang\.")
    os.environ.update(_WITHOUT_GPU, TOKENIZERS_PARALLELISM="false", CUDA_VISIBLE_DEVICES="")
    sys.path.insert(0, str(_STAND_INS))


def _prepare_ranks(ranks: int) -> None:
    # The queue makes objects in shared memory for what the ranks already exchange in another way.
    os.environ.setdefault("SGLANG_USE_MESSAGE_QUEUE_BROADCASTER", "0")
    # Free memory differs between the devices by what other models hold there; balloond says how much this model may
    # have.
    os.environ["SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"] = "0"
    if has_gpu():
        # Multicast objects of NVLink outlive a process that ends without closing them, and engines do end so.
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    else:
        # Without this SGLang wants a NUMA node for each rank.
        cores = sorted(os.sched_getaffinity(0))
        bound = "|".join(str(cores[rank % len(cores)]) for rank in range(ranks))
        os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", bound)


def die_with_parent() -> None:
    """Makes the kernel kill this process when the thread that started it ends, also in the middle of a forward pass.
    Raises SystemExit if the parent is gone already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1:
        raise SystemExit("the gpu_scheduler was gone before its engine started")
