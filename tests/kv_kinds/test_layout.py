"""Kinds of KV: what a request needs of each, and of all together."""

from __future__ import annotations

import sys
from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_kinds.layout import KvKind, KvLayout, attention, latent, of_tokens, state, window

KIB, MIB = 1 << 10, 1 << 20
TOKENS = st.integers(0, 1 << 20)
SIZES = st.integers(1, 1 << 24)
KINDS = st.one_of(
    st.builds(attention, SIZES),
    st.builds(latent, SIZES),
    st.builds(window, SIZES, st.integers(1, 1 << 15), st.integers(0, 1 << 13)),
    st.builds(state, SIZES, st.integers(1, 4)),
)
LAYOUTS = st.lists(KINDS, max_size=4).map(lambda kinds: KvLayout(tuple(kinds)))


@given(st.integers(1, 1 << 24), TOKENS)
def test_layout_of_one_attention_kind_needs_its_bytes_for_each_token(each: int, tokens: int) -> None:
    layout = of_tokens(each)
    assert layout.bytes_of(tokens) == tokens * each
    assert layout.bytes_of(tokens, 7) == tokens * each, "however many requests they are of"
    assert layout.marginal(tokens) == layout.marginal(inf) == layout.demand_bytes == each


@given(LAYOUTS, TOKENS, TOKENS)
def test_layout_needs_the_sum_of_its_kinds_and_never_less_for_more_tokens(layout: KvLayout, a: int, b: int) -> None:
    assert layout.bytes_of(a) == sum(kind.bytes_of(a) for kind in layout.kinds)
    few, many = sorted((a, b))
    assert 0 <= layout.bytes_of(few) <= layout.bytes_of(many)


@given(LAYOUTS, st.integers(1, 1 << 16))
def test_layout_grows_with_a_token_by_its_marginal_bytes(layout: KvLayout, tokens: int) -> None:
    assert layout.bytes_of(tokens + 1) - layout.bytes_of(tokens) == layout.marginal(tokens)
    assert layout.marginal(inf) <= layout.marginal(tokens) <= layout.marginal(0)


@given(LAYOUTS, st.lists(st.integers(1, 1 << 16), min_size=1, max_size=6))
def test_layout_of_several_requests_needs_no_less_than_each_by_itself(layout: KvLayout, tokens: list[int]) -> None:
    together, apart = layout.bytes_of(sum(tokens), len(tokens)), sum(map(layout.bytes_of, tokens))
    assert together >= apart
    if not any(kind.window_tokens for kind in layout.kinds):
        assert together == apart


@given(LAYOUTS, st.integers(0, 1 << 40), st.integers(1, 40))
def test_layout_finds_the_most_tokens_that_so_many_bytes_hold(layout: KvLayout, nbytes: int, requests: int) -> None:
    most = layout.most_tokens(nbytes, requests)
    if most == sys.maxsize:
        assert layout.marginal(inf) == 0 and layout.bytes_of(1 << 40, requests) <= nbytes
    else:
        assert layout.bytes_of(most, requests) <= nbytes < layout.bytes_of(most + 1, requests)


@given(LAYOUTS, st.integers(1, 8), TOKENS)
def test_layout_of_all_devices_divides_into_that_of_each(layout: KvLayout, devices: int, tokens: int) -> None:
    whole = layout.times(devices)
    assert whole.bytes_of(tokens) == devices * layout.bytes_of(tokens)
    assert whole.share(devices) == layout


@given(LAYOUTS, st.integers(1, 1 << 23))
def test_layout_in_extents_gives_each_state_whole_ones_and_leaves_tokens_alone(layout: KvLayout, extent: int) -> None:
    for kind, rounded in zip(layout.kinds, layout.in_extents(extent).kinds, strict=True):
        assert rounded.bytes_per_state % extent == 0 <= rounded.bytes_per_state - kind.bytes_per_state < extent
        assert replace(rounded, bytes_per_state=kind.bytes_per_state) == kind


@given(LAYOUTS)
def test_layout_with_kinds_has_a_demand_and_one_without_has_none(layout: KvLayout) -> None:
    assert (layout.demand_bytes > 0) == bool(layout.kinds)


def test_window_holds_its_tokens_with_a_chunk_and_a_page() -> None:
    layout = KvLayout((attention(80 * KIB), window(800 * KIB, 1024, 2048 + 64)))
    assert layout.bytes_of(1000) == 1000 * 880 * KIB
    assert layout.bytes_of(100_000) == 100_000 * 80 * KIB + (1024 + 2048 + 64) * 800 * KIB
    assert (layout.marginal(0), layout.marginal(inf), layout.demand_bytes) == (880 * KIB, 80 * KIB, 80 * KIB)


def test_state_takes_the_same_of_every_request_and_whole_extents() -> None:
    layout = KvLayout((attention(20 * KIB), state(61 * MIB + 5, 3))).in_extents(8 * MIB)
    assert layout.bytes_of(1) == 3 * 64 * MIB + 20 * KIB
    assert layout.bytes_of(1000) - layout.bytes_of(1) == 999 * 20 * KIB
    assert layout.bytes_of(0) == 0, "no request"


def test_layout_whose_kinds_all_stop_growing_is_judged_by_a_usual_request() -> None:
    assert KvLayout((state(64 * MIB),)).demand_bytes == 64 * KIB
    assert KvLayout((window(KIB, 128, 128),)).demand_bytes == 256


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({}, "bytes for each token or for each state"),
        ({"bytes_per_token": -1}, "a size below zero"),
        ({"bytes_per_token": 1, "states": 1}, "1 states of 0 bytes"),
        ({"bytes_per_token": 1, "beyond_window_tokens": 1}, "tokens of a window, and is none"),
        ({"bytes_per_state": 1}, "0 states of 1 bytes"),
        ({"bytes_per_state": 1, "states": 1, "bytes_per_token": 1}, "not both"),
        ({"bytes_per_state": 1, "states": 1, "window_tokens": 1}, "tokens of a window, and is none"),
    ],
)
def test_kind_with_values_that_none_has_is_refused(values: dict[str, int], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        KvKind("some", **values)
