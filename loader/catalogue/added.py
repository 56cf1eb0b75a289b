"""The records of what calls changed in the catalogue, for the keeper: what brings it back after this process has died.
The operator's file has no part in them.

Each has the number of its change (AddRequest.change); one of a name that was removed has no listing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import pydantic

from loader.catalogue.catalogue import CatalogueEntry
from loader.keeping import OWNER
from protos import keeper_pb2

KIND = "model"


@dataclass(frozen=True)
class AddedModel:
    """The last change of a name by a call."""

    name: str
    change: int
    listed: CatalogueEntry | None
    """None: it was removed."""


def record_id(model: str) -> str:
    return f"{KIND}/{model}"


def record(called: AddedModel) -> keeper_pb2.Record:
    # Without what was not given: a loader of an older version knows fewer settings, and forgets what it does not know.
    listed = {} if called.listed is None else called.listed.model_dump(exclude_defaults=True)
    detail = json.dumps({"name": called.name, "change": called.change, **listed}).encode()
    return keeper_pb2.Record(id=record_id(called.name), owner=OWNER, kind=KIND, detail=detail)


def restore(kept: keeper_pb2.Record) -> AddedModel:
    """Raises ValueError when it is not one of this version's."""
    try:
        detail = json.loads(kept.detail)
        change = int(detail.pop("change", 1))  # before changes had numbers, there was none
        listed = None if detail.keys() == {"name"} else CatalogueEntry.model_validate(detail)
        return AddedModel(str(detail["name"]), change, listed)
    except pydantic.ValidationError as error:
        raise ValueError(f"{kept.id}: {error.error_count()} fields not understood") from None
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ValueError(f"{kept.id}: not understood") from None
