"""Settings of a system, from NAME=VALUE."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isnan

from sim.system import SettingError


def numbers(system: str, settings: Mapping[str, str], known: Sequence[str]) -> dict[str, float]:
    """The settings as numbers. Raises SettingError for a name that the system does not have, and for a value that is no
    number of zero or more."""
    found: dict[str, float] = {}
    for name, text in settings.items():
        if name not in known:
            have = f"it has {', '.join(known)}" if known else "it has none"
            raise SettingError(f"{system} has no setting {name}; {have}")
        try:
            found[name] = float(text)
        except ValueError:
            found[name] = -1.0
        if isnan(found[name]) or found[name] < 0:
            raise SettingError(f"{system}: {name} has to be a number, zero or more, not {text!r}")
    return found
