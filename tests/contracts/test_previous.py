"""The contracts of the version before: what changed since can be read by who knows only that one, and the other way
round.

`previous/1.0.binpb` is what protoc made of protos/ of version 1.0 (`--include_imports --descriptor_set_out`).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import grpc_tools.protoc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from services.rpc import rpc

ROOT = Path(__file__).resolve().parents[2]
PREVIOUS = Path(__file__).parent / "previous" / "1.0.binpb"
BUF = Path(sys.executable).parent / "buf"
RULES = ["WIRE", "RPC_NO_DELETE", "PACKAGE_SERVICE_NO_DELETE", "FIELD_SAME_NAME", "ENUM_VALUE_SAME_NAME"]
"""The names too: a number that means something else is a number used again."""


def breaks(now: Path, before: Path) -> str:
    """What buf finds."""
    rules = json.dumps({"version": "v2", "breaking": {"use": RULES}})
    done = subprocess.run(
        [BUF, "breaking", now, "--against", before, "--config", rules], capture_output=True, text=True, cwd=now.parent
    )
    assert done.returncode in (0, 100), done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def now(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("contracts") / "now.binpb"
    files = sorted(str(each.relative_to(ROOT)) for each in (ROOT / "protos").glob("*.proto"))
    arguments = ["protoc", f"-I{ROOT}", "--include_imports", f"--descriptor_set_out={path}", *files]
    assert grpc_tools.protoc.main(arguments) == 0
    return path


def test_the_minor_version_rises_with_the_contracts(now):
    before = descriptor_pb2.FileDescriptorSet.FromString(PREVIOUS.read_bytes())
    same = before == descriptor_pb2.FileDescriptorSet.FromString(now.read_bytes())
    major, minor = map(int, PREVIOUS.stem.split("."))
    assert rpc.PROTOCOL == (major, minor) if same else rpc.PROTOCOL > (major, minor)


def test_contracts_keep_the_numbers_types_and_names_of_the_previous_version(now):
    assert breaks(now, PREVIOUS) == ""


def test_contracts_check_finds_a_breaking_change(now, tmp_path):
    changed = descriptor_pb2.FileDescriptorSet.FromString(now.read_bytes())
    common = next(file for file in changed.file if file.name == "protos/common.proto")
    slo = next(message for message in common.message_type if message.name == "Slo")
    del slo.field[1]
    slo.field[0].number = 2
    worse = tmp_path / "worse.binpb"
    worse.write_bytes(changed.SerializeToString())
    assert 'on message "Slo"' in breaks(worse, PREVIOUS)


def pool_of(path: Path) -> descriptor_pool.DescriptorPool:
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(path.read_bytes()).file:
        pool.Add(file)
    return pool


def names_of(path: Path) -> list[str]:
    def walk(prefix, messages):
        for message in messages:
            if not message.options.map_entry:
                yield f"{prefix}.{message.name}"
                yield from walk(f"{prefix}.{message.name}", message.nested_type)

    files = descriptor_pb2.FileDescriptorSet.FromString(path.read_bytes()).file
    return [name for file in files for name in walk(file.package, file.message_type) if name.startswith("prism.")]


UNKNOWN_ENUM = 99


def fill(message, depth=3):
    """Sets every field, of a oneof the last member, enums to what nobody knows."""
    for field in message.DESCRIPTOR.fields:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            key, value = (field.message_type.fields_by_name[part] for part in ("key", "value"))
            getattr(message, field.name)[scalar(key)] = scalar(value)
        elif field.message_type is not None:
            if depth:
                child = getattr(message, field.name)
                fill(child.add() if field.is_repeated else child, depth - 1)
                if not field.is_repeated:
                    child.SetInParent()
        else:
            if field.is_repeated:
                getattr(message, field.name).append(scalar(field))
            else:
                setattr(message, field.name, scalar(field))
    return message


def scalar(field):
    texts = {field.TYPE_STRING: "x", field.TYPE_BYTES: b"x", field.TYPE_BOOL: True, field.TYPE_ENUM: UNKNOWN_ENUM}
    return texts.get(field.type, 7)


def known_part(message, descriptor):
    """What a reader of `descriptor` sees of the message, as plain values."""
    seen = {}
    for field, value in message.ListFields():
        other = descriptor.fields_by_number.get(field.number)
        if other is None:
            continue
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            seen[field.number] = dict(value) if field.message_type else list(value) if field.is_repeated else value
        else:
            each = value if field.is_repeated else [value]
            seen[field.number] = [known_part(one, other.message_type) for one in each]
    return seen


@pytest.mark.parametrize("direction", ["the new is read by the old", "the old is read by the new"])
def test_a_message_of_one_version_is_read_by_the_other_as_far_as_it_knows_the_fields(now, direction):
    writer, reader = (now, PREVIOUS) if direction == "the new is read by the old" else (PREVIOUS, now)
    writers, readers = pool_of(writer), pool_of(reader)
    common = set(names_of(now)) & set(names_of(PREVIOUS))
    assert len(common) > 100
    for name in common:
        wrote = fill(message_factory.GetMessageClass(writers.FindMessageTypeByName(name))())
        descriptor = readers.FindMessageTypeByName(name)
        read = message_factory.GetMessageClass(descriptor).FromString(wrote.SerializeToString())
        assert known_part(read, wrote.DESCRIPTOR) == known_part(wrote, descriptor), name
