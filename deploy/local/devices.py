"""What this machine has for a local system: its devices, and host memory for images."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from services.errors import Invalid, Unavailable

MIB = 1 << 20


Group = dict[str, int | None]
"""Device -> capacity in bytes, None: what balloond finds free."""


def groups(wanted: str, cpu_mib: Sequence[Sequence[int]]) -> list[Group]:
    """Devices that serve models together. `wanted` is "cpu", "cuda" for all GPUs one by one, or GPUs by name,
    "cuda:0,cuda:1+cuda:2": the last two together. Raises Invalid for something else, Unavailable where there are no
    GPUs."""
    if wanted == "cpu":
        numbers = itertools.count()
        return [{f"cpu:{next(numbers)}": mib * MIB for mib in group} for group in cpu_mib]
    if not wanted.startswith("cuda"):
        raise Invalid(f'there is no device {wanted!r}: it is cpu, cuda, or GPUs by name, "cuda:0,cuda:1"')
    there = [f"cuda:{number}" for number in range(_gpus())]
    named = [[name] for name in there] if wanted == "cuda" else [group.split("+") for group in wanted.split(",")]
    names = list(itertools.chain(*named))
    for name in names:
        if name not in there:
            raise Invalid(f"there is no device {name!r}; this machine has {', '.join(there)}")
        if names.count(name) > 1:
            raise Invalid(f"the device {name!r} is given twice: it belongs to one group")
    return [dict.fromkeys(group) for group in named]


def _gpus() -> int:
    try:
        from balloond.backends import cuda_hardware

        count = cuda_hardware.count()
    except ImportError as error:
        raise Unavailable(f"this environment is without CUDA ({error}); make one with DEVICE=cuda") from None
    except OSError as error:
        raise Unavailable(f"no GPU can be used: {error.strerror}") from None
    if count == 0:
        raise Unavailable("no GPU can be used: CUDA shows none")
    return count


def host_bytes_for_images() -> int:
    """Half of the memory that the host has free."""
    return host_bytes_free() // 2


def host_bytes_free() -> int:
    """What programs could take without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise Unavailable("/proc/meminfo does not say what memory is free")
