"""Floors: one longest request of each kind of KV, in whole extents."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kv_kinds.layout import BESIDE_TOKENS, KvLayout, attention, of_tokens, state, window
from loader.policy.floor import floor_bytes, kind_floor_bytes
from tests.kv_kinds.test_layout import LAYOUTS, SIZES

KIB, MIB = 1 << 10, 1 << 20
CONTEXTS = st.integers(1, 1 << 18)
EXTENTS = st.sampled_from([1, 64 * KIB, 8 * MIB])


@given(CONTEXTS, st.integers(0, 1 << 20), SIZES, EXTENTS)
def test_floor_of_attention_alone_is_of_its_tokens_in_whole_extents(
    context: int, floor: int, each: int, extent: int
) -> None:
    tokens = max(floor, context + BESIDE_TOKENS)
    assert floor_bytes(context, floor, of_tokens(each), extent) == -(-tokens * each // extent) * extent


@given(CONTEXTS, LAYOUTS, EXTENTS)
def test_floor_holds_one_longest_request_in_each_kind(context: int, layout: KvLayout, extent: int) -> None:
    for kind in layout.kinds:
        floor = kind_floor_bytes(context, 0, kind, extent)
        assert floor % extent == 0
        assert floor > kind.in_extents(extent).bytes_of(context), "with what stays empty in its pool"
    apart = sum(kind_floor_bytes(context, 0, kind, extent) for kind in layout.kinds)
    assert floor_bytes(context, 0, layout, extent) == apart


@given(CONTEXTS, LAYOUTS, EXTENTS, st.integers(1, 8))
def test_floor_of_more_tokens_holds_as_many_requests(
    context: int, layout: KvLayout, extent: int, requests: int
) -> None:
    floor = floor_bytes(context, requests * context, layout, extent)
    assert floor >= requests * layout.in_extents(extent).bytes_of(context)
    assert floor >= floor_bytes(context, 0, layout, extent)


def test_floor_of_several_kinds_is_as_computed_by_hand() -> None:
    layout = KvLayout((attention(64 * KIB), state(147 * MIB), window(16 * KIB, 1024, 2112)))
    tokens = 512 * MIB + 16 * MIB  # 8192 + 192 tokens of 64 KiB are 524 MiB: 66 extents
    states = 2 * 152 * MIB  # 147 MiB are 19 extents, and one state is for the batch's empty places
    windows = 56 * MIB  # 1024 + 2112 + 192 tokens of 16 KiB are 52 MiB: 7 extents
    assert floor_bytes(8192, 0, layout, 8 * MIB) == tokens + states + windows
