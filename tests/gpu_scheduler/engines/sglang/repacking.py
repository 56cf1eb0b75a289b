"""The program of an engine that knows the quantisation method of `repacked.py`."""

from __future__ import annotations

from types import ModuleType

import wrapt

from gpu_scheduler.engines.sglang.__main__ import main


@wrapt.when_imported("sglang.srt.layers.quantization")
def register(quantization: ModuleType) -> None:
    from tests.gpu_scheduler.engines.sglang import repacked

    repacked.register(quantization)


if __name__ == "__main__":
    main()
