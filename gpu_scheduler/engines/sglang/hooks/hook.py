"""One hook on SGLang."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Hook:
    """`kind` is one of SGLang's HookType names."""

    target: str
    function: Callable[..., Any]
    kind: str
