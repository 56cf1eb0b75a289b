"""Kinds of KV in messages, also of processes that know a number of bytes alone."""

from __future__ import annotations

import pytest
from hypothesis import given

from kv_kinds import messages
from kv_kinds.layout import KvLayout, of_tokens
from protos import common_pb2, engine_pb2, gpu_scheduler_pb2
from tests.kv_kinds.test_layout import LAYOUTS

MESSAGES = [common_pb2.ModelSpec, engine_pb2.Measured, gpu_scheduler_pb2.Resident]


@given(LAYOUTS)
def test_layout_comes_out_of_every_message_as_it_went_in(layout: KvLayout) -> None:
    for message in MESSAGES:
        sent = message(kv_kinds=messages.kinds(layout), kv_bytes_per_token=0)
        assert messages.layout(message.FromString(sent.SerializeToString())) == layout


@pytest.mark.parametrize("message", MESSAGES)
def test_message_of_an_older_process_has_attention_alone(message: type[common_pb2.ModelSpec]) -> None:
    assert messages.layout(message(kv_bytes_per_token=256)) == of_tokens(256)
    assert messages.layout(message()) == KvLayout()


def test_message_with_a_kind_of_a_later_version_is_counted_by_its_numbers() -> None:
    found = messages.layout(common_pb2.ModelSpec(kv_kinds=[common_pb2.KvKind(name="sums", bytes_per_token=3)]))
    assert found.bytes_of(10) == 30 and found.kinds[0].name == "sums"


def test_message_with_a_size_that_no_kind_has_is_refused() -> None:
    with pytest.raises(ValueError, match="below zero"):
        messages.layout(common_pb2.ModelSpec(kv_bytes_per_token=-1))
    with pytest.raises(ValueError, match="'sums' has bytes for each token or for each state"):
        messages.layout(common_pb2.ModelSpec(kv_kinds=[common_pb2.KvKind(name="sums")]))
