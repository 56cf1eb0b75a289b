"""What there was to give out of each device when nothing was given out yet.

A capacity that the configuration leaves out is measured, and measuring says nothing once engines hold memory. So it is
written down, beside the handoff socket, for as long as anybody may hold some.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from balloond.driver import alive
from services.telemetry import log

_log = log.get(__name__)


def read(handoff: str) -> dict[str, int]:
    """Bytes by device; empty when nothing was written."""
    try:
        return {str(name): int(nbytes) for name, nbytes in json.loads(Path(alive.path_of(handoff)).read_text()).items()}
    except FileNotFoundError:
        return {}
    except ValueError as error:  # cut short by a crash
        _log.warning("capacities forgotten", why=str(error))
        return {}


def write(handoff: str, capacities: Mapping[str, int]) -> None:
    """In place: locks of living processes are on this very file."""
    Path(alive.path_of(handoff)).write_text(json.dumps(capacities))
