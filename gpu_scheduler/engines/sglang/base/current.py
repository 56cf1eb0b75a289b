"""The model of this process, for code that SGLang calls without passing an object of ours: its loaders, its pools.

Hooks find it with its type in `step/current.py`.
"""

from __future__ import annotations

from typing import Any

_instance: Any = None


def set_instance(instance: Any) -> None:
    """Makes a `model.instance.Instance` the current one; None: the process has no model any more."""
    global _instance
    _instance = instance


def instance() -> Any:
    """The `model.instance.Instance` that is being built or served. It is set whenever SGLang's Scheduler exists."""
    assert _instance is not None, "SGLang runs without a model of ours"
    return _instance
