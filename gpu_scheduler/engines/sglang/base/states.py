"""The states of an engine process and the states that each command is allowed in. Pure."""

from __future__ import annotations

from enum import Enum

from gpu_scheduler.engines.sglang.base.errors import NotNow


class EngineState(Enum):
    """State of the process; its value is the text used in error messages."""

    WARM = "warm, no model"
    FILLING = "waiting for the weights"
    """Weights are mapped, after Load from an image or after Wake, and Verify comes when they are filled."""
    PROVING = "verifying"
    """The probe runs, requests of the engine's own that prove the model."""
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
    """Raises NotNow, with one line, when `command` is not allowed in `state`."""
    if state not in _ALLOWED[command]:
        raise NotNow(f"{command} is refused: the engine is {state.value}")
