"""Where envelopes lie in extents."""

from hypothesis import given
from hypothesis import strategies as st

from gpu_scheduler.engines.sglang.policy.places import runs


def test_envelopes_in_a_row_are_one_run_until_the_extent_ends():
    assert runs([2, 3, 4, 5, 9, 8], 16, 64) == [(0, 32, 32), (1, 0, 32), (2, 16, 16), (2, 0, 16)]


def test_an_envelope_across_two_extents_is_two_runs():
    assert runs([1], 48, 64) == [(0, 48, 16), (1, 0, 32)]
    assert runs([], 48, 64) == []


@given(st.lists(st.integers(0, 50), unique=True, max_size=20), st.integers(1, 40), st.integers(1, 70))
def test_runs_hold_the_bytes_of_the_envelopes_in_their_order(envelopes, envelope_bytes, extent_bytes):
    expected = [at for e in envelopes for at in range(e * envelope_bytes, (e + 1) * envelope_bytes)]
    found = runs(envelopes, envelope_bytes, extent_bytes)
    assert [extent * extent_bytes + offset + i for extent, offset, nbytes in found for i in range(nbytes)] == expected
    assert all(offset + nbytes <= extent_bytes for _, offset, nbytes in found)
