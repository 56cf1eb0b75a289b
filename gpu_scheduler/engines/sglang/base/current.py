"""The model of this process, for code that SGLang calls without passing an object of ours: its loaders, its pools.

Hooks find it with its type in `step/current.py`.
"""

from __future__ import annotations

from typing import Any

_model: Any = None


def set_model(model: Any) -> None:
    """Makes a `model.loaded_model.LoadedModel` the current one; None: the process has no model any more."""
    global _model
    _model = model


def model() -> Any:
    """The `model.loaded_model.LoadedModel` that is built or served. It is set whenever SGLang's Scheduler exists."""
    assert _model is not None, "SGLang runs without a model of ours"
    return _model
