"""An engine process of ours that tells in detail what it holds of the device whenever it is asked what it keeps
(`asleep.py`): a line of JSON in the file that KEPT_TO names. The first, when the model is proven, has the bytes by
kind; the others torch's segments as well, and the largest tensors that lie there."""

from __future__ import annotations

import gc
import json
import os
from typing import Any

FILE_VARIABLE = "KEPT_TO"
_LARGE_BYTES = 16 << 10
_TENSORS = 30
"""To find who refers to one takes a tenth of a second."""


def details() -> dict[str, Any]:
    """Segments as [pool, kind, bytes, in use], the largest first; tensors as [bytes, shape, type, who refers to it]."""
    import torch

    segments = torch.cuda.memory_snapshot()
    spans = [(each["address"], each["address"] + each["total_size"]) for each in segments]
    there: dict[int, tuple[int, Any]] = {}
    for each in gc.get_objects():
        if type(each) in (torch.Tensor, torch.nn.Parameter) and each.is_cuda:
            storage = each.untyped_storage()
            inside = any(begin <= storage.data_ptr() < end for begin, end in spans)
            if inside and storage.nbytes() >= _LARGE_BYTES:
                there[storage.data_ptr()] = storage.nbytes(), each
    largest = sorted(there.values(), key=lambda each: -each[0])[:_TENSORS]
    tensors = [
        [nbytes, list(each.shape), str(each.dtype), sorted({_name(holder) for holder in gc.get_referrers(each)})[:4]]
        for nbytes, each in largest
    ]
    told = [
        [str(each["segment_pool_id"]), each["segment_type"], each["total_size"], each["allocated_size"]]
        for each in segments
    ]
    return {"segments": sorted(told, key=lambda each: -each[2]), "tensors": tensors}


def _name(holder: object) -> str:
    if isinstance(holder, dict):
        return "dict of " + ", ".join(list(map(str, holder))[:3])
    return type(holder).__qualname__


def _wrap() -> None:
    """To be called once torch may be imported."""
    from gpu_scheduler.engines.sglang import device

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
    from gpu_scheduler.engines.sglang import environment

    prepare = environment.prepare

    def prepared(*arguments: Any) -> None:
        prepare(*arguments)
        _wrap()

    environment.prepare = prepared
    engine.main()


if __name__ == "__main__":
    main()
