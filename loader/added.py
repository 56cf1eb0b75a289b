"""The records of models that were added by calls, for the keeper: what brings them back after this process has died.
The operator's file has no part in them."""

from __future__ import annotations

import pydantic

from loader.catalogue import Listed
from loader.image_memory import OWNER
from protos import keeper_pb2

KIND = "model"


def record_id(model: str) -> str:
    return f"{KIND}/{model}"


def record(listed: Listed) -> keeper_pb2.Record:
    return keeper_pb2.Record(
        id=record_id(listed.name), owner=OWNER, kind=KIND, detail=listed.model_dump_json().encode()
    )


def restore(kept: keeper_pb2.Record) -> Listed:
    """Raises ValueError when it is not one of this version's."""
    try:
        return Listed.model_validate_json(kept.detail)
    except pydantic.ValidationError as error:
        raise ValueError(f"{kept.id}: {error.error_count()} fields not understood") from None
