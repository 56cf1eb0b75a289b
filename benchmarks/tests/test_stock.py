"""Unmodified SGLang behind our socket: what the comparisons compare with has to answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.gpu import fleet, shapes
from benchmarks.gpu.fleet import Model
from protos import common_pb2

pytestmark = pytest.mark.sglang


async def test_sglang_behind_our_socket_answers(tmp_path: Path) -> None:
    model = Model(shapes.write(tmp_path / "tiny", "tiny"), "cpu:0", 256, {"random_weights": 1})
    client = await fleet.reference("stock", model, 2048)
    try:
        replies = [client.ask([5 + number] * 20, 8) for number in range(4)]
        await client.quiet(60.0)
        assert [(reply.finish, len(reply.tokens), reply.error) for reply in replies] == [(common_pb2.LENGTH, 8, "")] * 4
    finally:
        await fleet.stop([client])
