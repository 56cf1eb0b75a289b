"""The states of an engine process and which command may come in which. Pure."""

from __future__ import annotations

from enum import Enum

from gpu_scheduler.engines.sglang.base.errors import NotNow


class State(Enum):
    WARM = "warm, no model"
    FILLING = "waiting for the weights"
    """Weights mapped after Load from an image or after Wake; Verify comes when they are filled."""
    PROVING = "verifying"
    """The probe runs."""
    ACTIVE = "active"
    HIBERNATING = "hibernating"


_ALLOWED = {
    "load": {State.WARM},
    "verify": {State.FILLING},
    "hibernate": {State.ACTIVE},
    "wake": {State.HIBERNATING},
    "unload": set(State),
    "drain": set(State),
    "export_kv": {State.ACTIVE},
    "import_kv": {State.ACTIVE},
    "imported_kv": {State.ACTIVE},
}


def check(command: str, state: State) -> None:
    """Raises NotNow, in one line, when `command` makes no sense in `state`."""
    if state not in _ALLOWED[command]:
        raise NotNow(f"{command} is refused: the engine is {state.value}")
