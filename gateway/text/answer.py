"""One answer while it arrives: tokens to text, stop strings, counts, log-probabilities. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.text.detokenizer import detokenizer
from gateway.text.stops import StopMatcher
from protos import common_pb2
from tokenization.tokenizer import Tokenizer

_REASONS = {common_pb2.STOP: "stop", common_pb2.LENGTH: "length"}


@dataclass(frozen=True, slots=True)
class Scored:
    """A token with its log-probability and the best ones in its place."""

    token: int
    logprob: float | None
    """The token's log-probability; None for a prompt's first token."""
    top: Sequence[tuple[int, float]] | None
    offset: int
    """Number of characters before the token, in the answer, and in its prompt if the answer begins with that."""

    @classmethod
    def of(cls, token: int, scores: common_pb2.TokenLogprob, offset: int) -> Scored:
        return cls(token, scores.logprob, [(best.token_id, best.logprob) for best in scores.top], offset)


class Answer:
    """The text of one answer. It is fed with a request's chunks from however many attempts, which form one sequence of
    tokens."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        before: Sequence[int] = (),
        stops: Sequence[str] = (),
        show_special: bool = False,
        show_marks: bool = False,
    ) -> None:
        """`before`: the prompt's token ids. `show_marks`: special tokens that do not end the answer have a text, for
        parsers."""
        self._detokenizer = detokenizer(tokenizer, before=before, show_special=show_special, show_marks=show_marks)
        self._stops = StopMatcher(stops) if stops else None
        self._scored: list[Scored] = []
        self._prompt_scores: list[common_pb2.TokenLogprob] = []
        self._decoded = 0  # characters, those that the stop matcher holds back included
        self._given = 0
        self.tokens = 0
        """Number of output tokens, those of a matched stop string included."""
        self.latest: Sequence[int] = ()
        """The tokens of the last push, as far as they count."""
        self.cached_tokens = 0
        self.embedding: Sequence[float] = ()
        """The vector of a request for an embedding, once the request has ended."""
        self.label_logprobs: Sequence[float] = ()
        """Log-probabilities of the sampling's label tokens after the prompt, once the request has ended."""
        self.finish_reason: str | None = None
        """OpenAI's finish reason once the answer has ended: "stop" also for a matched stop string, though the engine
        may go on; "tool_calls" if the answer called some."""

    @property
    def matched_stop(self) -> str | None:
        """The stop string that ended the answer; None if none did."""
        return self._stops.matched if self._stops is not None else None

    def follow(self, text: str) -> None:
        """Has offsets count from the end of `text`, which the answer follows. To be called before the first push."""
        self._decoded = self._given = len(text)

    def push(self, chunk: common_pb2.TokenChunk) -> str:
        """The text that may be sent now. Once there is a `finish_reason` nothing more may be pushed."""
        if not self.tokens:  # what a later attempt found cached was partly answer
            self.cached_tokens = self.cached_tokens or chunk.cached_tokens
        ids, finish = chunk.token_ids, chunk.finish
        self._prompt_scores += chunk.prompt_logprobs
        if self._stops is None and not chunk.logprobs:
            self.latest = ids
            text = self._detokenizer.push(ids)
            self._decoded += len(text)
        else:
            text = self._push_singly(chunk)
        self.tokens += len(self.latest)
        if finish and self.finish_reason is None:
            self.embedding, self.label_logprobs = chunk.embedding, chunk.label_logprobs
            self.finish_reason = _REASONS.get(finish, "stop")
            text += self._end()
        self._given += len(text)
        return text

    def _push_singly(self, chunk: common_pb2.TokenChunk) -> str:
        """The text of a chunk, taken token by token: a stop string in the middle ends the answer there, and each token
        has an offset."""
        told: list[str] = []
        self.latest = taken = []
        for index, token in enumerate(chunk.token_ids):
            if chunk.logprobs:
                self._scored.append(Scored.of(token, chunk.logprobs[index], self._decoded))
            taken.append(token)
            text = self._detokenizer.push((token,))
            self._decoded += len(text)
            if self._stop_in(text, told):
                break
        return "".join(told)

    def _stop_in(self, text: str, told: list[str]) -> bool:
        """Appends `text` to `told` as far as the stop strings allow; returns whether one of them ended the answer."""
        if self._stops is None:
            told.append(text)
            return False
        text, stopped = self._stops.push(text)
        told.append(text)
        if stopped:
            self.finish_reason = "stop"
            end = self._given + sum(map(len, told))
            self._scored = [scored for scored in self._scored if scored.offset < end]
        return stopped

    def _end(self) -> str:
        told: list[str] = []
        if not self._stop_in(self._detokenizer.finish(), told) and self._stops is not None:
            told.append(self._stops.finish())
        return "".join(told)

    def take_prompt_scores(self) -> list[common_pb2.TokenLogprob]:
        """Scores of the prompt's tokens that came since the last call."""
        scores, self._prompt_scores = self._prompt_scores, []
        return scores

    def take_scored(self) -> list[Scored]:
        """The scored tokens whose text has begun to be sent since the last call; at the end all that are left."""
        count = len(self._scored)
        if self.finish_reason is None:
            count = next((n for n, one in enumerate(self._scored) if one.offset >= self._given), count)
        scored, self._scored = self._scored[:count], self._scored[count:]
        return scored
