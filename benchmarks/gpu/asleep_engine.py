"""An engine process of ours that tells in detail what it holds of the device whenever it is asked what it keeps
(`asleep.py`): a line of JSON in the file that KEPT_TO names. The first, when the model is proven, has the bytes by
kind; the others torch's segments as well, and what lies in those of its ordinary memory: which tensors, and by
KEPT_FROM=1, which costs time, the lines of Python that they were allocated by."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Iterable
from typing import Any

FILE_VARIABLE = "KEPT_TO"
LINES_VARIABLE = "KEPT_FROM"
_LARGE_BYTES = 16 << 10
_MOST = 30
"""To find who refers to one takes a tenth of a second."""
_ORDINARY = (0, 0)


def details() -> dict[str, Any]:
    """Segments as [pool, kind, bytes, in use], blocks of ordinary memory as [bytes, shape, type, who refers to it,
    lines that allocated it]; the largest first."""
    import torch

    segments = torch.cuda.memory_snapshot()
    by_address: dict[int, Any] = {}
    for each in gc.get_objects():
        if type(each) in (torch.Tensor, torch.nn.Parameter) and each.is_cuda:
            by_address[each.untyped_storage().data_ptr()] = each
    blocks = [block for each in segments if tuple(each["segment_pool_id"]) == _ORDINARY for block in _blocks(each)]
    blocks.sort(key=lambda each: -int(each["size"]))
    told = [
        [str(each["segment_pool_id"]), each["segment_type"], each["total_size"], each["allocated_size"]]
        for each in segments
    ]
    return {
        "segments": sorted(told, key=lambda each: -each[2]),
        "blocks": [_told(each, by_address.get(each["address"])) for each in blocks[:_MOST]],
    }


def _blocks(segment: dict[str, Any]) -> Iterable[dict[str, Any]]:
    """Those in use that are not small."""
    address = segment["address"]
    for block in segment["blocks"]:
        if block["state"] != "inactive" and block["size"] >= _LARGE_BYTES:
            yield {"address": address, **block}
        address += block["size"]


def _told(block: dict[str, Any], tensor: Any) -> list[Any]:
    lines = [f"{frame['filename']}:{frame['line']} {frame['name']}" for frame in block.get("frames", ())]
    ours = [line for line in lines if "/torch/" not in line and "??" not in line][:8]
    if tensor is None:
        return [block["size"], [], "no tensor of Python's", [], ours]
    holders = sorted({_name(holder) for holder in gc.get_referrers(tensor)})[:4]
    return [block["size"], list(tensor.shape), str(tensor.dtype), holders, ours]


def _name(holder: object) -> str:
    if isinstance(holder, dict):
        return "dict of " + ", ".join(list(map(str, holder))[:3])
    return type(holder).__qualname__


def _wrap() -> None:
    """To be called once torch may be imported."""
    import torch

    from gpu_scheduler.engines.sglang.base import device

    if os.environ.get(LINES_VARIABLE):
        torch.cuda.memory._record_memory_history("state", "alloc", "python")
    original = device.kept

    def kept(*arguments: Any) -> dict[str, int]:
        path = os.environ[FILE_VARIABLE]
        kinds = original(*arguments)
        more = details() if os.path.exists(path) else {}
        with open(path, "a") as file:
            file.write(json.dumps({"kinds": kinds, **more}) + "\n")
        return kinds

    device.kept = kept


def main() -> None:
    from gpu_scheduler.engines.sglang import __main__ as engine
    from gpu_scheduler.engines.sglang.base import environment

    prepare = environment.prepare

    def prepared(*arguments: Any) -> None:
        prepare(*arguments)
        _wrap()

    environment.prepare = prepared
    engine.main()


if __name__ == "__main__":
    main()
