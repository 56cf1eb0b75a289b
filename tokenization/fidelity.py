"""Comparison of a loaded tokenizer with the folder's tokenizer.json.

Transformers does not read that file as it is: some of its classes build parts of the tokenizer anew. Where that gives
other token ids or another text, a model is shown nonsense and answers nonsense, and nothing else would say so.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenization.tokenizer import Tokenizer

TEXTS = (
    "a b  c\n\nd",
    "Hello, world! It's 3.14159 o'clock.",
    "def f(x):\n\treturn [x, {'k': 10_000}]\n",
    "Grüße aus München, 漢字とかな, naïve café, 👍🏽",
)
"""Texts that are compared: spaces in a row, lines, contractions, digits, code, and characters of several bytes."""


def difference(tokenizer: Tokenizer, folder: Path) -> str | None:
    """How the tokenizer differs from tokenizer.json, in one line; None where it does not, or there is no such file.
    Raises what the tokenizers library raises at a file that it cannot read."""
    from tokenizers import Tokenizer as RawTokenizer

    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    raw = RawTokenizer.from_file(str(path))
    raw.no_truncation()
    raw.no_padding()
    for text in TEXTS:
        said = raw.encode(text, add_special_tokens=False).ids
        ids = tokenizer.encode(text, special=False)
        if ids != said:
            return f"{_quoted(text)} becomes {_some(ids)} where tokenizer.json says {_some(said)} ({_HINT})"
        if (back := tokenizer.decode(ids)) != (meant := raw.decode(said, skip_special_tokens=False)):
            return f"{_quoted(meant)} comes back as {_quoted(back)} ({_HINT})"
    return None


_HINT = "tokenizer_class in tokenizer_config.json may be that of another one; PreTrainedTokenizerFast takes the file"
_MOST_IDS = 6


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _some(ids: list[int]) -> str:
    shown = ", ".join(map(str, ids[:_MOST_IDS]))
    return f"[{shown}{', …' if len(ids) > _MOST_IDS else ''}]"
