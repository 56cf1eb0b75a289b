"""Tokenizers of Hugging Face folders: text to token ids, chat messages to a prompt, token ids to text.

`Tokenizers` keeps the ones in use. Loading one takes a second and a long prompt tens of milliseconds, so both are done
by a few threads; the tokenizer's own code releases the interpreter's lock while it encodes a batch, and only then.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import re
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any, TypeVar

from gateway.errors import TooMany
from services.errors import Invalid, Unmet
from services.text import agreeing, counted

MOST_ASIDE = 64
"""Texts that wait for a turn aside."""
_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")
R = TypeVar("R")


class TooLong(Invalid):
    """A text that has more tokens than it may have."""


class Tokenizer:
    """One model's tokenizer. Safe to use from several threads at once: nothing here changes after construction but the
    memory of token bytes, whose entries are each written whole."""

    def __init__(self, folder_tokenizer: Any) -> None:
        """`folder_tokenizer`: what transformers made of the folder."""
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
        decoder = json.loads(self._rust.to_str())["decoder"] if self._rust is not None else None
        self.byte_level = decoder is not None and decoder["type"] == "ByteLevel"
        """Whether text is exactly the tokens' bytes in a row, so that it can be decoded token by token."""
        self._longest = self._find_longest()
        template = getattr(folder_tokenizer, "chat_template", None) or ""
        self.template = template if isinstance(template, str) else "\n".join(template.values())
        """The folder's chat template, all of them if it has several."""

    def encode(self, text: str, special: bool, most: int | None = None) -> list[int]:
        """Token ids of `text`; `special`: with what the tokenizer puts around a text of its own accord (a BOS). Raises
        TooLong where it is plain before it is encoded that they are more than `most`."""
        if most is not None and self._longest and (least := -(-len(text) // self._longest)) > most:
            raise TooLong(f"at least {least} tokens")
        if self._rust is not None:
            ids: list[int] = self._rust.encode_batch_fast([text], add_special_tokens=special)[0].ids
            return ids
        return list(self._hf.encode(text, add_special_tokens=special))

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
        """Whether it stands for one byte ("<0xE4>") in a vocabulary that falls back to bytes."""
        piece = self.piece(token)
        return piece is not None and _BYTE_PIECE.fullmatch(piece) is not None

    def token_bytes(self, token: int) -> bytes:
        """What the token adds to a text, in UTF-8: the tokens' bytes in a row are the text, but for a space that some
        tokenizers drop in front."""
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
        return piece.replace("\u2581", " ").encode() if "\u2581" in piece else self.decode([token]).encode()

    def chat(
        self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any], most: int | None = None
    ) -> list[int]:
        """The prompt's token ids by the folder's chat template. Raises Invalid when there is none or when the template
        refuses the messages, and TooLong as `encode`."""
        import jinja2

        if getattr(self._hf, "chat_template", None) is None:
            raise Invalid("this model has no chat template: use /v1/completions")
        options = {"add_generation_prompt": True, **options}
        try:
            prompt: str = self._hf.apply_chat_template(list(messages), tokenize=False, **options)
            return self.encode(prompt, False, most)
        except jinja2.TemplateError as error:
            raise Invalid(f"the model's chat template refused the messages: {error}") from None
        except (ValueError, TypeError, LookupError) as error:
            raise Invalid(f"the messages do not suit the model's chat template: {error}") from None


@cache
def _byte_of_character() -> dict[str, int]:
    """Byte-level vocabularies write each byte as one printable character: those that are printable in Latin-1 as
    themselves, the others as the characters from U+0100 on, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (number for number in range(256) if number not in printable)
    return {chr(number): number for number in printable} | {chr(0x100 + i): number for i, number in enumerate(others)}


_importing = threading.Lock()
"""Transformers fills its module in as names are asked for: two threads that import it at once may find it half
filled."""


def load(path: str) -> Tokenizer:
    """Reads the tokenizer of a folder. Takes about a second. Raises Unmet when there is none that can be read."""
    with _importing:
        from transformers import AutoTokenizer

    try:
        tokenizer = Tokenizer(AutoTokenizer.from_pretrained(path, local_files_only=True))
    except Exception as error:  # the libraries raise all kinds at a broken file, a bare Exception among them
        text = str(error).strip().splitlines()
        raise Unmet(f"the tokenizer in {path} cannot be used: {text[0] if text else type(error).__name__}") from error
    # Transformers and vocabularies are some hundred thousand objects that stay: walking them in every full collection
    # would stop all streams for tens of milliseconds.
    gc.freeze()
    return tokenizer


def without_torch() -> None:
    """Lets transformers believe that torch is not installed, for the whole process. A gateway runs no model: this
    saves three seconds of its start and 260 MiB of its memory. Only before transformers is imported."""
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it would advise to install it


class Tokenizers:
    """The tokenizers in use, by folder and generation, and the threads that work with them."""

    def __init__(self, *, threads: int, kept: int, inline_characters: int, loader: Callable[[str], Tokenizer] = load):
        """`kept`: how many stay in memory (a large vocabulary takes about 100 MiB). `inline_characters`: a text up to
        this length is encoded at once, as handing it to a thread would cost more."""
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="tokenize")
        self._turn = asyncio.Semaphore(max(1, threads - 1))
        """Of what runs aside; a thread is left for prompts."""
        self._waiting = 0
        """For a turn."""
        self._kept = kept
        self._inline_characters = inline_characters
        self._loader = loader
        self._known: OrderedDict[tuple[str, int], asyncio.Future[Tokenizer]] = OrderedDict()

    async def get(self, path: str, generation: int) -> Tokenizer:
        """The tokenizer of a folder, loaded once for all who wait for it. Raises Unmet; the next call tries again."""
        key = (path, generation)
        found = self._known.get(key)
        if found is None or (found.done() and (found.cancelled() or found.exception() is not None)):
            found = self._begin(key)
        else:
            self._known.move_to_end(key)
            if found.done():
                return found.result()
        return await asyncio.shield(found)

    def prefetch(self, folders: Iterable[tuple[str, int]]) -> None:
        """Begins to load those that are not loaded: nobody waits for them yet, so nobody hears of a failure either."""
        for path, generation in folders:
            if (path, generation) not in self._known:
                self._begin((path, generation)).add_done_callback(_seen)

    def _begin(self, key: tuple[str, int]) -> asyncio.Future[Tokenizer]:
        loading = asyncio.get_running_loop().run_in_executor(self._threads, self._loader, key[0])
        self._known[key] = loading
        while len(self._known) > self._kept:
            self._known.popitem(last=False)
        return loading

    async def run(self, characters: int, work: Callable[..., R], *arguments: Any, **options: Any) -> R:
        """Calls `work`, in a thread when it has to do with more than a few characters."""
        if characters <= self._inline_characters:
            return work(*arguments, **options)
        return await asyncio.get_running_loop().run_in_executor(self._threads, partial(work, *arguments, **options))

    async def run_aside(self, characters: int, work: Callable[..., R], *arguments: Any, **options: Any) -> R:
        """The same for what nobody's answer waits for, in one thread less. A turn lasts until the work is done, also
        where nobody waits for it any more. Raises TooMany."""
        if characters <= self._inline_characters:
            return work(*arguments, **options)
        if self._waiting >= MOST_ASIDE:
            raise TooMany(
                f"{counted(self._waiting, 'text')} {agreeing(self._waiting, 'is', 'are')} waiting to be tokenized or "
                "put together"
            )
        self._waiting += 1
        try:
            await self._turn.acquire()
        finally:
            self._waiting -= 1
        loop = asyncio.get_running_loop()

        def done(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # of a loop that has ended meanwhile
                loop.call_soon_threadsafe(self._turn.release)

        doing = self._threads.submit(partial(work, *arguments, **options))
        doing.add_done_callback(done)
        return await asyncio.wrap_future(doing)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def _seen(loading: asyncio.Future[Tokenizer]) -> None:
    """The next request for it tries again and reports."""
    if not loading.cancelled():
        loading.exception()
