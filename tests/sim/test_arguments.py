"""Arguments of simulations, from text."""

from __future__ import annotations

from argparse import ArgumentTypeError

import pytest

from sim.arguments import MOST_GPUS, group_sizes


def test_groups_are_so_many_of_a_size() -> None:
    assert group_sizes("2x1,1x4") == [1, 1, 4]
    assert len(group_sizes(f"{MOST_GPUS}x1")) == MOST_GPUS


@pytest.mark.parametrize("text", ["", "2", "x", "0x1", "2x0", "2x1,", "-1x2", "1.5x1"])
def test_groups_in_another_form_are_refused(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match="is not a number of groups, an x, and their size"):
        group_sizes(text)


@pytest.mark.parametrize("text", ["99999999x1", f"1x{MOST_GPUS + 1}", f"{MOST_GPUS}x1,1x1"])
def test_more_groups_than_any_fleet_has_are_refused(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match="is more than 10,000 GPUs"):
        group_sizes(text)
