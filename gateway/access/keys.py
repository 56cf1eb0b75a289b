"""API keys, as their file lists them.

A key is 256 random bits, and the file has its SHA-256. A slow hash protects secrets that people think up, by making
each guess expensive; no client could try a relevant share of 256 random bits, and a slow hash would only make every
request slow.
"""

from __future__ import annotations

import fnmatch
import hashlib
import hmac
import secrets
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pydantic
from pydantic import Field

from services.runtime.config import ConfigSection, Fault, Listed, faults
from services.wording.toml_lines import line_of

_PREFIX = "sk-prism-"
"""Prefix by which scanners for leaked secrets, and people, recognize a key."""
_SHOWN = len("sha256:") + 8
"""Number of characters of a hash by which keys are found before they are compared: what the time of a look-up could
reveal about these leads to no key."""


class Key(ConfigSection):
    """The rights of the bearer of one key."""

    name: str = Field(min_length=1, max_length=64, pattern=r"^[\w.@-]+$")
    """Name of the bearer, which logs and errors show instead of the key."""
    hash: str = Field(pattern=r"^sha256:[0-9a-f]{64}$")
    models: Listed[str] = ("*",)
    """Names of models, or patterns of names as a shell has them; and aliases, which no pattern stands for."""
    requests_per_minute: int | None = Field(None, ge=1)
    tokens_per_minute: int | None = Field(None, ge=1)
    """Tokens of prompts and answers together."""
    in_flight: int | None = Field(None, ge=1)
    """The most answers being made or waited for at once, at each gateway."""
    admin: bool = False
    """Whether the bearer may also see /metrics and /ui, and steer the models that it may use."""

    def may_use(self, model: str, alias: str = "") -> bool:
        """Whether the bearer may ask for a model, by its name or by an alias. Who may use a model may do so by all its
        names. An alias that is listed opens no other name; and a pattern stands for names only, because an alias may
        have a name that others' patterns were not meant for."""
        return any(fnmatch.fnmatchcase(model, pattern) for pattern in self.models) or (
            bool(alias) and alias in self.models
        )


class KeysFile(ConfigSection):
    """The file of keys, with one `[[key]]` for each."""

    key: Listed[Key] = ()


class Keys:
    """All keys, found by the secrets that their bearers send."""

    def __init__(self, keys: Sequence[Key]) -> None:
        self._by_start: dict[str, list[Key]] = {}
        for key in keys:
            self._by_start.setdefault(key.hash[:_SHOWN], []).append(key)

    def find(self, secret: str) -> Key | None:
        wanted = digest(secret)
        for key in self._by_start.get(wanted[:_SHOWN], ()):
            if hmac.compare_digest(key.hash, wanted):
                return key
        return None


def new() -> str:
    """A new random key."""
    return _PREFIX + secrets.token_urlsafe(32)


def digest(secret: str) -> str:
    """Hash of a key as the file has it."""
    return "sha256:" + hashlib.sha256(secret.encode()).hexdigest()


def load(path: str) -> Keys:
    """The keys of the file. Raises OSError, or ValueError with one line that names file, line and key of the first
    fault."""
    try:
        text = Path(path).read_text()
        values = tomllib.loads(text)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not text: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: not TOML: {error}") from None
    except RecursionError:
        raise ValueError(f"{path}: nested too deeply") from None
    try:
        file = KeysFile.model_validate(values)
        found = repeated(file)
    except pydantic.ValidationError as error:
        found = faults(error, KeysFile)
    if found:
        line = line_of(text, found[0].at)
        raise ValueError(": ".join((f"{path}:{line}" if line else path, found[0].key, found[0].what)))
    return Keys(file.key)


def repeated(file: KeysFile) -> list[Fault]:
    """Faults for names and hashes that are there more than once: use is counted by name, and bearers are found by
    hash."""
    found = []
    for field in ("name", "hash"):
        seen: set[str] = set()
        for number, key in enumerate(file.key):
            value = getattr(key, field)
            if value in seen:
                found.append(Fault(("key", number, field), f"{value} is there twice"))
            seen.add(value)
    return found
