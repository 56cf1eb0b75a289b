"""What nodes tell each other needs no clock that agrees."""

import importlib
from pathlib import Path

import protos

FILES = [importlib.import_module(f"protos.{path.stem}") for path in Path(protos.__file__).parent.glob("*_pb2.py")]
OF_A_MOMENT = {"time", "timestamp", "at", "deadline", "epoch", "date", "clock", "when", "expires", "created"}
"""Last words of names; those of durations end with their unit."""


def fields(message):
    yield from message.fields
    for nested in message.nested_types:
        yield from fields(nested)


def of_a_moment(field):
    stamp = field.message_type is not None and field.message_type.full_name.startswith("google.protobuf.Timestamp")
    return stamp or field.name.split("_")[-1] in OF_A_MOMENT


def test_messages_between_nodes_carry_no_point_in_time():
    assert FILES
    found = [field for file in FILES for m in file.DESCRIPTOR.message_types_by_name.values() for field in fields(m)]
    assert len(found) > 200
    assert [field.full_name for field in found if of_a_moment(field)] == []
