"""API keys: what their file says.

A key is 256 random bits, and the file has its SHA-256. A slow hash protects what people think up, by making each
guess dear; of these nobody can try a part that matters, and a slow hash would only make every request slow.
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

from services.runtime.config import ConfigSection, Fault, faults
from services.wording.toml_lines import line_of

_PREFIX = "sk-prism-"
"""By which scanners for leaked secrets, and people, know a key."""
_SHOWN = len("sha256:") + 8
"""Characters of a hash by which keys are told apart before they are compared: what the time of a look-up could tell
of them leads to no key."""


class Key(ConfigSection):
    """What the bearer of one key may do."""

    name: str = Field(min_length=1, max_length=64, pattern=r"^[\w.@-]+$")
    """Who: in logs and errors, never the key itself."""
    hash: str = Field(pattern=r"^sha256:[0-9a-f]{64}$")
    models: tuple[str, ...] = ("*",)
    """Names, or patterns of names as a shell has them."""
    requests_per_minute: int | None = Field(None, ge=1)
    tokens_per_minute: int | None = Field(None, ge=1)
    """Of prompts and answers together."""
    in_flight: int | None = Field(None, ge=1)
    """Answers being made or waited for at once, at each gateway."""
    admin: bool = False
    """Also /metrics and /ui."""

    def may_use(self, model: str) -> bool:
        return any(fnmatch.fnmatchcase(model, pattern) for pattern in self.models)


class KeysFile(ConfigSection):
    """One `[[key]]` each."""

    key: tuple[Key, ...] = ()


class Keys:
    """All keys, found by what their bearers send."""

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
    """A key that nobody has."""
    return _PREFIX + secrets.token_urlsafe(32)


def digest(secret: str) -> str:
    """As the file has it."""
    return "sha256:" + hashlib.sha256(secret.encode()).hexdigest()


def load(path: str) -> Keys:
    """Raises OSError, or ValueError with one line that names file, line and key of the first fault."""
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
        found = faults(error)
    if found:
        line = line_of(text, found[0].at)
        raise ValueError(": ".join((f"{path}:{line}" if line else path, found[0].key, found[0].what)))
    return Keys(file.key)


def repeated(file: KeysFile) -> list[Fault]:
    """Names say whose use is counted and hashes who it is: one each."""
    found = []
    for field in ("name", "hash"):
        seen: set[str] = set()
        for number, key in enumerate(file.key):
            value = getattr(key, field)
            if value in seen:
                found.append(Fault(("key", number, field), f"{value} is there twice"))
            seen.add(value)
    return found
