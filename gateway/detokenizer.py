"""Token ids to text while they arrive: never half a character, and all together what decoding the whole gives.

Two ways. Where a text is its tokens' bytes in a row (byte-level vocabularies: Llama 3, Qwen, GPT), an incremental UTF-8
decoder is enough, and exact. Elsewhere (SentencePiece vocabularies, byte fallback, word pieces) a token's text depends
on its neighbours, and a window of recent tokens is decoded with and without the new ones.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence
from typing import Protocol

from gateway.tokenizer import Tokenizer

_INCOMPLETE = "\ufffd"
_utf8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer(Protocol):
    """The text of one answer."""

    def push(self, ids: Sequence[int]) -> str:
        """The text that `ids` complete; possibly none."""

    def finish(self) -> str:
        """What is still held back, characters that never became complete as U+FFFD. Nothing may be pushed after."""


class ByteDetokenizer:
    """For byte-level vocabularies."""

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int]) -> None:
        self._bytes = tokenizer.token_bytes
        self._hidden = hidden
        self._decoder = _utf8(errors="replace")

    def push(self, ids: Sequence[int]) -> str:
        hidden, token_bytes = self._hidden, self._bytes
        return self._decoder.decode(b"".join([token_bytes(token) for token in ids if token not in hidden]))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """For all others.

    `_ids[:_told]` is context whose text was given out; the text of `_ids` beyond that of the context is new. It is
    given out when it ends with a whole character: not with U+FFFD, and not in a row of byte tokens, since one invalid
    byte makes the whole row invalid. Then the new tokens become the context, which is therefore never without text of
    its own, and what a decoder does at the start of a text (dropping a space) touches both texts alike.
    """

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._ids: list[int] = []
        self._told = 0
        self._context = ""

    def push(self, ids: Sequence[int]) -> str:
        # Ids beyond the vocabulary (models pad theirs) have no text and are not neighbours either.
        new = [token for token in ids if token not in self._hidden and self._tokenizer.piece(token) is not None]
        if not new:
            return ""
        self._ids += new
        if self._tokenizer.is_byte(new[-1]):
            return ""
        text = self._tokenizer.decode(self._ids)
        if text.endswith(_INCOMPLETE) or len(text) <= len(self._context) or not text.startswith(self._context):
            return ""
        told = text[len(self._context) :]
        del self._ids[: self._told]
        self._told = len(self._ids)
        self._context = self._tokenizer.decode(self._ids)
        return told

    def finish(self) -> str:
        return self._tokenizer.decode(self._ids)[len(self._context) :]


def detokenizer(tokenizer: Tokenizer, *, show_special: bool = False, shown: Collection[str] = ()) -> Detokenizer:
    """A detokenizer for one answer; special tokens have no text unless `show_special`, or they are `shown`."""
    hidden = frozenset() if show_special else tokenizer.special_ids
    if shown:
        hidden = frozenset(token for token in hidden if tokenizer.piece(token) not in shown)
    return ByteDetokenizer(tokenizer, hidden) if tokenizer.byte_level else WindowDetokenizer(tokenizer, hidden)
