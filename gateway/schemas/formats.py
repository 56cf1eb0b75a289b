"""Formats of strings that are kept: each a pattern. Others are annotations, as JSON Schema has them."""

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
_ATEXT = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]"
_URI = r"(?:[A-Za-z0-9._~!$&'()*+,;=-]|%[0-9A-Fa-f]{2})"
_PCHAR = r"(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})"
_POINTER = r"(?:/(?:[^/~]|~[01])*)*"
_FIXED: Mapping[str, str] = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "duration": r"^P(?:\d+W|(?:\d+Y(?:\d+M(?:\d+D)?)?|\d+M(?:\d+D)?|\d+D)(?:T(?:\d+H(?:\d+M(?:\d+S)?)?|\d+M(?:\d+S)?|"
    r"\d+S))?|T(?:\d+H(?:\d+M(?:\d+S)?)?|\d+M(?:\d+S)?|\d+S))$",
    "ipv4": f"^{_IPV4}$",
    "ipv6": f"^(?:{_NUMBERED}|{_SHORTENED})$",
    "uuid": r"^[0-9A-Fa-f]{8}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{12}$",
    "json-pointer": f"^{_POINTER}$",
    "relative-json-pointer": rf"^(?:0|[1-9]\d*)(?:#|{_POINTER})$",
}


def pattern(name: str, most: int | None = None) -> str | None:
    """Of the strings of a format of at most so many characters, or of those of them whose parts are not too long for
    that. None: the format is not known, or none has so few."""
    if name in _FIXED:
        return _FIXED[name]
    made = _MADE.get(name)
    if made is None:
        return None
    build, parts, beside, longest = made
    length = longest if most is None else min(longest, (most - beside) // parts)
    return build(length) if length > 0 else None


def _label(length: int) -> str:
    return "[A-Za-z0-9]" if length < 2 else rf"[A-Za-z0-9](?:[A-Za-z0-9-]{{0,{length - 2}}}[A-Za-z0-9])?"


def _hostname(length: int) -> str:
    return rf"^{_label(length)}(?:\.{_label(length)}){{0,3}}$"


def _email(length: int) -> str:
    local = f"{_ATEXT}{{1,{length}}}"
    return rf"^{local}(?:\.{local})?@{_label(length)}(?:\.{_label(length)}){{1,3}}$"


def _tail(length: int) -> str:
    rest = rf"(?:{_PCHAR}|[/?]){{0,{length}}}"
    return rf"(?:/{_PCHAR}{{0,{length}}}){{0,6}}(?:\?{rest})?(?:#{rest})?$"


def _uri(length: int) -> str:
    return rf"^[A-Za-z][A-Za-z0-9+.-]{{0,15}}:(?://{_URI}{{1,{length}}}(?::\d{{1,4}})?|/?{_PCHAR}{{1,{length}}}){_tail(length)}"


def _reference(length: int) -> str:
    return rf"^(?://{_URI}{{1,{length}}}|(?:{_URI}|@){{1,{length}}})?{_tail(length)}"


_MADE: Mapping[str, tuple[Callable[[int], str], int, int, int]] = {
    "email": (_email, 6, 5, 63),
    "hostname": (_hostname, 4, 3, 63),
    "uri": (_uri, 27, 33, 500),
    "uri-reference": (_reference, 27, 12, 500),
}
"""Made of parts of so many characters: how, how many such parts they are as long as, what is beside those, and the most
that a part may have."""
NAMES = frozenset((*_FIXED, *_MADE))
