from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.schemas import languages, numbers
from gateway.schemas.numbers import NumberRange, TooFar

BOUNDS = st.one_of(
    st.none(),
    st.integers(-3000, 3000).map(Decimal),
    st.integers(-(10**6), 10**6).map(lambda number: Decimal(number).scaleb(-4)),
    st.integers(-3, 3).map(lambda number: Decimal(number).scaleb(-1)),
)
STEPS = st.sampled_from([Decimal(said) for said in ("2", "3", "7", "10", "100", "0.5", "0.25", "0.01", "2.5")])
BESIDE = st.sampled_from([Decimal(said) for said in ("0", "1", "-1", "0.1", "-0.001", "0.00001", "7", "90", "-12.5")])
NOTHING_OF_JSON = ("-", "", "01", "1.", ".5", "-.5", "--1", "00", "-01", "1.5.5", "+1")


@settings(max_examples=500, deadline=None, derandomize=True)
@given(BOUNDS, BOUNDS, st.lists(STEPS, max_size=2), BESIDE, st.booleans())
def test_numbers_within_bounds_that_steps_divide_fit_and_no_others(
    low: Decimal | None, high: Decimal | None, steps: list[Decimal], beside: Decimal, whole: bool
) -> None:
    tree = (numbers.integers if whole else numbers.decimals)(NumberRange(low, high), steps)
    for end in (low, high, Decimal(0), *steps):
        if end is None:
            continue
        number = Decimal(int(end + beside)) if whole else end + beside
        said = format(number, "f")
        said = (said.rstrip("0").rstrip(".") if "." in said else said).replace("-0", "-0" if number else "0")
        within = (low is None or number >= low) and (high is None or number <= high)
        assert languages.fits(tree, said) == (within and not any(number % step for step in steps)), said
    assert not any(languages.fits(tree, said) for said in NOTHING_OF_JSON)


@pytest.mark.parametrize("bound", [0, 1, 100, -3, 0.1, 1e-7, 2**53, 2**60, 1e300, 10**400, -0.25])
def test_number_beyond_a_bound_is_beyond_it_as_a_float_too(bound: int | float) -> None:
    for up in (True, False):
        next_one = numbers.beyond(bound, up)
        assert (next_one > numbers.decimal(bound)) == up
        if abs(bound) < 1e301:
            assert (float(next_one) > bound) == up


def test_numbers_far_away_are_left_out_or_refused() -> None:
    assert languages.fits(numbers.integers(NumberRange(Decimal(5), Decimal("1e308"))), "9" * 30)
    assert not languages.fits(numbers.integers(NumberRange(Decimal(5), Decimal("1e308"))), "9" * 31)
    for low, steps in ((Decimal("1e40"), []), (Decimal(0), [Decimal(211)])):
        with pytest.raises(TooFar):
            numbers.integers(NumberRange(low), steps)
    with pytest.raises(TooFar):
        numbers.decimals(NumberRange(Decimal(0)), [Decimal("1e-20")])


def test_numbers_with_few_multiples_in_range_are_listed() -> None:
    tree = numbers.integers(NumberRange(Decimal(0), Decimal(100_000)), [Decimal(9973)])
    assert languages.plain(tree) and languages.fits(tree, "9973") and not languages.fits(tree, "9974")
