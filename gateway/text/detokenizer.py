"""Token ids to text while they arrive: never half a character, and the parts together are what decoding the whole
gives.

There are two ways. Where a text is its tokens' bytes in sequence (byte-level vocabularies: Llama 3, Qwen, GPT), an
incremental UTF-8 decoder is enough, and exact. Elsewhere (SentencePiece vocabularies, byte fallback, word pieces) a
token's text depends on its neighbours, and a window of recent tokens is decoded with and without the new ones.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from tokenization.tokenizer import Tokenizer

_INCOMPLETE = "\ufffd"
_CONTEXT = 8
"""Number of a prompt's tokens with which its answer's first tokens are decoded."""
_LOOKED_AT = 64
"""Number of tokens at a prompt's end among which the context is looked for; templates may end a prompt with several
special tokens."""
_utf8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer(Protocol):
    """The text of one answer."""

    def push(self, ids: Sequence[int]) -> str:
        """The text that `ids` complete, possibly none."""

    def finish(self) -> str:
        """The text that is still held back, with U+FFFD for characters that never became complete. Nothing may be
        pushed after this."""


class ByteDetokenizer:
    """A detokenizer for byte-level vocabularies."""

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
    """A detokenizer for all other vocabularies.

    `_ids[:_told]` is context whose text was sent; the text of `_ids` beyond that of the context is new. It is sent when
    it ends with a whole character: not with U+FFFD, and not with byte tokens, since one invalid byte makes the whole
    run of them invalid. Then the new tokens become the context, which is therefore never without text of its own, and
    what a decoder does at the start of a text (dropping a space) touches both texts alike. The first context is the end
    of the prompt: where an answer continues a text, its first token keeps its space.
    """

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int], before: Sequence[int] = ()) -> None:
        """`before`: the prompt's token ids."""
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._ids = self._end_of(before)
        self._told = len(self._ids)
        self._context = tokenizer.decode(self._ids) if self._ids else ""

    def _end_of(self, prompt: Sequence[int]) -> list[int]:
        """The prompt's last tokens with a text. Byte tokens at its very end are left out if there are others before
        them: together with byte tokens of the answer they would be one run."""
        tokenizer = self._tokenizer
        seen = [
            token
            for token in prompt[-_LOOKED_AT:]
            if token not in tokenizer.special_ids and tokenizer.piece(token) is not None
        ][-_CONTEXT:]
        whole = len(seen)
        while whole and tokenizer.is_byte(seen[whole - 1]):
            whole -= 1
        return seen[:whole] or seen

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


def detokenizer(
    tokenizer: Tokenizer,
    *,
    before: Sequence[int] = (),
    show_special: bool = False,
    show_marks: bool = False,
) -> Detokenizer:
    """A detokenizer for one answer to the prompt `before`. Special tokens, and those that end an answer, have no text
    unless `show_special` is set. `show_marks`: only those that end an answer have none."""
    hidden = frozenset() if show_special else tokenizer.end_ids
    if not show_special and not show_marks:
        hidden |= tokenizer.special_ids
    return ByteDetokenizer(tokenizer, hidden) if tokenizer.byte_level else WindowDetokenizer(tokenizer, hidden, before)
