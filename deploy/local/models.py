"""A catalogue made from model folders that a user names."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from loader import catalogue, checkpoint
from loader.errors import BrokenCheckpoint
from services.errors import Invalid


def named(argument: str) -> tuple[str, Path]:
    """("small", /models/small-1b) of "small=/models/small-1b"; without a name it is the folder's."""
    name, given, path = argument.rpartition("=")
    folder = Path(path).expanduser().resolve()
    return (name if given else folder.name), folder


def write_catalogue(models: Sequence[str], path: Path, dtype_bytes: int) -> None:
    """Lists the models ("PATH" or "NAME=PATH") in a catalogue file at `path`. Raises Invalid with one line for a folder
    that is no model that can be served, and for a name that cannot be or comes twice."""
    entries = [named(argument) for argument in models]
    for _, folder in entries:
        try:
            checkpoint.read(str(folder), dtype_bytes)
        except BrokenCheckpoint as error:
            raise Invalid(f"no model that can be served: {folder}: {error}") from None
    # JSON's strings are TOML's.
    path.write_text(
        "".join(f"[[model]]\nname = {json.dumps(name)}\npath = {json.dumps(str(folder))}\n" for name, folder in entries)
    )
    try:
        catalogue.read(path)
    except ValueError as error:
        raise Invalid(f"the models cannot be listed: {error}; give names as NAME=PATH") from None
