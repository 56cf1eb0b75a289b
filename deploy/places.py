"""Where commands read and write: in a checkout its own folders, elsewhere those of the user (XDG).

Uses the standard library alone, as `engine_packages` does.
"""

from __future__ import annotations

import os
from pathlib import Path

_DEPLOY = Path(__file__).resolve().parent
_PARENT = _DEPLOY.parent
IS_CHECKOUT = (_PARENT / "pyproject.toml").is_file()
TREE = _PARENT if IS_CHECKOUT else _DEPLOY / "shipped"
"""The files of the tree that are no code: all of them, or those that a wheel has."""


def cache() -> Path:
    """Folder of what can be made again."""
    return _PARENT / ".cache" if IS_CHECKOUT else _of_user("XDG_CACHE_HOME", ".cache")


def state() -> Path:
    """Folder of sockets, logs and generated configuration."""
    return _PARENT / ".run" if IS_CHECKOUT else _of_user("XDG_STATE_HOME", ".local/state")


def _of_user(variable: str, otherwise: str) -> Path:
    given = os.environ.get(variable, "")
    return (Path(given) if os.path.isabs(given) else Path("~").expanduser() / otherwise) / "prism"
