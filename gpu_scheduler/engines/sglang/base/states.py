"""The states of an engine process and which command may come in which. Pure."""

from __future__ import annotations

from enum import Enum

from gpu_scheduler.engines.sglang.base.errors import NotNow


class EngineState(Enum):
    WARM = "warm, no model"
    FILLING = "waiting for the weights"
    """Weights mapped after Load from an image or after Wake; Verify comes when they are filled."""
    PROVING = "verifying"
    """The probe runs."""
    ACTIVE = "active"
    HIBERNATING = "hibernating"


_ALLOWED = {
    "load": {EngineState.WARM},
    "verify": {EngineState.FILLING},
    "hibernate": {EngineState.ACTIVE},
    "wake": {EngineState.HIBERNATING},
    "unload": set(EngineState),
    "drain": set(EngineState),
    "export_kv": {EngineState.ACTIVE},
    "import_kv": {EngineState.ACTIVE},
    "imported_kv": {EngineState.ACTIVE},
}


def check(command: str, state: EngineState) -> None:
    """Raises NotNow, in one line, when `command` makes no sense in `state`."""
    if state not in _ALLOWED[command]:
        raise NotNow(f"{command} is refused: the engine is {state.value}")
