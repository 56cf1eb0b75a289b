"""The type of a hook on SGLang."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Hook:
    """One hook on SGLang, as its registry takes it."""

    target: str
    """Full name of the function or method that is hooked."""
    function: Callable[..., Any]
    """Our function, called with the target's arguments; before these AROUND gets the original function, AFTER the
    result."""
    kind: str
    """Name of one of SGLang's HookType: BEFORE, AFTER, AROUND or REPLACE."""
