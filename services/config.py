"""Configuration: one TOML file a service, checked by a schema. An unknown key or an impossible value refuses to
start, in one line."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

import pydantic


class Section(pydantic.BaseModel):
    """A part of a configuration: immutable, and unknown keys are errors."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")


class Config(Section):
    """What every service has."""

    name: str
    """How the process calls itself in logs and metrics."""
    listen: str
    """gRPC address: "unix:/run/prism/balloond.sock" or "host:port"."""
    metrics: str = ""
    """Prometheus text over HTTP, "host:port"; empty: off."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["auto", "json", "text"] = "auto"
    """"auto": text on a terminal, JSON lines otherwise."""
    drain_s: float = pydantic.Field(default=10.0, ge=0)
    """How long a stop waits for what is under way."""


C = TypeVar("C", bound=pydantic.BaseModel)


def parse(kind: type[C], text: str, source: str) -> C:
    """Checks `text` (TOML) against `kind`. Raises ValueError with one line that names `source`, the key and the
    problem."""
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{source}: not TOML: {error}") from None
    try:
        return kind.model_validate(values)
    except pydantic.ValidationError as error:
        raise ValueError(f"{source}: " + "; ".join(f"{fault.key}: {fault.what}" for fault in faults(error))) from None


class Fault(NamedTuple):
    """What is wrong with a configuration, and where: keys, and numbers in arrays, from the outermost on."""

    at: tuple[str | int, ...]
    what: str

    @property
    def key(self) -> str:
        return ".".join(str(part) for part in self.at) or "(file)"


def faults(error: pydantic.ValidationError) -> list[Fault]:
    """All of them."""
    return [
        Fault(problem["loc"], "unknown key" if problem["type"] == "extra_forbidden" else problem["msg"])
        for problem in error.errors()
    ]


def load(kind: type[C], path: str | os.PathLike[str]) -> C:
    """Reads and checks the configuration file of a service; ends the process with one line when it cannot be used."""
    try:
        text = Path(path).read_text()
    except OSError as error:
        raise SystemExit(f"{path}: {error.strerror}") from None
    try:
        return parse(kind, text, str(path))
    except ValueError as error:
        raise SystemExit(str(error)) from None
