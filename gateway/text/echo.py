"""A prompt with which its answer begins: its text, and the log-probabilities of its tokens if they are wanted. No
I/O."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from gateway.errors import BadField
from gateway.request import Request
from gateway.text.answer import Scored
from protos import common_pb2
from tokenization.tokenizer import Tokenizer

MOST_SCORED = 1 << 22
"""The most log-probabilities of one request's prompts, in all choices: their own, and the best ones beside them. As
JSON they are 100 MB, and an answer that is no stream is held until it is whole."""


def check(request: Request, prompts: Iterable[Sequence[int]]) -> None:
    """Raises BadField if more log-probabilities are wanted than can be sent."""
    if not request.sampling.HasField("prompt_logprobs_from"):
        return
    count = sum(map(len, prompts)) * request.choices * (1 + request.sampling.top_logprobs)
    if count > MOST_SCORED:
        raise BadField(
            f"'echo' with 'logprobs' would be {count} log-probabilities of prompts: at most {MOST_SCORED} come back.",
            "echo",
        )


def offsets(tokenizer: Tokenizer, ids: Sequence[int], text: str) -> list[int]:
    """Number of characters of `text` before each token of it. A special token that is not in the text (a BOS that the
    tokenizer has put there) has none, nor has the space that some tokenizers drop at the front."""
    found, at = [], 0
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for token in ids:
        found.append(at)
        written = decoder.decode(tokenizer.token_bytes(token))
        if written and not text.startswith(written, at):
            if token in tokenizer.special_ids:
                written = ""
            elif text.startswith(written.removeprefix(" "), at):
                written = written.removeprefix(" ")
        at = min(at + len(written), len(text))
    return found


class Echo:
    """The prompt with which one choice begins. Its text is sent at once; with log-probabilities, which come over time,
    as far as these have come."""

    def __init__(self, text: str = "", ids: Sequence[int] = (), places: Sequence[int] = ()) -> None:
        """`places`: the `offsets` of `ids`, the tokens that are sent with the text; empty: the text is sent alone."""
        self.text = text
        self._ids = ids
        self._places = places
        self._next = 0  # number of the next token to score
        self._told = 0  # characters that were sent

    def more(self, logprobs: Iterable[common_pb2.TokenLogprob]) -> tuple[str, list[Scored]]:
        """The text and scored tokens that can be sent now. `logprobs`: those of the next tokens; the first token has
        none. All of it has to be sent before any of the answer."""
        scored = []
        if self._ids and not self._next:
            scored.append(Scored(self._ids[0], None, None, 0))
            self._next = 1
        for one in logprobs:
            scored.append(Scored.of(self._ids[self._next], one, self._places[self._next]))
            self._next += 1
        begin = self._told
        self._told = self._places[self._next] if self._next < len(self._ids) else len(self.text)
        return self.text[begin : self._told], scored
