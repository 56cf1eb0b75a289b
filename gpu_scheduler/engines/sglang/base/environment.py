"""What must be so before SGLang and torch are imported. Imports neither."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import warnings
from pathlib import Path

from balloond.driver import allocator

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
    # A context of exactly the model's length would cut the last tokens of a request that fills it (`options`).
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
    # How many future tokens of a request count when it is admitted. SGLang's 4096 would map memory that most requests
    # never use; who needs more gets it step by step, and retraction covers the rest.
    "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "128",
    # What process groups listen on is nobody else's: all ranks are on one host.
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
}
_WITH_GPU = {
    # What was large and free is not broken up for what is small and stays: it could never be returned to the device.
    # Torch makes blocks of whole 2 MiB, and gives one of 64 to nobody who asked for less than 64: whoever asks for 63,
    # as for the probabilities of 128 requests, would have a new one every time. So 63 are told to be 64 first.
    "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64,roundup_power2_divisions:[16:0,32:16,64:0,>:0]",
}
_WITHOUT_GPU = {
    "SGLANG_USE_CPU_ENGINE": "1",
    # torch's inductor would be imported through decorators and needs a compiler.
    "TORCHDYNAMO_DISABLE": "1",
    # Two OpenMP threads beside other engines on the same cores are up to a hundred times slower than one.
    "OMP_NUM_THREADS": "1",
}


def has_gpu() -> bool:
    return os.path.exists("/dev/nvidiactl")


def prepare(ranks: int = 1, rendezvous_fd: int | None = None) -> None:
    """Sets the environment of this process, which is one of so many `ranks`, and, without a GPU, lets the stand-ins be
    found after any real package. Raises SystemExit with one line where torch was told to manage device memory in a way
    that does not go with ours."""
    if "torch" in sys.modules:
        raise RuntimeError("torch was imported before the engine's environment was prepared")
    if why := allocator.conflict(os.environ):
        raise SystemExit(why)
    os.environ.update(_ALWAYS)
    # What SGLang says while it is imported is about GPUs and models that are not wanted here.
    warnings.filterwarnings("ignore", module=r"sglang\.")
    for name, value in (_WITH_GPU if has_gpu() else _WITHOUT_GPU).items():
        os.environ.setdefault(name, value)
    # Memory that all ranks inherit, in place of a port that is open to everybody and that somebody else may take.
    if rendezvous_fd is None:
        assert ranks == 1, "several ranks meet in what they inherit"
        rendezvous_fd = os.memfd_create("prism-rank")  # open for the life of this process
    os.environ["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] = f"file:///proc/self/fd/{rendezvous_fd}"
    if ranks > 1:
        _prepare_ranks(ranks)
    if not has_gpu():
        sys.path.append(str(_STAND_INS))


def _prepare_ranks(ranks: int) -> None:
    # Objects in shared memory, for what the ranks tell each other in another way.
    os.environ.setdefault("SGLANG_USE_MESSAGE_QUEUE_BROADCASTER", "0")
    # What is free of the devices differs by what other models hold there; what there is for this one, balloond says.
    os.environ["SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"] = "0"
    if has_gpu():
        # Multicast objects of NVLink outlive what ends without a goodbye, and engines do.
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    else:
        # Without it SGLang wants a NUMA node for each rank.
        cores = sorted(os.sched_getaffinity(0))
        bound = "|".join(str(cores[rank % len(cores)]) for rank in range(ranks))
        os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", bound)


def die_with_parent() -> None:
    """The kernel kills this process when the thread that started it ends, also in the middle of a forward pass."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1:
        raise SystemExit("the gpu_scheduler was gone before its engine started")
