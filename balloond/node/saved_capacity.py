"""The bytes of each device that could be given out before anything was.

A capacity that the configuration leaves out is measured, and measuring says nothing once engines hold memory. So it is
written down, beside the handoff socket, for as long as a process may hold some.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from balloond.driver.connection import alive
from services.telemetry import log

_log = log.get(__name__)


def read(handoff: str) -> dict[str, int]:
    """Saved capacities in bytes by device; empty if none were saved."""
    try:
        return {str(name): int(nbytes) for name, nbytes in json.loads(Path(alive.path_of(handoff)).read_text()).items()}
    except FileNotFoundError:
        return {}
    except ValueError as error:  # cut short by a crash
        _log.warning("capacities forgotten", why=str(error))
        return {}


def write(handoff: str, capacities: Mapping[str, int]) -> None:
    """Saves capacities in bytes by device. The file is rewritten in place: locks of living processes are on it."""
    Path(alive.path_of(handoff)).write_text(json.dumps(capacities))
