import pytest

from balloond.policy.extents import count_down, count_up, cut, whole_pages


def test_weights_are_cut_into_full_extents_and_one_of_the_pages_that_are_left():
    assert cut(10, 4, 1) == [4, 4, 2]
    assert cut(96 + 8 + 1, 4, 1) == [48, 48, 4, 4, 1]
    assert cut(9, 4, 2) == [4, 4, 2]
    assert cut(8, 4, 2) == [4, 4]
    assert cut(0, 4, 2) == []


def test_an_extent_of_broken_pages_is_refused():
    with pytest.raises(ValueError, match="3 bytes is not whole pages of 2"):
        cut(8, 3, 2)


def test_counts_of_extents_round_up_or_down_as_named():
    assert (whole_pages(1, 4), whole_pages(8, 4)) == (4, 8)
    assert (count_up(9, 4), count_down(9, 4)) == (3, 2)
    assert (count_up(-9, 4), count_down(-9, 4)) == (0, 0)
