"""Names of enum values that messages carry."""

from __future__ import annotations

from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper


def name(kind: EnumTypeWrapper, value: int) -> str:
    """The value's name in small letters; the number of a value that only a newer process knows."""
    try:
        return str(kind.Name(value)).lower()
    except ValueError:
        return str(value)
