"""Resources of this machine for a local system: its devices, and host memory for images."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from balloond import backends
from services.errors import Invalid, Unavailable

MIB = 1 << 20


Group = dict[str, int | None]
"""Device -> capacity in bytes; None: what balloond finds free."""


def groups(wanted: str, cpu_mib: Sequence[Sequence[int]]) -> list[Group]:
    """Groups of devices that serve models together. `wanted` is "cpu", "cuda" for all GPUs one by one, or devices by
    name, "cuda:0,cuda:1+cuda:2": the last two together. `cpu_mib`: MiB of the CPU devices of each group. Raises Invalid
    for anything else, Unavailable if there are no GPUs."""
    if wanted == "cpu":
        numbers = itertools.count()
        return [{f"cpu:{next(numbers)}": mib * MIB for mib in group} for group in cpu_mib]
    if wanted.startswith("cpu:"):
        return _cpus([group.split("+") for group in wanted.split(",")], cpu_mib)
    if not wanted.startswith("cuda"):
        raise Invalid(f'there is no device {wanted!r}: it is cpu, cuda, or devices by name, "cuda:0,cuda:1"')
    there = [f"cuda:{number}" for number in range(_gpus())]
    named = [[name] for name in there] if wanted == "cuda" else [group.split("+") for group in wanted.split(",")]
    names = list(itertools.chain(*named))
    for name in names:
        if name not in there:
            raise Invalid(f"there is no device {name!r}; this machine has {', '.join(there)}")
    _check_once(names)
    return [dict.fromkeys(group) for group in named]


def _cpus(named: Sequence[Sequence[str]], mib: Sequence[Sequence[int]]) -> list[Group]:
    """Groups of CPU devices of these names and sizes. Raises Invalid."""
    names = list(itertools.chain(*named))
    for name in names:
        if not re.fullmatch(r"cpu:\d+", name, re.ASCII):
            raise Invalid(f"there is no device {name!r} beside CPU devices, which are cpu:0, cpu:1 and so on")
    _check_once(names)
    if [len(group) for group in named] != [len(group) for group in mib]:
        example = ",".join("+".join("27" for _ in group) for group in named)
        raise Invalid(f"{', '.join(names)}: each needs its MiB of memory: --device-mib {example}")
    return [
        dict(zip(group, (each * MIB for each in sizes), strict=True)) for group, sizes in zip(named, mib, strict=True)
    ]


def _check_once(names: Sequence[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise Invalid(f"the device {name!r} is given twice: it belongs to one group")


def first() -> str:
    """The first GPU, or "cpu" where none can be used."""
    try:
        _gpus()
    except Unavailable:
        return "cpu"
    return "cuda:0"


def gpu_bytes(devices: Mapping[str, int | None]) -> dict[str, int]:
    """Bytes of the GPUs among these devices, by name: the capacity that is given, or the whole GPU. Raises Unavailable
    if one cannot be looked at."""
    gpus = {name: size for name, size in devices.items() if name.startswith("cuda:")}
    with _looking_at_gpus():
        return {name: backends.look(name).total_bytes if size is None else size for name, size in gpus.items()}


def _gpus() -> int:
    with _looking_at_gpus():
        from balloond.backends import cuda_hardware

        count = cuda_hardware.count()
    if count == 0:
        raise Unavailable("no GPU can be used: CUDA shows none")
    return count


@contextmanager
def _looking_at_gpus() -> Iterator[None]:
    """Context for looking at GPUs. Raises Unavailable if none can be used."""
    try:
        yield
    except ImportError as error:
        raise Unavailable(
            f"this environment is without CUDA ({error}): prism install cuda, or in a checkout make env DEVICE=cuda, "
            "makes one with it"
        ) from None
    except OSError as error:
        raise Unavailable(f"no GPU can be used: {error.strerror}") from None


def host_bytes_for_images(*, on_gpus: bool) -> int:
    """Half of the bytes of memory that the host has free; a quarter if the devices, and the memory that engines compute
    with, are of the same memory."""
    return max(MIB, host_bytes_free() // (2 if on_gpus else 4))


def host_bytes_free(root: Path = Path("/")) -> int:
    """Bytes that programs could take without swapping, and that this process's control groups allow. Raises
    Unavailable."""
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return min([int(line.split()[1]) * 1024, *_left_by_groups(root)])
    raise Unavailable("/proc/meminfo does not say what memory is free")


_GROUPS = (  # versions 2, 1: controller, folder, files of limit and use, cached files in memory.stat
    ("", "", "memory.max", "memory.current", ("active_file", "inactive_file")),
    (
        "memory",
        "memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_active_file", "total_inactive_file"),
    ),
)


def _left_by_groups(root: Path) -> Iterator[int]:
    """Bytes that each control group of this process leaves it, if the group has a limit."""
    try:
        own = {of: path for _, of, path in (line.split(":", 2) for line in _lines(root / "proc/self/cgroup"))}
    except (OSError, ValueError):
        return
    for controller, folder, most, used, cached in _GROUPS:
        base = root / "sys/fs/cgroup" / folder
        within = Path(own.get(controller, "/").lstrip("/"))
        for group in (within, *within.parents):
            try:
                limit, taken = (base / group / most).read_text(), int((base / group / used).read_text())
                stat = dict(line.split() for line in _lines(base / group / "memory.stat"))
            except (OSError, ValueError):
                continue  # it has no limit, or cannot be seen from inside a container
            if limit.strip() != "max":
                yield max(0, int(limit) - taken + sum(int(stat.get(name, 0)) for name in cached))


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines()
