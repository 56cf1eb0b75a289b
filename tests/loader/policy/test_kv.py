"""Which bytes go where when KV moves."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loader.policy.kv import KvPiece, pairs

pieces = st.lists(st.builds(KvPiece, st.integers(0, 3), st.integers(0, 50), st.integers(1, 30)), max_size=8)


def bytes_of(pieces):
    return [(piece.extent, piece.offset + i) for piece in pieces for i in range(piece.nbytes)]


@given(pieces, pieces, st.integers(0, 40), st.integers(1, 20))
def test_kv_pairs_give_every_target_byte_the_source_byte_at_its_position(sources, targets, skip, chunk_bytes):
    there, room = bytes_of(sources)[skip:], bytes_of(targets)
    if len(room) > len(there):
        with pytest.raises(ValueError, match="room for more"):
            pairs(sources, targets, skip, chunk_bytes)
        return
    found = pairs(sources, targets, skip, chunk_bytes)
    moved = [
        ((p.source.extent, p.source.offset + i), (p.target.extent, p.target.offset + i))
        for p in found
        for i in range(p.nbytes)
    ]
    assert moved == list(zip(there, room, strict=False))
    assert all(0 < p.nbytes <= chunk_bytes and p.source.nbytes == p.target.nbytes for p in found)
    assert [p.source.at for p in found] == [sum(q.nbytes for q in found[:i]) for i in range(len(found))]
