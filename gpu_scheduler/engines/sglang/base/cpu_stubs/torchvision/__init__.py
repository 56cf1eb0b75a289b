"""Stand-in for torchvision, which SGLang imports for image models when its modules load.

The wheel that belongs to a CUDA build of torch does not load beside a CPU build, and no model that this engine
serves decodes images.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types
from typing import Any

__version__ = "0.0.0"
_PARTS = ("io", "ops", "transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional")


class _Absent:
    """Any name inside; may be passed on, not called."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __getattr__(self, name: str) -> _Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(f"{self._path}.{name}")

    def __call__(self, *_args: object, **_kwargs: object) -> Any:
        raise NotImplementedError(f"{self._path} was called, but torchvision is not installed on this machine")


def _part(name: str) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    module.__path__ = []
    module.__getattr__ = lambda attribute: _Absent(name).__getattr__(attribute)  # type: ignore[method-assign]
    return module


for _path in _PARTS:
    _full = f"{__name__}.{_path}"
    sys.modules[_full] = _part(_full)
    _parent, _, _last = _full.rpartition(".")
    setattr(sys.modules[_parent], _last, sys.modules[_full])
