"""Names of models of the Hugging Face hub: ORG/NAME, or ORG/NAME@REVISION."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from services.errors import Invalid

DEFAULT_REVISION = "main"
_PREFIX = "hf://"
_NAME = re.compile(r"(?P<repository>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w./-]+))?", re.ASCII)
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)://", re.IGNORECASE)


@dataclass(frozen=True)
class HubModel:
    """A model of the hub."""

    repository: str
    """ORG/NAME."""
    revision: str = DEFAULT_REVISION
    """A branch, a tag or a commit."""

    def __str__(self) -> str:
        return self.repository if self.revision == DEFAULT_REVISION else f"{self.repository}@{self.revision}"


def parse(text: str) -> HubModel | None:
    """The model that a text names; None if it has no such form. Raises Invalid for an address of another kind."""
    found = _NAME.fullmatch(text.removeprefix(_PREFIX))
    if found is not None:
        return HubModel(found["repository"], found["revision"] or DEFAULT_REVISION)
    if (scheme := _SCHEME.match(text)) is not None:
        hint = ": copy the folder here first (aws s3 sync)" if scheme[1].lower() == "s3" else ""
        raise Invalid(
            f"{text}: {scheme[1]}:// is not supported{hint}; a model is a folder, or ORG/NAME of the Hugging Face hub"
        )
    return None


def of_argument(argument: str) -> tuple[str, HubModel] | None:
    """The name to serve it under and the model, in "ORG/NAME" or "NAME=ORG/NAME"; the first is its own name.
    None if the argument means a folder, as one that exists always does. Raises Invalid as `parse` does."""
    if os.path.exists(os.path.expanduser(argument)):
        return None
    name, given, rest = argument.partition("=")
    text = rest if given else argument
    if os.path.exists(os.path.expanduser(text)) or (model := parse(text)) is None:
        return None
    return (name if given else model.repository), model
