"""Models that fit nowhere, with the arithmetic."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_kinds.layout import KvLayout, attention, of_tokens, state, window
from loader.policy.floor import floor_bytes
from placement.policy.kvpr import Books, Device, Group, Model
from placement.policy.lifecycle.refusal import LongestRequest, could_hold, refusal
from tests.kv_kinds.test_layout import LAYOUTS

GROUPS = [Group("small", (Device("s0", 1_000),)), Group("large", (Device("l0", 5_000), Device("l1", 3_000)))]


def test_refusal_states_the_sum_against_the_largest_group():
    refused = refusal(Model("m", weights=4_000, floor=1_000, quota=500), GROUPS)
    assert refused.reason == (
        "weights 4,000 + floor 1,000 + engine quota 500 = 5,500 bytes; the largest group, large, has 5,000"
    )


def test_refusal_of_a_tensor_parallel_model_counts_its_part_on_each_device():
    refused = refusal(Model("m", weights=7_000, parts=2), GROUPS)
    assert refused.reason == (
        "weights 3,500 + floor 0 + engine quota 0 = 3,500 bytes on each of 2 devices; "
        "the largest group, large, has 3,000"
    )
    assert refusal(Model("m", weights=6_000, parts=2), GROUPS) is None
    assert refusal(Model("m", parts=4), GROUPS).reason == "it needs 4 devices of one group, the largest group has 2"


def test_refusal_without_a_group_says_that_no_group_is_here():
    assert refusal(Model("m"), []).reason == "no group is here"


@given(st.integers(0, 6_000), st.integers(0, 600), st.integers(0, 600), st.integers(1, 3))
def test_refusal_is_of_models_that_even_an_empty_cluster_cannot_hold(weights, floor, quota, parts):
    model = Model("m", 1.0, weights, floor, quota, parts)
    fits = any(sum(Books([g]).fits(model, d.name) for d in g.devices) >= parts for g in GROUPS)
    assert (refusal(model, GROUPS) is None) == fits == any(could_hold(model, group) for group in GROUPS)


def told(kv, tokens, floor_tokens=0, groups=GROUPS):
    """Why a model with weights of 1,000 bytes and a floor for a request of so many tokens is refused; None if it is
    not."""
    floor = floor_bytes(tokens, floor_tokens, kv, 1)
    refused = refusal(Model("m", weights=1_000, floor=floor), groups, LongestRequest(tokens, kv))
    return refused and refused.reason


@pytest.mark.parametrize(
    ("kv", "tokens", "end"),
    [
        (
            of_tokens(2),
            9_000,
            "its longest request has 9,000 tokens: "
            "with context_tokens (and any floor_tokens) of about 1,800 it would fit",
        ),
        (
            KvLayout((attention(2), window(2, 10, 10))),
            9_000,
            "its longest request has 9,000 tokens: "
            "with context_tokens (and any floor_tokens) of about 1,500 it would fit",
        ),
        (
            KvLayout((attention(2), state(1_000))),
            9_000,
            "its longest request has 9,000 tokens: "
            "with context_tokens (and any floor_tokens) of about 800 it would fit",
        ),
        (
            KvLayout((attention(1), state(3_000))),
            9,
            "a request needs 6,193 bytes of KV before its first token, and 4,000 are left for it: "
            "no context is short enough",
        ),
        (
            KvLayout((window(100, 10, 10),)),
            9,
            "a request needs 19,300 bytes of KV before its first token, and 4,000 are left for it: "
            "no context is short enough",
        ),
    ],
)
def test_refusal_for_a_floor_tells_which_context_would_fit_or_that_none_would(kv, tokens, end):
    assert told(kv, tokens).endswith(f"the largest group, large, has 5,000; {end}")


def test_refusal_for_floor_tokens_that_a_request_does_not_need_tells_that_fewer_would_fit():
    assert told(of_tokens(2), 100) is None
    assert told(of_tokens(2), 100, 9_000).endswith("; with a smaller floor_tokens or context_tokens it would fit")


def test_refusal_for_weights_tells_of_no_context():
    refused = refusal(Model("m", weights=9_000, floor=9), GROUPS, LongestRequest(9, of_tokens(1)))
    assert refused.reason.endswith("the largest group, large, has 5,000")


def test_refusal_counts_with_the_smaller_tables_of_a_shorter_context():
    kv, row, weights, capacity = of_tokens(2), 1, 1_000, 5_000

    def model(context):
        return Model("m", weights=weights + row * context, floor=floor_bytes(context, 0, kv, 1))

    refused = refusal(model(9_000), GROUPS, LongestRequest(9_000, kv, row))
    assert refused.reason.endswith(
        "its longest request has 9,000 tokens: with context_tokens (and any floor_tokens) of about 1,100 it would fit"
    )
    assert model(1_100).needed <= capacity < model(1_300).needed


@given(LAYOUTS, st.integers(1, 100_000), st.integers(1, 1 << 40), st.integers(1, 3))
def test_context_that_a_refusal_names_has_a_floor_that_fits_and_one_that_it_denies_has_not(kv, tokens, room, longest):
    floor_tokens = longest * tokens
    reason = told(kv, tokens, floor_tokens, groups=[Group("g", (Device("d", 1_000 + room),))])
    assert (reason is None) == (floor_bytes(tokens, floor_tokens, kv, 1) <= room)
    if reason is None or floor_bytes(tokens, 0, kv, 1) <= room:
        assert reason is None or reason.endswith("; with a smaller floor_tokens or context_tokens it would fit")
        return
    named = re.search("of about ([0-9,]+) it would", reason)
    if named is None:
        assert reason.endswith("no context is short enough") and floor_bytes(1, 0, kv, 1) > room
    else:
        context = int(named[1].replace(",", ""))
        assert 0 < context < tokens and floor_bytes(context, context, kv, 1) <= room
        assert floor_bytes(2 * context, 0, kv, 1) > room, "and not many more"
