"""The size of an extent of KV by the number of descriptors: balloond and the keeper both hold one for each extent, and
a host may allow a process too few for extents of the usual size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from balloond.policy import capacity
from deploy.local.topology import Local

_MIB = 1 << 20


def fitted(local: Local, gpus: Mapping[str, int], limit: int) -> tuple[Local, str]:
    """(the system, with extents of KV so large that `limit` descriptors are enough for a process that holds one for
    each; a line about that, empty if extents of the usual size suffice). `gpus`: bytes of each GPU by its name. A
    system whose settings name a size keeps it, and so does one for which no size would do: balloond says then what is
    needed."""
    usual = [(size, capacity.KV_EXTENT) for size in gpus.values()]
    if not gpus or _is_set(local, list(gpus)):
        return local, ""
    size = capacity.fitting(usual, limit)
    if size is None or size == capacity.KV_EXTENT:
        return local, ""
    needed = capacity.descriptors(usual)
    line = (
        f"KV is given out in extents of {size // _MIB} MiB, not of {capacity.KV_EXTENT // _MIB}: the GPUs need "
        f"{needed:,} descriptors with those, and a process may open {limit:,} (ulimit -Hn)"
    )
    return local.with_(kv_extent_bytes=size), line


def _is_set(local: Local, gpus: Sequence[str]) -> bool:
    """Whether a setting names a size of KV extents."""
    settings = [local.loader, local.gpu_scheduler.get("engines", {})]
    settings += [local.device_settings.get(name, {}) for name in gpus]
    return any("kv_extent_bytes" in each for each in settings)
