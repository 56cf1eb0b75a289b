"""Numbers as JSON writes them, as languages: those between two bounds, and multiples of a number.

A number with a bound or `multipleOf` is written without an exponent, with at most `DIGITS` digits before the point and
as many after it. The value that a client's reader makes of it, a float mostly, keeps to the bounds too: rounding keeps
the order, and a bound that does not belong to its range is moved to the next number that no float takes for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction

from gateway.schemas import languages
from gateway.schemas.languages import EMPTY, NOTHING, Chars, Tree

DIGITS = 15
_MOST_BEFORE = 30
"""The most digits before the point of a bound that is kept as it is; with `multipleOf` it is `DIGITS`."""
_MOST_MULTIPLES = 64
"""The most multiples that are written one by one."""
_MOST_REMAINDERS = 200
_STEP = Decimal(1).scaleb(-DIGITS)


class TooFar(ValueError):
    """A number is too long to be told from others digit by digit."""


@dataclass(frozen=True, slots=True)
class NumberRange:
    """All numbers from `low` to `high`, both of which belong to the range; None: no bound."""

    low: Decimal | None = None
    high: Decimal | None = None

    @property
    def empty(self) -> bool:
        return self.low is not None and self.high is not None and self.low > self.high

    def and_(self, other: NumberRange) -> NumberRange:
        lows = [one for one in (self.low, other.low) if one is not None]
        highs = [one for one in (self.high, other.high) if one is not None]
        return NumberRange(max(lows, default=None), min(highs, default=None))

    @property
    def whole(self) -> NumberRange:
        """The range of its integers."""
        low, high = self.low, self.high
        return NumberRange(
            None if low is None else Decimal(math.ceil(low)), None if high is None else Decimal(math.floor(high))
        )


_COUNTED = NumberRange(Decimal(1 - 10**DIGITS), Decimal(10**DIGITS - 1))


def decimal(value: int | float) -> Decimal:
    """The value exactly as it is written."""
    return Decimal(value) if isinstance(value, int) else Decimal(repr(value))


def beyond(value: int | float, up: bool) -> Decimal:
    """The next number above `value`, or below it."""
    bound, sign = decimal(value), 1 if up else -1
    try:
        nearest = float(value)
    except OverflowError:
        return decimal(int(value) + sign)
    next_float = decimal(math.nextafter(nearest, sign * math.inf))
    if abs(nearest) > 1 << 53:
        return next_float
    with_step = _exactly(bound, sign * _STEP)
    return with_step if float(with_step) != nearest else next_float


def _exactly(one: Decimal, other: Decimal) -> Decimal:
    # Decimal's sums are rounded to 28 digits.
    low = min(int(one.as_tuple().exponent), int(other.as_tuple().exponent))
    total = Fraction(one) + Fraction(other)
    return Decimal(int(total * 10**-low)).scaleb(low) if abs(low) < 400 else one


def _digits(low: int, high: int) -> Tree:
    return languages.chars(((48 + low, 48 + high),)) if low <= high else NOTHING


_DIGIT = _digits(0, 9)
_POINT, _MINUS, _ZERO = languages.text("."), languages.text("-"), languages.text("0")


def integers(within: NumberRange, multiples_of: Sequence[Decimal] = ()) -> Tree:
    """The integers of `within` that each of `multiples_of` divides. Raises TooFar, languages.LanguageTooLarge."""
    within = within.whole
    step = math.lcm(*(Fraction(one).numerator for one in multiples_of))
    if within.low is not None and within.high is not None and step:
        low, high = -(-int(within.low) // step), int(within.high) // step
        if high - low < _MOST_MULTIPLES:
            return languages.choice(languages.text(str(number * step)) for number in range(low, high + 1))
    if step == 1:
        return _signed(within, _wholes)
    return languages.both((_signed(within.and_(_COUNTED), _wholes), _multiples(step, 0)))


def decimals(within: NumberRange, multiples_of: Sequence[Decimal] = ()) -> Tree:
    """The decimals of `within` that each of `multiples_of` divides. Raises TooFar, languages.LanguageTooLarge."""
    if not multiples_of:
        return _signed(within, _with_fractions)
    places = max(0, *(-int(one.normalize().as_tuple().exponent) for one in multiples_of))
    if places > DIGITS:
        raise TooFar
    step = math.lcm(*(int(Fraction(one) * 10**places) for one in multiples_of))
    return languages.both((_signed(within.and_(_COUNTED), _with_fractions), _multiples(step, places)))


def _signed(within: NumberRange, sizes: Callable[[Decimal, Decimal | None], Tree]) -> Tree:
    low, high, parts = within.low, within.high, []
    if within.empty:
        return NOTHING
    if high is None or high >= 0:
        parts.append(sizes(max(low or Decimal(0), Decimal(0)), high))
    if low is None or low < 0:
        parts.append(
            languages.row(
                (_MINUS, sizes(Decimal(0) if high is None or high > 0 else -high, None if low is None else -low))
            )
        )
    return languages.choice(parts)


def _near(number: Decimal) -> Decimal:
    """A high bound, lowered to leave out numbers with too many digits."""
    return min(number, Decimal(10**_MOST_BEFORE - 1))


def _check(low: Decimal) -> Decimal:
    if low > 10**_MOST_BEFORE - 1:
        raise TooFar
    return low


def _wholes(low: Decimal, high: Decimal | None) -> Tree:
    """Integers without a sign."""
    _check(low)
    return _count(int(low), None if high is None else int(_near(high)))


def _count(low: int, high: int | None) -> Tree:
    if high is not None and high < low:
        return NOTHING
    if high is None:
        longer = languages.row((_digits(1, 9), languages.repeat(_DIGIT, len(str(low)), None)))
        return languages.choice((_count(low, 10 ** len(str(low)) - 1), longer))
    parts = []
    for size in range(len(str(low)), len(str(high)) + 1):
        first = str(low) if size == len(str(low)) else "1" + "0" * (size - 1)
        last = str(high) if size == len(str(high)) else "9" * size
        parts.append(_same_size(first, last))
    return languages.choice(parts)


def _same_size(first: str, last: str) -> Tree:
    if not first:
        return EMPTY
    if set(first) <= {"0"} and set(last) <= {"9"}:
        return languages.repeat(_DIGIT, len(first), len(first))
    if first[0] == last[0]:
        return languages.row((languages.text(first[0]), _same_size(first[1:], last[1:])))
    low, high, size = int(first[0]), int(last[0]), len(first) - 1
    parts = []
    if set(first[1:]) - {"0"}:
        parts.append(languages.row((languages.text(first[0]), _same_size(first[1:], "9" * size))))
        low += 1
    if set(last[1:]) - {"9"}:
        parts.append(languages.row((languages.text(last[0]), _same_size("0" * size, last[1:]))))
        high -= 1
    parts.append(languages.row((_digits(low, high), languages.repeat(_DIGIT, size, size))))
    return languages.choice(parts)


def _with_fractions(low: Decimal, high: Decimal | None) -> Tree:
    """Numbers without a sign, with fractions."""
    _check(low)
    first, after_first = _split(low)
    if high is None:
        wide = languages.row((_count(first + 1, None), _fraction("", None)))
        return languages.choice((languages.row((_count(first, first), _fraction(after_first, None))), wide))
    last, after_last = _split(_near(high))
    if first == last:
        return languages.row((_count(first, first), _fraction(after_first, after_last)))
    return languages.choice(
        (
            languages.row((_count(first, first), _fraction(after_first, None))),
            languages.row((_count(first + 1, last - 1), _fraction("", None))),
            languages.row((_count(last, last), _fraction("", after_last))),
        )
    )


def _split(number: Decimal) -> tuple[int, str]:
    """The number's whole part, and the digits after its point."""
    whole = int(number)
    digits = format(number - whole if number else Decimal(0), "f").partition(".")[2].rstrip("0")
    if len(digits) > 400:
        raise TooFar
    return whole, digits


def _fraction(low: str, high: str | None) -> Tree:
    """What comes after a whole part, its point included: from the digits `low` to the digits `high`; None: to any."""
    if high is not None and low > high:  # digits without zeros at their ends have the order of their numbers
        return NOTHING
    after = _after_point(low, high, max(DIGITS, len(low), len(high or "")))
    point = languages.row((_POINT, after))
    return languages.choice((EMPTY, point)) if not low else point


def _after_point(low: str, high: str | None, left: int) -> Tree:
    """The digits after the point, from `low` to `high`: at least one and at most `left` of them."""
    if not left:
        return NOTHING
    if not low and high is None:
        return languages.repeat(_DIGIT, 1, left)
    if not low and high == "":
        return languages.repeat(_ZERO, 1, left)
    first = int(low[0]) if low else 0
    last = 9 if high is None else int(high[0]) if high else 0
    parts = []

    def then(digit: Tree, low: str, high: str | None) -> None:
        more = _after_point(low, high, left - 1)
        parts.append(languages.row((digit, more if low else languages.optional(more))))

    if first == last and high is not None:
        then(_digits(first, first), low[1:], high[1:])
        return languages.choice(parts)
    if low:
        then(_digits(first, first), low[1:], None)
        first += 1
    if high is not None:
        then(_digits(last, last), "", high[1:])
        last -= 1
    if first <= last:
        then(_digits(first, last), "", None)
    return languages.choice(parts)


def _multiples(step: int, places: int) -> Tree:
    """Numbers with at most so many places after the point that are a multiple of `step` in units of the last place.
    Raises TooFar if there are too many remainders to tell apart."""
    zeros = 0
    while step and step % 10 == 0 and zeros < _MOST_BEFORE:
        step, zeros = step // 10, zeros + 1
    places, zeros = max(0, places - zeros), max(0, zeros - places)
    if not 0 < step <= _MOST_REMAINDERS:
        raise TooFar
    made = languages.machine(_Multiple(step, places))
    if not zeros:
        return made
    return languages.choice((languages.row((made, languages.repeat(_ZERO, zeros, zeros))), _ZERO))


@dataclass(frozen=True, slots=True)
class _Multiple:
    """The beginning of a number, with sign, digits and point, that may become a multiple of `step`."""

    step: int
    places: int
    """Digits that may come after the point; once there is a point, that still may."""
    remainder: int = 0
    digits: bool = False
    """Whether there is a digit; after a point, whether there is one since."""
    begun: bool = False
    """Whether there is any character."""
    fraction: bool = False
    """Whether there is a point."""

    @property
    def accepts(self) -> bool:
        return self.digits and not self.remainder * 10**self.places % self.step

    @property
    def marks(self) -> Chars:
        return _MARKS

    def after(self, character: str) -> _Multiple | None:
        if character == "-":
            return None if self.begun else replace(self, begun=True)
        if character == ".":
            may = self.digits and self.places and not self.fraction
            return replace(self, digits=False, fraction=True) if may else None
        if self.fraction and not self.places:
            return None
        remainder = (self.remainder * 10 + int(character)) % self.step
        return replace(
            self, remainder=remainder, digits=True, begun=True, places=self.places - 1 if self.fraction else self.places
        )


_MARKS: Chars = tuple((point, point) for point in map(ord, "-.0123456789"))
