"""Where answers go."""

from __future__ import annotations

import json
import os
import shutil
import sys
from typing import Any

import typer


def show_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, allow_nan=True))


def width() -> int:
    """Of the terminal. What reads a pipe does not wrap lines."""
    known = sys.stdout.isatty() or "COLUMNS" in os.environ
    return shutil.get_terminal_size().columns if known else sys.maxsize
