"""Values that are not what they may be are named with what they are and what is allowed."""

import pytest

from services.wording.json_values import (
    COUNT,
    FLAG,
    FRACTION,
    NAMES,
    POSITIVE,
    TEXT,
    at_least,
    fault,
    first_fault,
    one_of,
)


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (COUNT, [1, 1 << 40], [0, -1, 1.0, True, "1", None, [1]]),
        (POSITIVE, [1, 0.5], [0, -1, True, "1", float("nan"), float("inf")]),
        (FRACTION, [1, 0.5], [0, 1.5, True, "1"]),
        (at_least(1), [1, 2.5], [0.5, "1", None]),
        (FLAG, [True, False], [0, 1, "true", None]),
        (TEXT, ["", "a"], [7, None, ["a"]]),
        (NAMES, [[], ["a"]], ["a", [1], {"a": 1}]),
        (one_of("a", "b", "c"), ["a", "c"], ["d", ["a"], {}, None]),
    ],
)
def test_kind_of_value_accepts_good_and_names_bad_values(kind, good, bad):
    assert [fault("k", value, kind) for value in good] == [None] * len(good)
    assert [fault("k", value, kind) for value in bad] == [f"k = {value!r} is not {kind.allowed}" for value in bad]


def test_kind_of_value_lists_the_allowed_names():
    assert one_of("a").allowed == "a"
    assert one_of("a", "b", "c").allowed == "a, b or c"


def test_first_fault_of_an_object_names_the_first_wrong_value_and_ignores_missing_ones():
    kinds = {"a": COUNT, "b": FLAG, "c": TEXT}
    assert first_fault({"a": None, "b": True}, kinds) is None
    assert first_fault({"a": 1, "b": 2, "c": 3, "d": 4}, kinds, of="x") == "x.b = 2 is not true or false"


def test_long_value_in_a_fault_is_cut():
    assert len(fault("k", "x" * 10_000, COUNT)) < 150
