"""Slots after a move of the envelopes that they lie in."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpu_scheduler.engines.sglang.kv.renumbering import Renumbering
from gpu_scheduler.engines.sglang.kv.slot_transfer import HostIds

MOST = 1 << 36
"""Envelopes of which a table would take half a terabyte."""


@pytest.mark.parametrize("size", [1, 16])
@given(
    moved=st.dictionaries(st.integers(0, MOST), st.integers(0, MOST), max_size=8),
    others=st.lists(st.integers(0, MOST), max_size=8),
)
def test_slots_of_moved_envelopes_are_found_at_the_new_places_and_others_stay(
    size: int, moved: dict[int, int], others: list[int]
) -> None:
    sources, destinations = (np.array([*some], dtype=np.int64) for some in (moved, moved.values()))
    slots = [envelope * size + (envelope + 3) % size for envelope in (*moved, *others)]
    expected = [moved.get(slot // size, slot // size) * size + slot % size for slot in slots]
    found = Renumbering(HostIds(), sources, destinations, size).of(
        torch.tensor(slots, dtype=torch.int64).reshape(-1, 1)
    )
    assert found.shape == (len(slots), 1) and found.flatten().tolist() == expected


def test_slots_keep_their_dtype_and_the_slot_before_the_first_stays() -> None:
    renumbering = Renumbering(HostIds(), np.array([5, 2]), np.array([1, 9]), 16)
    found = renumbering.of(torch.tensor([-1, 80, 33, 0], dtype=torch.int32))
    assert found.dtype == torch.int32 and found.tolist() == [-1, 16, 145, 0]
