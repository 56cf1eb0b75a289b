"""Records for the keeper of what calls changed in the catalogue; they bring it back after this process has died. The
operator's file has no part in them.

Each record has the number of its change (AddRequest.change); the record of a name that was removed has no listing.
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
    """The entry that was added; None: the name was removed."""


def record_id(model: str) -> str:
    return f"{KIND}/{model}"


def record(called: AddedModel) -> keeper_pb2.Record:
    # Settings that were not given are left out: a loader of an older version knows fewer, and forgets a record that has
    # others.
    listed = {} if called.listed is None else called.listed.model_dump(exclude_defaults=True)
    detail = json.dumps({"name": called.name, "change": called.change, **listed}).encode()
    return keeper_pb2.Record(id=record_id(called.name), owner=OWNER, kind=KIND, detail=detail)


def restore(kept: keeper_pb2.Record) -> AddedModel:
    """The change that a record holds. Raises ValueError for a record that this version does not understand."""
    try:
        detail = json.loads(kept.detail)
        change = int(detail.pop("change", 1))  # records from before changes had numbers have none
        listed = None if detail.keys() == {"name"} else CatalogueEntry.model_validate(detail)
        return AddedModel(str(detail["name"]), change, listed)
    except pydantic.ValidationError as error:
        raise ValueError(f"{kept.id}: {error.error_count()} fields not understood") from None
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ValueError(f"{kept.id}: not understood") from None
