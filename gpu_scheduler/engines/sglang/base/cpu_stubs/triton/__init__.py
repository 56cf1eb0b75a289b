"""Stand-in for triton on machines without a GPU: kernels can be defined, a launch raises.

SGLang defines Triton kernels in most of its modules. The real package is 700 MB installed and has no driver for
CPUs. torch looks for triton too, and would subclass what it finds here, so it is told once, before anything else,
that there is none.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

__version__ = "3.0.0"


def _hide_from_torch() -> None:
    ourselves = sys.modules[__name__]
    sys.modules[__name__] = None  # type: ignore[assignment]
    try:
        from torch.utils._triton import has_triton_package

        has_triton_package()  # remembers its answer
    finally:
        sys.modules[__name__] = ourselves


class Kernel:
    """A defined kernel."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.fn = function
        self.__name__ = getattr(function, "__name__", "kernel")
        self.__doc__ = function.__doc__

    def __getitem__(self, _grid: object) -> NoReturn:
        raise NotImplementedError(f"the Triton kernel {self.__name__} was launched, but triton is not installed here")

    def __call__(self, *_args: object, **_kwargs: object) -> NoReturn:
        self.__getitem__(())


class _Part(types.ModuleType):
    """Any submodule or value: language types, constexpr, configuration classes."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = importlib.machinery.ModuleSpec(name, _FINDER, is_package=True)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value: Any
        if name[0].isupper():
            value = type(name, (), {"__init__": lambda self, *args, **kwargs: None})
        else:
            full = f"{self.__name__}.{name}"
            value = sys.modules.get(full) or _Part(full)
            sys.modules[full] = value
        setattr(self, name, value)
        return value

    def __call__(self, *args: Any, **_kwargs: object) -> Any:
        return args[0] if args else None

    def __bool__(self) -> bool:
        return False


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(f"{__name__}."):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Part(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def jit(*args: Any, **_kwargs: Any) -> Any:
    """As a decorator with or without arguments; the others below alike."""
    if len(args) == 1 and callable(args[0]) and not isinstance(args[0], _Part):
        return args[0] if isinstance(args[0], Kernel) else Kernel(args[0])
    return jit


autotune = heuristics = jit


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(_ROOT, name)


_hide_from_torch()
_FINDER = _Finder()
sys.meta_path.insert(0, _FINDER)
_ROOT = _Part(__name__)
