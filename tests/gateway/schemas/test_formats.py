from __future__ import annotations

import ipaddress
import random
import re
import uuid
from collections.abc import Callable
from datetime import date, datetime, time
from pathlib import Path
from typing import Any

import pydantic
import pytest
import regress

from gateway.schemas import formats, languages, patterns
from gateway.schemas.languages import LanguageWork, Tree

DOCUMENT = Path(__file__).parents[3] / "docs" / "guide" / "openai.md"
FIT = {
    "date": ("2024-02-29", "2000-02-29", "1999-12-31"),
    "time": ("00:00:00Z", "23:59:59.5+02:00"),
    "date-time": ("2024-02-29T12:00:00Z", "1999-12-31T23:59:59.999-11:30"),
    "duration": ("P1D", "PT1H30M", "P1Y2M3DT4H5M6S", "P3W"),
    "email": ("a@b.c", "first.last+tag@mail.example.org"),
    "hostname": ("localhost", "a-b.example.org"),
    "ipv4": ("0.0.0.0", "255.1.20.199"),
    "ipv6": ("::", "::1", "fe80::1:2", "1:2:3:4:5:6:7:8", "1::8", "1:2:3:4:5:6:1.2.3.4"),
    "uuid": ("123e4567-E89B-12d3-a456-426614174000",),
    "uri": ("https://example.org/a/b?c=d#e", "mailto:a@b.c", "http://h:80"),
    "uri-reference": ("", "a/b", "/a?b#c", "#d"),
    "json-pointer": ("", "/a~1b/0"),
    "relative-json-pointer": ("0", "1/a", "2#"),
}
NOT = {
    "date": ("2023-02-29", "1900-02-29", "2024-13-01", "2024-04-31", "0000-01-01", "2024-1-1"),
    "time": ("24:00:00Z", "12:00:00", "12:60:00Z", "23:59:60Z"),
    "date-time": ("2024-02-30T12:00:00Z", "2024-02-29 12:00:00Z"),
    "duration": ("P", "PT", "P1DT", "1D"),
    "email": ("a", "@b.c", "a@b", "a..b@c.d"),
    "hostname": ("", "-a", "a_b", "a."),
    "ipv4": ("256.0.0.1", "1.2.3", "01.2.3.4"),
    "ipv6": (":", "1::2::3", "1:2:3:4:5:6:7", "12345::"),
    "uuid": ("123e4567e89b12d3a456426614174000",),
    "uri": ("a", "://a", "http://a b", "1a:b"),
    "uri-reference": ("a b", "%zz"),
    "json-pointer": ("a", "/~2"),
    "relative-json-pointer": ("01", "-1", "#"),
}


def test_format_patterns_match_their_strings_and_no_others() -> None:
    assert FIT.keys() == NOT.keys() == formats.NAMES
    for name in FIT:
        tree = patterns.found_in(formats.pattern(name) or "")
        assert [said for said in FIT[name] if not languages.fits(tree, said)] == [], name
        assert [said for said in NOT[name] if languages.fits(tree, said)] == [], name


def _walk(tree: Tree, draw: random.Random) -> str:
    states, state, said = languages.states(tree, 1000, LanguageWork(100_000)), tree, ""
    while not state.nullable or (draw.random() < 0.9 and len(said) < 60 and states[state]):
        rest = draw.choice(list(states[state]))
        low, high = draw.choice(states[state][rest])
        said, state = said + chr(draw.randint(low, min(high, low + 90))), rest
    return said


READERS: dict[str, Callable[[str], Any]] = {
    "date": date.fromisoformat,
    "time": time.fromisoformat,
    "date-time": datetime.fromisoformat,
    "ipv4": ipaddress.IPv4Address,
    "ipv6": ipaddress.IPv6Address,
    "uuid": uuid.UUID,
    "uri": pydantic.TypeAdapter(pydantic.AnyUrl).validate_python,
}


@pytest.mark.parametrize("name", READERS)
def test_format_pattern_strings_are_accepted_by_readers_of_the_format(name: str) -> None:
    tree, draw = patterns.found_in(formats.pattern(name) or ""), random.Random(0)
    for _ in range(100):
        READERS[name](_walk(tree, draw))


@pytest.mark.parametrize("most", [5, 20, 40, 100, 254, 2083])
def test_format_pattern_with_a_bound_has_no_longer_string(most: int) -> None:
    for name in ("email", "hostname", "uri", "uri-reference"):
        whole, said = regress.Regex(formats.pattern(name) or ""), formats.pattern(name, most)
        if said is None:
            assert most < 40
            continue
        tree, draw = patterns.found_in(said), random.Random(0)
        assert len(languages.states(tree, 300, LanguageWork(100_000))) < 300, "xgrammar looks at every token in each"
        for _ in range(20 if languages.states(tree, 300, LanguageWork(100_000)) else 0):
            text = _walk(tree, draw)
            assert len(text) <= most and whole.find(text), (name, text)


def test_documentation_lists_the_supported_formats() -> None:
    row = re.search(r"^\| `format` \| kept: (.*?);", DOCUMENT.read_text(), re.MULTILINE)
    assert row is not None and set(re.findall("`(.*?)`", row[1])) == formats.NAMES


def test_format_pattern_of_an_unknown_format_is_none() -> None:
    assert formats.pattern("color") is None and formats.pattern("binary", 7) is None
    assert re.fullmatch("[a-z0-9-]+", "".join(sorted(formats.NAMES)).replace(" ", ""))
