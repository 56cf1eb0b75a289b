"""The formats of strings that are kept, each as a pattern. Other formats are annotations, as JSON Schema has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

_DATE = (
    r"(?:(?:\d\d[2468][048]|\d\d[13579][26]|\d\d0[48]|[02468][48]00|[13579][26]00|[2468]000)-02-29|"
    r"(?:\d{3}[1-9]|\d\d[1-9]0|\d[1-9]00|[1-9]000)-"
    r"(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|02-(?:0[1-9]|1\d|2[0-8])))"
)
_TIME = r"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d{1,6})?(?:Z|[+-](?:[01]\d|2[0-3]):[0-5]\d)"
_BYTE = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_IPV4 = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
_H16 = r"[0-9A-Fa-f]{1,4}"
_NUMBERED = rf"(?:{_H16}:){{7}}{_H16}|(?:{_H16}:){{6}}{_IPV4}"
_SHORTENED = "|".join(
    rf"(?:{_H16}(?::{_H16}){{0,{before - 1}}})?::(?:{_H16}(?::{_H16}){{0,{6 - before}}})?"
    if before
    else rf"::(?:{_H16}(?::{_H16}){{0,6}})?"
    for before in range(7)
)
_POINTER = r"(?:/(?:[^/~]|~[01])*)*"
_N = r"\d{1,6}"
_CLOCK = f"(?:{_N}H(?:{_N}M(?:{_N}S)?)?|{_N}M(?:{_N}S)?|{_N}S)"
_FIXED: Mapping[str, str] = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "duration": f"^P(?:{_N}W|(?:{_N}Y(?:{_N}M(?:{_N}D)?)?|{_N}M(?:{_N}D)?|{_N}D)(?:T{_CLOCK})?|T{_CLOCK})$",
    "ipv4": f"^{_IPV4}$",
    "ipv6": f"^(?:{_NUMBERED}|{_SHORTENED})$",
    "uuid": r"^[0-9A-Fa-f]{8}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{12}$",
    "json-pointer": f"^{_POINTER}$",
    "relative-json-pointer": rf"^(?:0|[1-9]\d*)(?:#|{_POINTER})$",
}


def pattern(name: str, most: int | None = None) -> str | None:
    """The pattern for strings of a format. With `most` it allows only strings whose parts are so short that no string
    has more characters than that. None if the format is not known, or no string of it is as short."""
    if name in _FIXED:
        return _FIXED[name]
    made = _MADE.get(name)
    if made is None:
        return None
    build, parts, beside, longest = made
    if most is None:
        return build(None)
    length = min(longest, (most - beside) // parts)
    return build(length) if length > 0 else None


def _some(one: str, least: int, length: int | None, times: int = 1) -> str:
    return f"{one}{{{least},{'' if length is None else times * length}}}"


_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?"


def _hostname(length: int | None) -> str:
    short = "" if length is None else f"(?=.{{1,{length}}}$)"
    return f"^{short}{_LABEL}(?:[.]{_LABEL})*$"


def _email(length: int | None) -> str:
    atext = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
    short = "" if length is None else f"(?=[^@]{{1,{length}}}@)"
    dotted = "" if length is None else f"(?=.{{1,{length}}}$)"
    return f"^{short}{atext}(?:[.]{atext})*@{dotted}{_LABEL}(?:[.]{_LABEL})+$"


def _of_uri(others: str, length: int | None) -> str:
    """Pattern for one character of a URI. With a bounded `length` only characters that need no percent sign, since an
    escape is three characters."""
    plain = rf"[A-Za-z0-9._~!$&'()*+,;={others}-]"
    return plain if length is not None else rf"(?:{plain}|%[0-9A-Fa-f]{{2}})"


def _tail(length: int | None) -> str:
    rest = _of_uri(":@/?", length)
    return f"(?:[?]{_some(rest, 0, length, 2)})?(?:#{_some(rest, 0, length)})?$"


def _uri(length: int | None) -> str:
    host, path = _some(_of_uri("", length), 1, length, 2), _some(_of_uri(":@/", length), 0, length, 3)
    other = _some(_of_uri(":@", length), 1, length)
    return rf"^[A-Za-z][A-Za-z0-9+.-]{{0,15}}:(?://{host}(?::\d{{1,4}})?(?:/{path})?|{other}){_tail(length)}"


def _reference(length: int | None) -> str:
    return f"^{_some(_of_uri('@/', length), 0, length, 5)}{_tail(length)}"


_MADE: Mapping[str, tuple[Callable[[int | None], str], int, int, int]] = {
    "email": (_email, 2, 1, 24),
    "hostname": (_hostname, 1, 0, 48),
    "uri": (_uri, 8, 27, 14),
    "uri-reference": (_reference, 8, 2, 14),
}
"""Formats whose strings have no bound -> (function that makes a pattern of parts of so many characters (None: any
number), how many such parts a string has, number of characters beside them, the most characters of a part if the string
is bounded)."""
NAMES = frozenset((*_FIXED, *_MADE))
