"""A request as the gateway works on it, whichever API it came by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.tools.request import Tools
from protos import common_pb2
from services.telemetry.spans import UNTRACED, Span


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt; exactly one of the three is given."""

    text: str | None = None
    special: bool = True
    """Whether a text gets what the tokenizer puts around one of its own accord."""
    tokens: Sequence[int] | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    template_options: Mapping[str, Any] = field(default_factory=dict)
    """Of the chat template, by its own names."""

    @property
    def characters(self) -> int:
        """About as many as there are to tokenize."""
        if self.messages is not None:
            # Names and arguments of calls are written out by templates too.
            return len(str(self.messages)) + len(str(self.template_options))
        return len(self.text or "")


@dataclass(frozen=True, slots=True)
class Request:
    """What a client asks for: each of `prompts`, answered `choices` times."""

    request_id: str
    model: str
    arrival_s: float
    """By time.monotonic, which the loop's clock agrees with but for its steps of a millisecond."""
    prompts: Sequence[Prompt]
    sampling: common_pb2.Sampling
    """Its max_new_tokens 0: as many as the context leaves, or none with `prompt_only`. With OpenAI's defaults for what
    the client left open."""
    limit_given: bool
    """Whether the client gave max_new_tokens, so that more than the context leaves is refused, unless the gateway is
    set to cut it; a default is cut."""
    slo: common_pb2.Slo
    """As the client gave it; what is 0 is the model's default."""
    prompt_field: str = "prompt"
    """Names, in errors, where prompts and limit came from."""
    limit_field: str = "max_tokens"
    choices: int = 1
    left_open: frozenset[str] = frozenset()
    """Of `defaults.OPEN`, what the client said nothing of."""
    stops: tuple[str, ...] = ()
    show_special: bool = False
    """Whether special tokens have text."""
    grammar_field: str = ""
    """Name, in errors, where the grammar came from."""
    tools: Tools | None = None
    """That answers may call."""
    embeds: bool = False
    """The prompts' embeddings are wanted, and no answers."""
    dimensions: int | None = None
    """Of an embedding; none: the model's."""


@dataclass(frozen=True, slots=True)
class AnswerJob:
    """One answer, or embedding, to be made: one prompt in token ids, checked against its model."""

    request_id: str
    model: str
    token_ids: Sequence[int]
    sampling: common_pb2.Sampling
    slo: common_pb2.Slo
    """With the model's defaults filled in."""
    arrival_s: float
    embeds: bool = False
    span: Span = UNTRACED
    """Of the request."""
