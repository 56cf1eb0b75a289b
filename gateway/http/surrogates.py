"""JSON in which a string has half of a character: "\\ud83d", the first half of an emoji that was cut in two.

JSON's grammar allows it, clients that cut strings by UTF-16 send it, and it is no text: the parser refuses it. Other
servers put U+FFFD in its place, and so does this one.
"""

from __future__ import annotations

import json
import re
from typing import NoReturn

_PERHAPS = re.compile(rb"\\u[dD][89a-fA-F]")
_HALF = re.compile("[\ud800-\udfff]")


def mended(body: bytes) -> bytes | None:
    """The body with U+FFFD in place of each half of a character; None if it has none, or is no JSON anyway."""
    if _PERHAPS.search(body) is None:
        return None
    try:
        text = json.dumps(json.loads(body.decode(), parse_constant=_no_number), ensure_ascii=False)
    except (ValueError, RecursionError):
        return None
    whole, count = _HALF.subn("\ufffd", text)
    return whole.encode() if count else None


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
