"""A checkpoint's tokenizer: text to token ids, token ids to text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from services.errors import Invalid
from tokenization import chat

_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE = "\u2581"
"""Character that SentencePiece writes for a space."""
_END_TEXTS = ("<|eom_id|>", "<|content_model_end_sampling|>")
"""Added tokens that SGLang ends an answer at, though no configuration names them."""


class TooLong(Invalid):
    """A text with more tokens than its model takes."""


class Tokenizer:
    """One model's tokenizer. Several threads may use it at once: after construction nothing changes but two caches, of
    token bytes and of roles, whose entries are each written whole."""

    def __init__(self, folder_tokenizer: Any, template_places: Mapping[str, str] | None = None) -> None:
        """`folder_tokenizer`: the tokenizer of transformers that `loading` made of the folder. `template_places`: files
        that hold its chat templates. Raises Unmet for a tokenizer that cannot be used; see `chat.Template`."""
        self._hf = folder_tokenizer
        self._rust = getattr(folder_tokenizer, "backend_tokenizer", None)
        if self._rust is not None:
            # A prompt that is too long is refused with its length, never cut.
            self._rust.no_truncation()
            self._rust.no_padding()
        self._bytes: dict[int, bytes] = {}
        self.special_ids = frozenset(
            number for number, token in folder_tokenizer.added_tokens_decoder.items() if token.special
        )
        self.end_ids = _end_ids(folder_tokenizer)
        """Token ids that end an answer according to the tokenizer, whatever config.json says; often the same."""
        decoder = json.loads(self._rust.to_str())["decoder"] if self._rust is not None else None
        self.byte_level = decoder is not None and decoder["type"] == "ByteLevel"
        """Whether text is exactly the tokens' bytes in a row, so that it can be decoded token by token."""
        self._longest = self._find_longest()
        self._chat = chat.Template(folder_tokenizer, template_places or {})

    @property
    def template(self) -> str:
        """The text of the folder's chat template, of all of them if it has several; empty if it has none."""
        return self._chat.text

    def added_tokens(self) -> list[str]:
        """Texts of the tokens that were added to the vocabulary: marks of turns, of calls, of reasoning."""
        return sorted(self._hf.get_added_vocab())

    def encode(self, text: str, special: bool, most: int | None = None) -> list[int]:
        """Token ids of `text`; `special`: with what the tokenizer puts around a text of its own accord (a BOS). Raises
        TooLong where it is plain before it is encoded that they are more than `most`."""
        if most is not None and self._longest and (least := -(-len(text) // self._longest)) > most:
            raise TooLong(f"at least {least} tokens")
        if self._rust is not None:
            ids: list[int] = self._rust.encode_batch_fast([text], add_special_tokens=special)[0].ids
            return ids
        return list(self._hf.encode(text, add_special_tokens=special))

    def encode_pair(self, first: str, second: str) -> list[int]:
        """Token ids of two texts as the tokenizer puts them together for a model that compares them."""
        if self._rust is not None:
            ids: list[int] = self._rust.encode_batch_fast([(first, second)], add_special_tokens=True)[0].ids
            return ids
        return list(self._hf.encode(first, second))

    def _find_longest(self) -> int:
        """Characters of the longest token; 0 where a text may become shorter before it is cut into tokens."""
        strips = any(token.lstrip or token.rstrip for token in self._hf.added_tokens_decoder.values())
        if self._rust is None or not self.byte_level or strips or self._rust.normalizer is not None:
            return 0
        return max(map(len, self._rust.get_vocab(with_added_tokens=True)), default=0)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, special tokens shown."""
        if self._rust is not None:
            text: str = self._rust.decode(ids, skip_special_tokens=False)
            return text
        return str(self._hf.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def piece(self, token: int) -> str | None:
        """The token as its vocabulary writes it; None when the id is not in it (models pad their vocabularies)."""
        if self._rust is not None:
            written: str | None = self._rust.id_to_token(token)
            return written
        return self._hf.convert_ids_to_tokens(token) if token < len(self._hf) else None

    def is_byte(self, token: int) -> bool:
        """Whether the token stands for one byte ("<0xE4>") in a vocabulary that falls back to bytes."""
        piece = self.piece(token)
        return piece is not None and _BYTE_PIECE.fullmatch(piece) is not None

    def token_bytes(self, token: int) -> bytes:
        """Bytes that the token adds to a text in UTF-8. The tokens' bytes in a row are the text, but for a space that
        some tokenizers drop at the beginning of a text."""
        known = self._bytes.get(token)
        if known is None:
            known = self._bytes[token] = self._find_bytes(token)
        return known

    def _find_bytes(self, token: int) -> bytes:
        piece = self.piece(token)
        if piece is None:
            return b""
        if self.byte_level:
            table = _byte_of_character()
            numbers = [table.get(character) for character in piece]
            if None in numbers:
                return piece.encode()  # an added token, written as it is meant
            return bytes(number for number in numbers if number is not None)
        single = _BYTE_PIECE.fullmatch(piece)
        if single is not None:
            return bytes([int(single[1], 16)])
        return piece.replace(_SPACE, " ").encode() if _SPACE in piece else self.decode([token]).encode()

    def chat(
        self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any], most: int | None = None
    ) -> list[int]:
        """Token ids of the prompt that the folder's chat template makes of `messages`, as they come from
        `gateway.openai.bodies`. `options`: the template's own, by its names. Raises Invalid when there is no template
        or it refuses the messages, chat.UnknownRole, and TooLong as `encode` does."""
        prompt = self._chat.render(messages, options)
        try:
            return self.encode(prompt, False, most)
        except (ValueError, TypeError) as error:  # half a character, which is no text in Rust
            raise Invalid(f"the messages do not suit the model's chat template: {error}") from None


def _end_ids(folder_tokenizer: Any) -> frozenset[int]:
    added = folder_tokenizer.get_added_vocab()
    ends = {added[text] for text in _END_TEXTS if text in added}
    end = folder_tokenizer.eos_token_id
    return frozenset(ends if end is None else {*ends, int(end)})


@cache
def _byte_of_character() -> dict[str, int]:
    """Byte of each character in byte-level vocabularies. They write each byte as one printable character: those that
    are printable in Latin-1 as themselves, the others as the characters from U+0100 on, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (number for number in range(256) if number not in printable)
    return {chr(number): number for number in printable} | {chr(0x100 + i): number for i, number in enumerate(others)}
