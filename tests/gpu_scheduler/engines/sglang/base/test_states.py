from __future__ import annotations

import pytest

from gpu_scheduler.engines.sglang.base.errors import NotNow
from gpu_scheduler.engines.sglang.base.states import EngineState, check

LEGAL = [
    ("load", EngineState.WARM),
    ("verify", EngineState.FILLING),
    ("hibernate", EngineState.ACTIVE),
    ("wake", EngineState.HIBERNATING),
    *(("unload", state) for state in EngineState),
    *(("drain", state) for state in EngineState),
]


@pytest.mark.parametrize("state", list(EngineState))
@pytest.mark.parametrize("command", ["load", "verify", "hibernate", "wake", "unload", "drain"])
def test_engine_command_is_taken_in_its_states_and_refused_with_the_state_in_others(
    command: str, state: EngineState
) -> None:
    if (command, state) in LEGAL:
        check(command, state)
    else:
        with pytest.raises(NotNow, match=f"{command} is refused: the engine is {state.value}"):
            check(command, state)
