"""Kinds of KV as people read them."""

from __future__ import annotations

import pytest
from hypothesis import given

from kv_kinds.layout import KvLayout, attention, latent, of_tokens, state, window
from kv_kinds.wording import described, listed, of_listed, short
from tests.kv_kinds.test_layout import LAYOUTS

KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize(
    ("layout", "words", "in_a_column"),
    [
        (of_tokens(96 * KIB), "96.0 KiB a token", "96.0 KiB"),
        (KvLayout((latent(54 * KIB),)), "latent 54.0 KiB a token", "54.0 KiB"),
        (
            KvLayout((attention(20 * KIB), state(61 * MIB))),
            "attention 20.0 KiB a token, state 61.0 MiB a request",
            "20.0 KiB + 61.0 MiB a request",
        ),
        (KvLayout((state(64 * MIB, 3),)), "state 3 times 64.0 MiB a request", "0 B + 192.0 MiB a request"),
        (
            KvLayout((attention(80 * KIB), window(800 * KIB, 1024, 2112))),
            "attention 80.0 KiB a token, window 800.0 KiB a token of the last 1024",
            "880.0 KiB",
        ),
        (KvLayout(), "none", "0 B"),
    ],
)
def test_kinds_are_told_with_their_bytes(layout: KvLayout, words: str, in_a_column: str) -> None:
    assert (described(layout), short(layout)) == (words, in_a_column)


@given(LAYOUTS)
def test_kinds_for_programs_are_those_of_the_layout(layout: KvLayout) -> None:
    assert of_listed(listed(layout)) == layout


def test_kinds_for_programs_have_every_number() -> None:
    assert listed(KvLayout((window(5, 6, 7),))) == [
        {
            "name": "window",
            "bytes_per_token": 5,
            "window_tokens": 6,
            "beyond_window_tokens": 7,
            "bytes_per_state": 0,
            "states": 0,
            "divided": True,
        }
    ]
