"""Names of enum values that messages carry."""

from __future__ import annotations

from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper


def name(kind: EnumTypeWrapper, value: int) -> str:
    """In small letters; of a value that only a newer process knows its number."""
    try:
        return str(kind.Name(value)).lower()
    except ValueError:
        return str(value)
