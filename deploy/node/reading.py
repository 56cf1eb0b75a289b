"""Reads a description from its file."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from pathlib import Path

import pydantic

from deploy.node.description import NodeDescription
from deploy.node.targets import RenderTarget, described_faults
from services.errors import Invalid
from services.runtime.config import Fault, faults
from services.wording.toml_lines import line_of


def read(path: Path, target: RenderTarget) -> NodeDescription:
    """The description, with absolute paths. Raises Invalid with a line for each thing that is wrong with it for this
    target: file, line, key."""
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
    try:
        node = NodeDescription.model_validate(values).placed(path.absolute().parent)
        found = described_faults(node, target)
    except pydantic.ValidationError as error:
        found = faults(error, NodeDescription)
    if found:
        raise Invalid("\n".join(_told(path, text, found)))
    return node


def _told(path: Path, text: str, found: Iterable[Fault]) -> Iterable[str]:
    for fault in found:
        line = line_of(text, fault.at)
        place = f"{path}:{line}" if line else str(path)
        yield ": ".join([place, *([fault.key] if fault.at else ()), fault.what])
