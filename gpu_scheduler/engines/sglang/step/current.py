"""The model and the loop of this process, for hooks, which are functions that SGLang calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpu_scheduler.engines.sglang.base import current

if TYPE_CHECKING:
    from gpu_scheduler.engines.sglang.model.loaded_model import LoadedModel
    from gpu_scheduler.engines.sglang.step.loop import StepLoop

_loop: StepLoop | None = None


def set_loop(loop: StepLoop | None) -> None:
    """Makes this loop the current one; None: the process has no loop any more."""
    global _loop
    _loop = loop


def model() -> LoadedModel:
    """The model that is being built or served. It exists whenever SGLang's Scheduler does."""
    found: LoadedModel = current.model()
    return found


def loop() -> StepLoop:
    """The loop of the model that is being served. It exists whenever SGLang's event loop runs."""
    assert _loop is not None, "SGLang's event loop runs without ours"
    return _loop
