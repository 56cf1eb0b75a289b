"""Protobuf messages as nobody would send them: valid ones of extreme values, and bytes that are no message at all."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

_INTEGERS = (0, 1, -1, 2, 3, 64, 1000, 1 << 16, 1 << 20, 1 << 31, (1 << 53) + 1, (1 << 63) - 1, -(1 << 63))
_SMALL = (0, 1, -1, 2, 7, (1 << 31) - 1, -(1 << 31))
_FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e308, -1e308, 5e-324, math.inf, -math.inf, math.nan)
_TEXTS = ("", "a", "\0", "\n", "%s{}", "../../etc/passwd", "😀" * 50, "x" * 5000, "\u202e\ufeff", "unix:/nowhere.sock")
_DEEPEST = 4
_T = FieldDescriptor
_BOUNDS = {_T.CPPTYPE_INT32: (-(1 << 31), (1 << 31) - 1), _T.CPPTYPE_UINT32: (0, (1 << 32) - 1)}


class Mutator:
    """Draws from `draw`; `words` are, by name of a field, values that mean something to who is asked."""

    def __init__(self, draw: random.Random, words: Mapping[str, Sequence[Any]] | None = None) -> None:
        self.draw = draw
        self.words = dict(words or {})
        self.repeated = 2000
        """Elements of a repeated field that is to be long."""

    def with_words(self, **words: Sequence[Any]) -> Mutator:
        """The same draws, with other words for some fields."""
        return Mutator(self.draw, {**self.words, **words})

    # --- valid messages

    def message(self, kind: type[Message], depth: int = 0) -> Message:
        """Any of the fields, with any values that the type allows."""
        made = kind()
        density = self.draw.choice((0.3, 0.7, 1.0))
        for field in made.DESCRIPTOR.fields:
            if self.draw.random() < density and not (depth >= _DEEPEST and field.message_type):
                self._fill(made, field, depth)
        return made

    def _fill(self, made: Message, field: FieldDescriptor, depth: int) -> None:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            self._fill_map(getattr(made, field.name), field.message_type, depth)
        elif field.is_repeated:
            into = getattr(made, field.name)
            for _ in range(self._length(field)):
                if field.message_type is not None:
                    into.add().MergeFrom(self.message(GetMessageClass(field.message_type), depth + 1))
                else:
                    into.append(self._value(field))
        elif field.message_type is not None:
            getattr(made, field.name).MergeFrom(self.message(GetMessageClass(field.message_type), depth + 1))
        else:
            setattr(made, field.name, self._value(field))

    def _fill_map(self, into: Any, entry: Descriptor, depth: int) -> None:
        key, value = entry.fields_by_name["key"], entry.fields_by_name["value"]
        for _ in range(self.draw.randrange(4)):
            if value.message_type is not None:
                into[self._value(key)].MergeFrom(self.message(GetMessageClass(value.message_type), depth + 1))
            else:
                into[self._value(key)] = self._value(value)

    def _length(self, field: FieldDescriptor) -> int:
        if field.message_type is None and self.draw.random() < 0.02:
            return self.repeated
        return self.draw.randrange(4)

    def _value(self, field: FieldDescriptor) -> Any:
        kind = field.cpp_type
        if (known_words := self.words.get(field.name)) and self.draw.random() < 0.8:
            word = self.draw.choice(known_words)
            if isinstance(word, str) == (kind == _T.CPPTYPE_STRING):
                return word
        if kind == _T.CPPTYPE_BOOL:
            return self.draw.random() < 0.5
        if kind == _T.CPPTYPE_ENUM:
            known = [value.number for value in field.enum_type.values]
            return self.draw.choice([*known, *known, *known, 77, -1])
        if kind in (_T.CPPTYPE_DOUBLE, _T.CPPTYPE_FLOAT):
            return self.draw.choice(_FLOATS) if self.draw.random() < 0.7 else self.draw.uniform(-10, 10)
        if kind == _T.CPPTYPE_STRING:
            if field.type == _T.TYPE_BYTES:
                return self.draw.randbytes(self.draw.choice((0, 1, 16, 4096)))
            return self.draw.choice(_TEXTS)
        low, high = _BOUNDS.get(kind, (-(1 << 63), (1 << 63) - 1))
        if self.draw.random() < 0.3:
            return self.draw.choice(_SMALL) if low < 0 else self.draw.randrange(8)
        return min(high, max(low, self.draw.choice(_INTEGERS)))

    # --- bytes

    def wire(self, kind: type[Message]) -> bytes:
        """What goes over a socket in place of a message of that kind: mostly one, often a broken one."""
        how = self.draw.randrange(11)
        if how == 0:
            return self.draw.randbytes(self.draw.choice((0, 1, 2, 5, 40, 1000)))
        # Not deterministic in the order of maps; what is drawn is.
        data = self.message(kind).SerializeToString(deterministic=True)
        if how <= 6:
            return data
        if how == 7:
            return data[: self.draw.randrange(len(data) + 1)]
        if how == 8:
            return data + self._unknown_field()
        if how == 9:
            return self._flipped(data)
        return data + self._bad_text(kind.DESCRIPTOR)

    def _flipped(self, data: bytes) -> bytes:
        changed = bytearray(data)
        for _ in range(self.draw.randrange(1, 5) if changed else 0):
            changed[self.draw.randrange(len(changed))] ^= 1 << self.draw.randrange(8)
        return bytes(changed)

    def _unknown_field(self) -> bytes:
        number = self.draw.choice((99, 1000, 19_000, (1 << 29) - 1))
        kind = self.draw.choice((0, 1, 2, 5))
        body = {0: b"\xff" * 9 + b"\x01", 1: b"\0" * 8, 2: b"\x03abc", 5: b"\0" * 4}[kind]
        return varint(number << 3 | kind) + body

    def _bad_text(self, kind: Descriptor) -> bytes:
        """A string that is no UTF-8, or a length that nothing follows."""
        texts = [field.number for field in kind.fields if field.cpp_type == _T.CPPTYPE_STRING] or [1]
        tag = varint(self.draw.choice(texts) << 3 | 2)
        return tag + self.draw.choice((b"\x02\xff\xfe", b"\xff\xff\xff\xff\x07", b"\x03\xed\xa0\x80"))


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])
