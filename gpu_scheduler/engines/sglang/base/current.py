"""The model instance that SGLang's code in this process belongs to: hooks are functions, so they look it up here."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpu_scheduler.engines.sglang.model.instance import Instance

_instance: Instance | None = None


def set_instance(instance: Instance | None) -> None:
    global _instance
    _instance = instance


def instance() -> Instance:
    """The instance being built or served. There is one whenever SGLang's Scheduler exists."""
    assert _instance is not None, "SGLang runs without a model of ours"
    return _instance
