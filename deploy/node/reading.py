"""Reads a description from its file."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pydantic

from deploy.node.consistency import SERVICES
from deploy.node.description import TABLES, NodeDescription
from deploy.node.targets import RenderTarget, described_faults
from services.errors import Invalid
from services.runtime.config import Fault, faults, filled, without_removed
from services.wording.toml_lines import line_of


def read(path: Path, target: RenderTarget, warn: Callable[[str], object] = lambda line: None) -> NodeDescription:
    """The description, with absolute paths. Calls `warn` with a line for each setting that was removed from a service,
    and leaves those out. Raises Invalid with a line for each thing that is wrong with it for this target: file, line,
    key."""
    try:
        text = path.read_text()
        values = tomllib.loads(text)
    except OSError as error:
        raise Invalid(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise Invalid(f"{path}: not text: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise Invalid(f"{path}: not TOML: {error}") from None
    except RecursionError:
        raise Invalid(f"{path}: nested too deeply") from None
    found: list[Fault] = []
    values, removed = _without_removed(values)
    for line in _told(path, text, removed):
        warn(line)
    if target.on_this_machine:  # the others' services fill variables in where they run
        values, found = _filled(values)
    node, more = _checked(values, path.absolute().parent, target)
    if found := [*found, *more]:
        raise Invalid("\n".join(_told(path, text, found)))
    return node


def _without_removed(values: dict[str, Any]) -> tuple[dict[str, Any], list[Fault]]:
    """The values without settings that were removed from services, and a warning for each of these."""
    kept, found = dict(values), []
    for kind, table in TABLES.items():
        if isinstance(settings := values.get(table), dict):
            kept[table], more = without_removed(SERVICES[kind], settings, (table,))
            found += more
    return kept, found


def _filled(values: dict[str, Any]) -> tuple[dict[str, Any], list[Fault]]:
    """The values with the environment's variables filled in, and a fault for each key with one that is not set."""
    whole, found = {}, []
    for key, value in values.items():
        try:
            whole[key] = filled(value, os.environ)
        except KeyError as error:
            found.append(Fault((key,), f"{error.args[0]} is not set in the environment"))
    return whole, found


def _checked(values: dict[str, Any], folder: Path, target: RenderTarget) -> tuple[NodeDescription, list[Fault]]:
    """The description in a file of this folder, and its faults. Keys that cannot be understood are left out of it, so
    that faults of services' tables are found as well."""
    try:
        node = NodeDescription.model_validate(values).placed(folder)
    except pydantic.ValidationError as error:
        found = faults(error, NodeDescription)
        bad = {fault.at[0] for fault in found if fault.at}
        if not bad.intersection(values):
            raise AssertionError(f"no key of the file is at fault: {found}") from error
        node, more = _checked({key: value for key, value in values.items() if key not in bad}, folder, target)
        return node, [*found, *(fault for fault in more if fault.at and fault.at[0] in TABLES.values())]
    return node, described_faults(node, target)


def _told(path: Path, text: str, found: Iterable[Fault]) -> Iterable[str]:
    for fault in found:
        line = line_of(text, fault.at)
        place = f"{path}:{line}" if line else str(path)
        yield ": ".join([place, *([fault.key] if fault.at else ()), fault.what])
