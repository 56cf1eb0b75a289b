"""The catalogue file: the models of a node, as their operator lists them.

    [[model]]
    name = "org/some-model"         # as clients call it: parts with "/" between them, of letters, digits and ._:@+-
    path = "models/some-model"      # Hugging Face folder, relative to this file
    aliases = ["some", "default"]   # further names by which clients may ask for it
    ttft_ms = 2000                  # default targets of its requests; a model without one is best effort
    tpot_ms = 100
    pinned = true                   # never evicted, its image never dropped for another's
    engine = "sglang"               # or "echo"; left out: the group's own default
    devices = 2                     # of one group, that it is spread over: 1, 2 or 4
    most_replicas = 1               # most groups that serve it at once; left out: placement's own setting
    quota_bytes = 1048576           # private memory of its engine on each device
    context_tokens = 4096           # shorter than the checkpoint's (what its rotary embedding is made for, factor
                                    # and all), to need less memory
    floor_tokens = 16384            # KV that it keeps while active; left out: as much as its longest request needs
    tool_parser = "hermes"          # how it writes calls of tools, where its template does not say
                                    # (docs/guide/openai.md)
    reasoning_parser = "qwen3"      # how it writes its reasoning, likewise; "none": it is not split off
    kv_dtype = "fp8"                # KV of one byte a value, on GPUs; left out: the type of the weights
    unverified = true               # also a class that is not in the table of docs/guide/models.md: whether it answers
                                    # rightly nobody has looked
    base = "org/base"               # it is an adapter (LoRA) of the model of that name; path is its PEFT folder, and
                                    # of the keys above it has the targets and the parsers only (docs/guide/models.md)
    task = "embed"                  # it makes embeddings, or text ("generate"), or ranks documents as well ("rerank");
                                    # left out: what sentence-transformers makes of its folder (docs/guide/openai.md)

An unknown key, an impossible value, or a name or alias given twice makes the file unusable, in one line. What a
checkpoint says is not looked at here: a broken one is an error of its model, not of the file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Literal

import pydantic

from loader.checkpoints.architectures import engine_source
from services.runtime.config import ConfigSection, FaultWithin, Listed, parse

_CHARACTERS = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]*")
_LONGEST_NAME = 200


def check_name(name: str) -> str:
    """Returns the name. Raises ValueError for one that no model can have, since not every client could ask for it at
    /v1/models/NAME: many of them leave empty parts of a path out, and resolve "." and ".."."""
    if len(name) > _LONGEST_NAME:
        raise ValueError(f"{name[:20]!r}… cannot be a model's name: it has more than {_LONGEST_NAME} characters")
    if name.startswith("/") or name.endswith("/") or "//" in name:
        raise ValueError(f"{name!r} cannot be a model's name: there is nothing before, after or between slashes")
    if not _CHARACTERS.fullmatch(name):
        raise ValueError(f"{name!r} cannot be a model's name: letters, digits and ._:/@+- after a letter or a digit")
    if {".", ".."}.intersection(name.split("/")):
        raise ValueError(f"{name!r} cannot be a model's name: '.' and '..' are no parts of one")
    return name


def _known(kind: str, *own: str) -> Callable[[str], str]:
    """A check that SGLang has a parser of that name and kind, or it is one of ours."""

    def check(name: str) -> str:
        known = engine_source.parsers(kind)
        if name and known and name not in {*known, *own}:
            raise ValueError(f"{name!r} is no parser of this SGLang; it has: {', '.join(sorted({*known, *own}))}")
        return name

    return check


def _base(name: str) -> str:
    return check_name(name) if name else name


Name = Annotated[str, pydantic.AfterValidator(check_name)]
ToolParser = Annotated[str, pydantic.AfterValidator(_known("tools"))]
ReasoningParser = Annotated[str, pydantic.AfterValidator(_known("reasoning", "none"))]
Engine = Literal["", "sglang", "echo"]
Spread = Literal[1, 2, 4]
Task = Literal["", "generate", "embed", "rerank"]
KvDtype = Literal["", "fp8"]
Milliseconds = Annotated[int, pydantic.Field(ge=0, lt=10**9)]
Tokens = Annotated[int, pydantic.Field(ge=0, lt=1 << 31)]
"""Number of tokens, bounded so that the bytes that they take fit 64 bits."""
_OF_ADAPTERS = {"name", "aliases", "path", "base", "ttft_ms", "tpot_ms", "tool_parser", "reasoning_parser"}
"""Settings that an adapter may have; all others are its base's."""


class CatalogueEntry(ConfigSection):
    """One model as the operator, or a caller of Add, describes it. A value that is zero or empty is not given."""

    name: Name
    path: Annotated[str, pydantic.StringConstraints(min_length=1)]
    ttft_ms: Milliseconds = 0
    tpot_ms: Milliseconds = 0
    pinned: bool = False
    engine: Engine = ""
    devices: Spread = 1
    most_replicas: int = pydantic.Field(default=0, ge=0, lt=1 << 31)
    quota_bytes: int | None = pydantic.Field(default=None, ge=0, lt=1 << 48)
    context_tokens: Tokens = 0
    floor_tokens: Tokens = 0
    tool_parser: ToolParser = ""
    reasoning_parser: ReasoningParser = ""
    task: Task = ""
    kv_dtype: KvDtype = ""
    unverified: bool = False
    aliases: Listed[Name] = ()
    base: Annotated[str, pydantic.AfterValidator(_base)] = ""

    @pydantic.model_validator(mode="after")
    def _adapter_has_its_bases_settings(self) -> CatalogueEntry:
        given = {name for name in self.model_fields_set if getattr(self, name) != type(self).model_fields[name].default}
        if self.base and (other := sorted(given - _OF_ADAPTERS)):
            raise ValueError(
                f"an adapter takes {', '.join(other)} from its base: leave {'them' if other[1:] else 'it'} out"
            )
        if self.base and self.base == self.name:
            raise ValueError(f"base: {self.name!r} cannot be its own base")
        return self

    @pydantic.model_validator(mode="after")
    def _floor_holds_a_request(self) -> CatalogueEntry:
        if self.floor_tokens and self.floor_tokens < self.context_tokens:
            raise ValueError(
                f"floor_tokens {self.floor_tokens} is less than one request of context_tokens {self.context_tokens}"
            )
        return self


def check_names(models: Iterable[CatalogueEntry]) -> None:
    """Raises FaultWithin, a ValueError, if a name or an alias is another's, or its own model's, too. It leads to the
    later one of both."""
    models = list(models)
    names: set[str] = set()
    for number, listed in enumerate(models):
        if listed.name in names:
            raise FaultWithin((number, "name"), f"the name {listed.name!r} is given twice")
        names.add(listed.name)
    owners: dict[str, str] = {}
    for number, listed in enumerate(models):
        for alias in listed.aliases:
            told, at = f"the alias {alias!r} of {listed.name!r}", (number, "aliases")
            if alias in names:
                raise FaultWithin(at, f"{told} is the name of a model")
            if alias in owners:
                raise FaultWithin(at, f"{told} is given twice: {owners[alias]!r} has it")
            owners[alias] = listed.name


class CatalogueFile(ConfigSection):
    """The catalogue file."""

    model: Listed[CatalogueEntry] = ()

    @pydantic.field_validator("model")
    @classmethod
    def _names_once(cls, models: Sequence[CatalogueEntry]) -> Sequence[CatalogueEntry]:
        check_names(models)
        return models


def read(path: str | os.PathLike[str]) -> tuple[CatalogueEntry, ...]:
    """The models that the file lists, with absolute paths. Raises ValueError with one line when it cannot be used."""
    path = Path(path).absolute()
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: {getattr(error, 'strerror', None) or 'not text'}") from None
    listed = parse(CatalogueFile, text, str(path)).model
    return tuple(
        model.model_copy(update={"path": os.path.normpath(path.parent / os.path.expanduser(model.path))})
        for model in listed
    )
