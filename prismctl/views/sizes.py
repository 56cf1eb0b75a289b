"""Bytes as people write them."""

from __future__ import annotations

import re

import typer

_SIZE = re.compile(r"^(\d+(?:\.\d+)?)\s*([KMG]i?B?|B)?$", re.IGNORECASE)
_MOST = 1 << 60


def parse_size(text: str, none: bool = False) -> int:
    """Number of bytes in "12MiB", "1.5g" or "4096"; -1 for "none", if `none` allows that. Raises BadParameter."""
    if none and text.lower() in ("none", "-1"):
        return -1
    match = _SIZE.match(text.strip())
    if match is None:
        raise typer.BadParameter(f"{text!r} is no size; write 12MiB, 1.5GiB{', 4096 or none' if none else ' or 4096'}")
    power = {"": 0, "b": 0, "k": 1, "m": 2, "g": 3}[(match[2] or "")[:1].lower()]
    count = float(match[1]) * 1024**power
    if count >= _MOST:
        raise typer.BadParameter(f"{text!r} is more than any machine has")
    return int(count)
